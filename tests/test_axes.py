"""The table of axes: what follows from a row, and that a new row needs no other change."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxshard.parallel.axes import ALIASES, AXES, BATCH_AXES, ROWS, VOCAB_AXES, MeshShape, axes_text, in_short

ROOT = Path(__file__).parent.parent
TINY = ["--config", str(ROOT / "configs" / "tiny.yaml"), "--json"]
COMMANDS = {
    "check": ["check", *TINY, "--mesh", "dp=2,{}tp=2", "--zero", "3"],
    "explain": ["explain", *TINY, "--mesh", "dp=2,{}tp=2", "--zero", "1"],
    "plan": ["plan", *TINY, "--target", "h100:8", "--confirm", "0"],
}


def test_the_shape_of_a_mesh():
    shape = MeshShape(data=4, model=2)
    assert (shape.devices, shape.batch_ways, shape["stage"]) == (8, 4, 1)
    assert shape.by_axis == {"replica": 1, "stage": 1, "data": 4, "model": 2}
    assert (shape.used(), shape.ways(("data", "model"))) == (("data", "model"), 8)
    assert (str(shape), repr(shape)) == ("dp=4,tp=2", "MeshShape(data=4, model=2)")
    assert MeshShape(replica=2, data=4).product_text(BATCH_AXES) == "replica 2 x dp 4"
    with pytest.raises(AssertionError, match="are no axes"):
        MeshShape(dp=4)


def test_what_follows_from_the_tables():
    assert tuple(row.name for row in ROWS) == AXES
    assert (BATCH_AXES, VOCAB_AXES) == (("replica", "data"), ("stage", "model"))
    assert ALIASES["dp"] == ALIASES["data"] == "data"
    assert (axes_text(("data", "model")), axes_text(())) == ("dp+tp", "-")
    assert in_short("bytes over data+model") == "bytes over dp+tp"


def answers(root: Path, more: str) -> dict[str, dict]:
    """What the commands say with the package in `root`; `more` is written into the mesh."""
    code = f"""
import io, json, sys
from contextlib import redirect_stdout
from jaxshard.commands.cli import run
found = {{}}
for name, line in json.loads({json.dumps(json.dumps(COMMANDS))}).items():
    with redirect_stdout(io.StringIO()) as out:
        code = run([part.format({more!r}) for part in line])
    assert code == 0, (name, code)
    found[name] = json.loads(out.getvalue())
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env={"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_an_axis_is_added_by_a_row(tmp_path):
    """An axis `context` of size 1, in the table of axes and in no other file: every command says what it said."""
    shutil.copytree(ROOT / "jaxshard", tmp_path / "jaxshard")
    table = tmp_path / "jaxshard" / "parallel" / "axes.py"
    row = '    Axis("context", "cp", "long sequences split over devices", "inside a host"),\n'
    text = table.read_text(encoding="utf-8")
    table.write_text(re.sub(r"(?m)^    Axis\(MODEL,", row + r"\g<0>", text), encoding="utf-8")
    assert table.read_text(encoding="utf-8") != text
    assert answers(tmp_path, "cp=1,") == answers(ROOT, "")
