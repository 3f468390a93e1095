"""The house: who may import whom, held by reading the imports of every module, those within functions included."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxshard"

FLOORS = (
    ("errors", "config", "options", "config_file", "console", "interrupt", "names"),
    ("parallel", "models"),
    ("data",),
    ("training", "inference"),
    ("insight",),
    ("commands", "cli", "__main__", "__init__"),
)
"""Lowest first. A module imports from its own floor and from those below."""

SEPARATE = {("models", "parallel")}
"""Neighbours on a floor of which the first must not import the second: a model knows no devices."""

WITHOUT_JAX = (
    *("errors", "config", "options", "config_file", "console", "interrupt"),
    *("commands", "cli", "__main__", "__init__"),
)
"""Start-up, --help and bad input must not wait for jax; `parallel.schedule` is plain tables."""


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
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
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
            elif (here, there) in SEPARATE:
                found.append(f"{name} imports {target}: {here} must not know {there}")
    return found


def test_imports_go_down_only():
    assert faults(modules()) == []


def test_modules_do_not_import_one_another_in_a_circle():
    """Within a floor too: imports at module level, followed as deep as they go."""
    sources = modules()
    edges = {
        name: {
            found
            for target in imports(name, top_level(source), is_package(name, sources))
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


def top_level(source: str) -> str:
    """Returns the import statements at module level."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return "\n".join(ast.unparse(node) for node in nodes)


def without_jax() -> list[str]:
    names = [f"jaxshard.{name}" if name != "__init__" else "jaxshard" for name in WITHOUT_JAX]
    return names + ["jaxshard.parallel.schedule"] * (ROOT / "parallel" / "schedule.py").exists()


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
        ("jaxshard.models.x", "from jaxshard.parallel import rules", "models must not know parallel"),
        ("jaxshard.models.x", "def f():\n    import jaxshard.parallel.mesh", "models must not know parallel"),
        ("jaxshard.parallel.x", "from jaxshard.training.loop import run", "from a higher floor"),
        ("jaxshard.parallel.x", "from ..training import loop", "from a higher floor"),
        ("jaxshard.training.x", "if True:\n    from jaxshard import insight", "from a higher floor"),
        ("jaxshard.config", "from jaxshard.commands.cli import main", "from a higher floor"),
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
        ("jaxshard.training.x", "from jaxshard.inference import generate"),
        ("jaxshard.parallel.x", "from jaxshard.models import presets\nfrom . import mesh\nimport jax"),
        ("jaxshard.commands.cli", "from jaxshard.errors import InputError"),
    ],
)
def test_a_good_import_is_let_through(name, source):
    assert faults({name: source}) == []
