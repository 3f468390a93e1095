"""Two explanations compared, and one held against a lock file: peak bytes, FLOPs and bytes per axis."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxshard.errors import InputError

Figures = dict[str, float]


def figures(result: Mapping[str, Any]) -> Figures:
    """The figures of one explanation, as `--json` prints it, by name."""
    memory = {f"memory.{name}": value for name, value in result["memory"].items()}
    axes = {f"bytes over {name}": value for name, value in result["bytes_by_axis"].items()}
    return {"FLOPs of one device": result["flops"], **memory, **axes}


def locked(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a lock file holds."""
    about = {name: result[name] for name in ("target", "mesh", "zero", "jax", "compiler")}
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
            found.append(f"{name}: {after:,.0f}, locked {before:,.0f} ({share})")
    return found


def hold(result: Mapping[str, Any], file: str, tolerance: float) -> tuple[str, list[str]]:
    """Writes a lock file, or holds a result against the one that is there.

    Returns a sentence, and what exceeds the lock.

    Raises:
        InputError: the file cannot be written or is no lock file, or is one of another target, mesh or ZeRO stage.
    """
    path = Path(file)
    if not path.exists():
        try:
            path.write_text(json.dumps(locked(result), indent=2) + "\n")
        except OSError as error:
            raise InputError(f"--lock {file}: cannot be written ({error.strerror}); name a file in a folder") from None
        return f"locked in {file}", []
    lock = _read(path, "--lock", "figures")
    for name in ("target", "mesh", "zero"):
        if lock.get(name) != result[name]:
            raise InputError(
                f"--lock {file} is of {name} {lock.get(name)!r}, and this is {result[name]!r}: keep a file for each"
            )
    return f"held against {file}", exceeded(result, lock, tolerance)


def differences(first: str, second: str) -> tuple[list[tuple[str, float, float]], list[tuple[str, int, int]]]:
    """Figures that differ between two files, and bytes by reason that differ.

    Raises:
        InputError: a file is missing or is not what `explain --json` prints.
    """
    a, b = (_read(Path(file), "--compare", "collectives") for file in (first, second))
    one, two = figures(a), figures(b)
    changed = [
        (name, one.get(name, 0), two.get(name, 0))
        for name in dict.fromkeys([*one, *two])
        if one.get(name, 0) != two.get(name, 0)
    ]
    mine, theirs = _by_reason(a), _by_reason(b)
    reasons = [
        (name, mine.get(name, 0), theirs.get(name, 0))
        for name in dict.fromkeys([*mine, *theirs])
        if mine.get(name, 0) != theirs.get(name, 0)
    ]
    return changed, reasons


def _by_reason(result: Mapping[str, Any]) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in result["collectives"]:
        key = f"{row['reason']}: {row['kind']} over {'+'.join(row['axes']) or 'nothing'}"
        total[key] = total.get(key, 0) + row["bytes"] * row["count"]
    return total


def _read(path: Path, option: str, needed: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror}; make one with explain --json > {path.name}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or needed not in found:
        raise InputError(
            f"{option} {path}: not what explain {'--lock writes' if needed == 'figures' else '--json prints'}"
        )
    return found
