"""The table of layouts in benchmarks/layouts.py, for tests."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "layout_benchmark", Path(__file__).parent.parent / "benchmarks" / "layouts.py"
)
assert _spec is not None and _spec.loader is not None
table = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = table
_spec.loader.exec_module(table)
