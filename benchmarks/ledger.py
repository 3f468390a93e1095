"""Found against expected collectives of many layouts, compiled for devices that may be absent.

    python benchmarks/ledger.py h100:8 [v5e:2x4 ...]

Prints a line a layout: missing and unexpected bytes, and the compiler's rewrites. Exits with 1 if any disagrees.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from ledger_layouts import ALL  # pyright: ignore[reportMissingImports]

from jaxshard.commands.explain import explain_config


def main() -> None:
    """Compares every layout on every target that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", help="such as h100:8 or v5e:2x4")
    bad = 0
    for target in parser.parse_args().targets:
        for name, case in ALL.items():
            check = explain_config(case, target).check
            assert check is not None, name
            missing, unexpected = (sum(item.bytes for item in items) for items in (check.missing, check.unexpected))
            bad += bool(missing or unexpected)
            print(f"{target}  {name:32}  missing {missing}  unexpected {unexpected}  {'; '.join(check.rewrites)}")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
