"""The house: who may import whom, held by reading the imports of every module, those within functions included."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxshard"

FLOORS = (
    "errors interrupt console suggestions names",
    "config",
    "models",
    "parallel",
    "data",
    "training",
    "inference",
    "xla",
    "analysis",
    "planner",
    "views",
    "commands __main__ __init__",
)
"""Rooms, lowest floor first. A module imports from its own room and from floors below, wherever the import stands."""

WITHOUT_JAX = (
    *("errors", "interrupt", "console", "suggestions", "config", "config.groups", "config.file", "config.options"),
    *("commands", "commands.cli", "commands.table", "__main__", "__init__", "parallel.axes", "parallel.schedule"),
)
"""Start-up, --help and bad input must not wait for jax; `parallel.axes` and `parallel.schedule` are plain tables."""


def modules() -> dict[str, str]:
    """Returns dotted module name -> source, for every file of the package."""
    return {name_of(path): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


def name_of(path: Path) -> str:
    parts = ("jaxshard", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(name: str, source: str, package: bool = False) -> Iterator[str]:
    """Yields the dotted names that a module imports, anywhere in it; relative ones made absolute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                base = ".".join([*parts[: len(parts) - node.level + package], base]).rstrip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_package(name: str, sources: dict[str, str]) -> bool:
    return any(other.startswith(f"{name}.") for other in sources)


def room(dotted: str) -> str | None:
    """Returns the second part of jaxshard.ROOM..., "__init__" for the package itself, None for other packages."""
    parts = dotted.split(".")
    return None if parts[0] != "jaxshard" else parts[1] if len(parts) > 1 else "__init__"


def faults(sources: dict[str, str]) -> list[str]:
    """Returns one line for each import that goes up, or to a neighbour that must stay unknown."""
    floor = {name: level for level, names in enumerate(FLOORS) for name in names.split()}
    found = []
    for name, source in sources.items():
        here = room(name)
        if here not in floor:
            found.append(f"{name} stands on no floor")
            continue
        for target in imports(name, source, is_package(name, sources)):
            there = room(target)
            if there is None:
                continue
            if there not in floor:
                found.append(f"{name} imports {target}, which stands on no floor")
            elif floor[there] > floor[here]:
                found.append(f"{name} imports {target} from a higher floor")
            elif floor[there] == floor[here] and there != here and here not in ("__main__", "__init__"):
                found.append(f"{name} imports {target}, a neighbour on its floor")
    return found


def test_imports_go_down_only():
    assert faults(modules()) == []


def test_modules_do_not_import_one_another_in_a_circle():
    """Within a room too, and also late or for types; followed as deep as they go."""
    sources = modules()
    edges = {
        name: {
            found
            for target in imports(name, source, is_package(name, sources))
            for found in (target, target.rpartition(".")[0])
            if found in sources and found != name and found != "jaxshard"
        }
        for name, source in sources.items()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def without_jax() -> list[str]:
    return [f"jaxshard.{name}" if name != "__init__" else "jaxshard" for name in WITHOUT_JAX]


def test_what_must_start_fast_does_not_load_jax():
    code = f"import sys, {', '.join(without_jax())}; sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr or "jax was imported"


def test_what_must_start_fast_does_not_name_jax():
    sources = modules()
    for name in without_jax():
        foreign = {target.split(".")[0] for target in imports(name, sources[name])}
        assert not foreign & {"jax", "jaxlib", "flax", "optax", "orbax"}, name


@pytest.mark.parametrize(
    "name, source, fault",
    [
        ("jaxshard.models.x", "from jaxshard.parallel import rules", "from a higher floor"),
        ("jaxshard.models.x", "def f():\n    import jaxshard.parallel.mesh", "from a higher floor"),
        ("jaxshard.parallel.x", "from jaxshard.training.loop import run", "from a higher floor"),
        ("jaxshard.parallel.x", "from ..training import loop", "from a higher floor"),
        ("jaxshard.training.x", "if True:\n    from jaxshard import analysis", "from a higher floor"),
        ("jaxshard.training.loop", "def f():\n    from jaxshard.inference import generate", "from a higher floor"),
        ("jaxshard.analysis.x", "if TYPE_CHECKING:\n    from jaxshard.views.tables import show", "from a higher floor"),
        ("jaxshard.errors", "from jaxshard.console import Console", "a neighbour on its floor"),
        ("jaxshard.config.groups", "from jaxshard.commands.cli import main", "from a higher floor"),
        ("jaxshard.data.x", "import jaxshard", "from a higher floor"),
        ("jaxshard.attic.x", "import os", "stands on no floor"),
        ("jaxshard.commands.cli", "import jaxshard.attic", "stands on no floor"),
    ],
)
def test_a_wrong_import_is_caught(name, source, fault):
    (line,) = faults({name: source})
    assert fault in line


@pytest.mark.parametrize(
    "name, source",
    [
        ("jaxshard.inference.generate", "from jaxshard.training import loop"),
        ("jaxshard.parallel.x", "from jaxshard.models import presets\nfrom . import mesh\nimport jax"),
        ("jaxshard.commands.cli", "from jaxshard.errors import InputError"),
    ],
)
def test_a_good_import_is_let_through(name, source):
    assert faults({name: source}) == []
