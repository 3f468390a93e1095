"""Two explanations compared, and one held against a lock file: peak bytes, FLOPs and bytes per axis."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxshard.errors import InputError
from jaxshard.parallel.axes import in_short

TOLERANCE = 0.02
"""Share by which a locked figure may be exceeded where --tolerance does not say."""
Figures = dict[str, float]
_ABOUT = ("target", "mesh", "zero", "jax", "compiler")


def figures(result: Mapping[str, Any]) -> Figures:
    """The figures of one explanation, as `--json` prints it, by name."""
    memory = {f"memory.{name}": value for name, value in result["memory"].items()}
    axes = {f"bytes over {name}": value for name, value in result["bytes_by_axis"].items()}
    return {"FLOPs of one device": result["flops"], **memory, **axes}


def locked(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a lock file holds."""
    about = {name: result[name] for name in _ABOUT}
    kept = figures(result)
    held = {name: kept[name] for name in kept if not name.startswith("memory.") or name == "memory.peak"}
    return {**about, "figures": held}


def exceeded(result: Mapping[str, Any], lock: Mapping[str, Any], tolerance: float) -> list[str]:
    """What exceeds a lock by more than the tolerance, one sentence each."""
    now, held = locked(result)["figures"], lock["figures"]
    found = []
    for name in dict.fromkeys([*held, *now]):
        before, after = held.get(name, 0), now.get(name, 0)
        if after > before * (1 + tolerance):
            share = f"{100 * (after / before - 1):+.1f} %" if before else "not there before"
            found.append(f"{in_short(name)}: {after:,.0f}, locked {before:,.0f} ({share})")
    return found


def hold(
    result: Mapping[str, Any], file: str, lock: Mapping[str, Any] | None, tolerance: float | None
) -> tuple[str, list[str]]:
    """Holds a result against a lock, or writes it to the file where there is none yet.

    Returns a sentence, and what exceeds the lock.

    Raises:
        InputError: the file cannot be written.
    """
    if lock is None:
        try:
            Path(file).write_text(json.dumps(locked(result), indent=2) + "\n")
        except OSError as error:
            raise InputError(f"--lock {file}: cannot be written ({error.strerror}); name a file in a folder") from None
        return f"locked in {file}", []
    return f"held against {file}", exceeded(result, lock, TOLERANCE if tolerance is None else tolerance)


def check_same(file: str, lock: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Checks that a lock is of this target, mesh and ZeRO stage. Raises InputError when it is of another."""
    for name in ("target", "mesh", "zero"):
        if lock.get(name) != about[name]:
            raise InputError(
                f"--lock {file} is of {name} {lock.get(name)!r}, and this is {about[name]!r}: keep a file for each"
            )


def read_lock(file: str) -> dict[str, Any] | None:
    """Reads a lock file, None where there is none yet. Raises InputError when it is no lock file."""
    return _read(Path(file), "--lock", _is_lock) if Path(file).exists() else None


def check_writable(option: str, path: Path, folder: bool = False, parents: bool = True) -> None:
    """Checks that a file, or files in a folder, can be written later; leaves nothing behind.

    Args:
        option: that names it.
        path: the file, or the folder.
        folder: whether it is a folder.
        parents: whether folders that are not there will be made.

    Raises:
        InputError: it cannot.
    """
    try:
        if path.exists() and not folder:
            path.open("ab").close()
            return
        place = path if folder else path.parent
        while parents and not place.exists():
            place = place.parent
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        what = "folder" if folder else "file"
        raise InputError(f"{option} {path}: cannot be written ({error.strerror}); name another {what}") from None


@dataclass(frozen=True)
class Differences:
    """What differs between two explanations: (name, in the first, in the second) each."""

    about: list[tuple[str, str, str]]
    """Target, mesh, ZeRO stage, and versions."""
    figures: list[tuple[str, float, float]]
    """Memory, FLOPs and bytes by axes."""
    reasons: list[tuple[str, int, int]]
    """Bytes of a step by reason, those that change most first."""

    own: bool = False
    """Both are of functions of the user's own, whose axes keep their names."""

    @property
    def all(self) -> list[tuple[str, Any, Any]]:
        return [*self.about, *self.figures, *self.reasons]


def differences(first: str, second: str) -> Differences:
    """What differs between two files.

    Raises:
        InputError: a file is missing or is not what `explain --json` prints.
    """
    a, b = (_read(Path(file), "--compare", _is_explanation) for file in (first, second))
    about = _changed(*({name: str(found.get(name)) for name in _ABOUT} for found in (a, b)))
    reasons = _changed(_by_reason(a), _by_reason(b))
    reasons.sort(key=lambda row: -abs(row[2] - row[1]))
    own = a.get("zero") is None and b.get("zero") is None
    return Differences(about, _changed(figures(a), figures(b)), reasons, own)


def _changed(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What two tables hold differently; what one lacks is 0 there."""
    names = dict.fromkeys([*one, *two])
    return [(name, one.get(name, 0), two.get(name, 0)) for name in names if one.get(name, 0) != two.get(name, 0)]


def _by_reason(result: Mapping[str, Any]) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in result["collectives"]:
        key = f"{row['reason']}: {row['kind']} over {'+'.join(row['axes']) or 'nothing'}"
        total[key] = total.get(key, 0) + row["bytes"] * row["count"]
    return total


def _read(path: Path, option: str, is_right: Callable[[Any], bool]) -> dict[str, Any]:
    writes = "--lock writes" if is_right is _is_lock else "--json prints"
    found: Any
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        how = "name a file" if path.is_dir() else f"make one with explain --json > {path.name}"
        raise InputError(f"{option} {path}: cannot be read ({error.strerror}); {how}") from None
    except (ValueError, RecursionError):
        found = None
    if not is_right(found):
        raise InputError(f"{option} {path}: not what explain {writes}; name another file, or make it again")
    return found


def _is_lock(found: Any) -> bool:
    return isinstance(found, dict) and _are_numbers(found.get("figures"))


def _is_explanation(found: Any) -> bool:
    """Whether everything is there that two explanations are compared by."""
    if not isinstance(found, dict) or not isinstance(found.get("collectives"), list):
        return False
    figures = [found.get("memory"), found.get("bytes_by_axis"), {"flops": found.get("flops")}]
    return all(map(_are_numbers, figures)) and all(map(_is_row, found["collectives"]))


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("axes"), list):
        return False
    texts = [row.get("reason"), row.get("kind"), *row["axes"]]
    return all(isinstance(text, str) for text in texts) and _are_numbers({k: row.get(k) for k in ("bytes", "count")})


def _are_numbers(found: Any) -> bool:
    """Whether it is a table of finite numbers, none below zero."""
    number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x <= sys.float_info.max
    return isinstance(found, dict) and all(map(number, found.values()))
