"""Every command and every claim of the README that can be run is run."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxshard.commands.cli import run
from jaxshard.commands.table import COMMANDS
from jaxshard.parallel.axes import WEIGHT_RULES, ZERO_TABLES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
LINES = [line for block in BLOCKS for line in block.splitlines()]
PROGRAM = [line for line in LINES if line.startswith("python run.py")]
SMALL = "--train.steps 2 --train.global_batch 8 --data.seq_len 32 --eval.batches 1 --log.tensorboard false"


def test_the_two_commands_stand_first():
    assert LINES[:4] == ["pip install -e .", "python run.py --mesh dp=4,tp=2", 'pip install -e ".[test]"', "pytest"]


def test_commands_run_in_their_order(tmp_path, monkeypatch, capsys):
    """As printed but for the length of training."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    assert len(PROGRAM) >= 8
    for line in PROGRAM:
        arguments = shlex.split(line)[2:]
        training = arguments[0] == "train" or arguments[0].startswith("--mesh")
        if training and "--resume" not in arguments:
            arguments += SMALL.split()
        elif arguments[0] == "plan":
            arguments += ["--confirm", "0"]
        assert run(arguments) == 0, (line, capsys.readouterr().err)
    assert json.loads((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()[-1])["step"] == 120


def test_commands_are_described():
    for command in COMMANDS:
        assert f"| `{command.name}`" in README, command.name


def test_the_rule_tables_are_the_codes():
    for stage, sharded in ZERO_TABLES.items():
        row = next(line for line in README.splitlines() if line.startswith(f"| {stage} "))
        cells = [cell.strip() for cell in row.strip("|").split("|")[1:]]
        names = ("parameters", "gradients", "optimizer")
        assert [cell == "base + data" for cell in cells] == [name in sharded for name in names]
    for name in WEIGHT_RULES:
        assert f"`{name}`" in README


def test_files_that_it_names_exist():
    for path in re.findall(r"\]\(([^)]+)\)|`((?:configs|docs)/[^`]+?)`", README):
        name = path[0] or path[1]
        assert (ROOT / name).exists(), name


@pytest.mark.slow
def test_the_first_command_as_printed(tmp_path):
    """The default run, whole: the loss falls as the README says."""
    command = [sys.executable, str(ROOT / "run.py"), "--mesh", "dp=4,tp=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/default/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] > 4.0 and losses[-1] < 2.3
    assert "Sample" in done.stdout and "\x1b" not in done.stdout
