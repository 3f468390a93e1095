"""The command line: commands, options over files, exit codes, one-line errors, JSON; without jax."""

import ast
import dataclasses
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from jaxshard.commands import cli
from jaxshard.commands.table import COMMANDS, Command
from jaxshard.config import Config, TrainConfig, grouped
from jaxshard.config.file import load_config, run_to_yaml, saved_values
from jaxshard.config.options import options_of
from jaxshard.errors import InputError

ROOT = Path(__file__).parent.parent


class Recorder:
    """Stands for every command: keeps what it is called with, and does what a test asks."""

    def __init__(self):
        self.config, self.options, self.console, self.act = Config(), {}, None, lambda: None

    def __call__(self, config, *, console, given=None, **options):
        self.config, self.options, self.console = config, options, console
        return self.act()


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Replaces the functions of all commands, in an empty working folder."""
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "recorder", types.SimpleNamespace(run=recorder))
    monkeypatch.setattr(cli, "COMMANDS", [dataclasses.replace(each, function="recorder:run") for each in COMMANDS])
    monkeypatch.chdir(tmp_path)
    return recorder


def run(line: str) -> int:
    return cli.run(line.split())


def save_run(folder: str, config: Config) -> None:
    Path(folder).mkdir(parents=True)
    Path(folder, "config.yaml").write_text(run_to_yaml(saved_values(config)))


def error_of(capsys, line: str) -> str:
    """Runs a bad command line; returns its message after checking exit code 2, one line, and an empty stdout."""
    assert run(line) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 400, err
    return err.removeprefix("error: ").rstrip()


# What reaches the command.


def test_the_command_is_train_when_none_is_named(command):
    assert cli.run([]) == 0
    assert command.config == Config(output="runs/default") and command.options == {
        "resume": None,
        "allow_changed_data": False,
    }
    assert cli.run(["--zero", "2"]) == 0 and command.config.zero == 2
    assert cli.run(["train", "--zero", "3"]) == 0 and command.config.zero == 3


def test_options_override_the_file_wherever_they_stand(command):
    Path("small.yaml").write_text("train: {steps: 5, seed: 9}\nmesh: dp=2")
    assert run("--train.steps 7 --config small.yaml --optim.lr=3e-4") == 0
    assert command.config.train == TrainConfig(steps=7, seed=9)
    assert (command.config.mesh, command.config.optim.lr) == ("dp=2", 3e-4)
    assert command.config.output == "runs/small"


def test_the_output_folder_may_be_named_in_the_file_or_beside_it(command):
    Path("small.yaml").write_text("output: here")
    run("--config small.yaml")
    assert command.config.output == "here"
    run("--config small.yaml --output there")
    assert command.config.output == "there"


def test_dashes_and_bare_switches_and_nulls(command):
    assert run("--fake-devices 8 --parallel.sequence-parallel --data.pack false --model.preset null") == 0
    assert command.config.fake_devices == 8 and command.config.parallel.sequence_parallel
    assert not command.config.data.pack and command.config.model.preset is None


def test_values_keep_their_signs_and_dashes(command):
    assert cli.run(["generate", "--output", "r", "--prompt", "x"]) == 2  # no such run
    save_run("r", Config())
    assert cli.run(["generate", "--output", "r", "--prompt=--a-b = c", "--mesh", "tp=-1"]) == 0
    assert command.options["prompt"] == "--a-b = c" and command.config.mesh == "tp=-1"


def test_generate_gets_its_options_by_name(command):
    save_run("r", Config())
    line = "generate --output r --max_new_tokens 5 --top-k 3 --top_p 0.9 --temperature 1e-1 --samples 2 --checkpoint 40"
    assert run(line) == 0
    assert command.options == {
        "prompt": "", "max_new_tokens": 5, "temperature": 0.1, "top_k": 3, "top_p": 0.9, "greedy": False, "samples": 2,
        "checkpoint": 40,
    }  # fmt: skip


# Runs that exist already.


@pytest.mark.parametrize("name", ["eval", "generate", "inspect"])
def test_commands_on_a_run_take_its_configuration(command, capsys, name):
    saved = Config(output="where/it/was", **grouped(mesh="dp=2", seed=5))
    save_run("runs/small", saved)
    assert cli.run([name, "--output", "runs/small", "--mesh", "tp=2"]) == 0
    assert command.config == dataclasses.replace(saved.with_parallel(mesh="tp=2"), output="runs/small")
    Path("small.yaml").write_text("train: {seed: 1}")
    assert cli.run([name, "--config", "small.yaml"]) == 0
    assert command.config == dataclasses.replace(saved, output="runs/small")
    assert "--output other and --config small.yaml name two runs" in error_of(
        capsys, f"{name} --config small.yaml --output other"
    )


def test_a_run_that_is_not_there_names_the_nearest(command, capsys):
    assert "runs/default holds no run" in error_of(capsys, "eval")
    save_run("runs/small", Config())
    assert "(did you mean 'small'?)" in error_of(capsys, "eval --output runs/smal")
    assert "--output can name runs/small" in error_of(capsys, "generate")
    assert "--output can name runs/small" in error_of(capsys, "--resume")


def test_inspect_lists_presets_without_a_run(command):
    assert cli.run(["inspect", "--presets"]) == 0 and command.options["presets"]


def test_resume(command, capsys):
    assert run("--resume auto --train.seed 3") == 0
    assert command.options["resume"] == "auto" and command.config.train.seed == 3
    save_run("runs/default", Config(train=TrainConfig(seed=5)))
    for line, seed in (("--resume", 5), ("--resume auto", 5), ("--resume --train.seed 3", 3), ("--train.steps 1", 0)):
        assert run(line) == 0 and command.config.train.seed == seed, line
    cli.run(["--resume"])
    assert command.options["resume"] == "required"
    Path("default.yaml").write_text("train: {seed: 8}")
    assert run("--resume --config default.yaml") == 0
    assert command.config.train.seed == 8, "a configuration that the user names is taken as it stands"
    assert "resume is 'often': it must be one of required, auto" in error_of(capsys, "--resume often")


def test_a_broken_configuration_of_a_run_is_named(command, capsys):
    save_run("r", Config())
    Path("r/config.yaml").write_text("train: {stepz: 3}")
    assert "r/config.yaml line 1: unknown key train.stepz (did you mean 'train.steps'?)" in error_of(
        capsys, "eval --output r"
    )


# Bad input.


@pytest.mark.parametrize(
    "line, message",
    [
        ("trian", "unknown command 'trian' (did you mean 'train'?)"),
        ("frobnicate", "unknown command 'frobnicate'; there are train, eval, generate, inspect"),
        ("configs/tiny.yaml", "unknown command 'configs/tiny.yaml'; a configuration goes after --config"),
        ("--train.step 3", "unknown option --train.step (did you mean '--train.steps'?)"),
        ("--train.step=3", "unknown option --train.step (did you mean '--train.steps'?)"),
        ("--train.lr 3", "unknown option --train.lr (did you mean '--optim.lr'?)"),
        ("--lr 3", "unknown option --lr (did you mean '--optim.lr'?)"),
        ("--output x --mehs dp=2", "unknown option --mehs (did you mean '--mesh'?)"),
        ("--prompt x", "--prompt is an option of generate, not of train"),
        ("--model tiny", "--model is a group of options: write one of them, such as --model.preset"),
        ("--zero 1 eval", "unexpected argument 'eval': options are written --name value, and the command comes first"),
        ("-x", "unknown option -x"),
        ("--", "unknown option --"),
        ("--train.steps", "--train.steps needs a value: a whole number"),
        ("--mesh --zero 1", "--mesh needs a value: text"),
        ("--train.steps 1e3", "train.steps is '1000.0': it must be a whole number (did you mean 1000?)"),
        ("--train.steps 1:30", "train.steps is '1:30': it must be a whole number"),
        ("--optim.lr 1:30.5", "optim.lr is '1:30.5': it must be a number"),
        ("--train.steps=", "train.steps is '': it must be a whole number"),
        ("--optim.lr -1e-3", "optim.lr is -0.001: it must be positive"),
        ("--optim.lr nan", "optim.lr is 'nan': it must be a number"),
        ("--optim.name adamW", "optim.name is 'adamW': it must be one of adamw, adafactor, lion, muon, sgd (did you "),
        ("--zero 4", "zero is '4': it must be one of 0, 1, 2, 3"),
        ("--data.pack maybe", "data.pack is 'maybe': it must be true or false"),
        ("--log.profile_steps 1,2", "log.profile_steps is '1,2': it must be a list such as [1,2]"),
        ("--fake-devices 0", "fake_devices is 0: it must be positive"),
        ("--config a.yaml --config=b.yaml", "--config is given twice: 'a.yaml' and 'b.yaml'; keep one of them"),
        ("--zero 1 --mesh dp=2 --zero=2", "--zero is given twice: '1' and '2'; keep one of them"),
        ("--fake-devices=4 --mesh dp=4 --fake_devices 4", "--fake_devices is given twice: '4' and '4'"),
        ("--resume --output r --resume auto", "--resume is given twice: without a value and 'auto'"),
        ("--optim.lr -1 --optim.lr 2 --optim.lr=3", "--optim.lr is given 3 times: '-1', '2' and '3'"),
        ("generate --prompt a --prompt b", "--prompt is given twice: 'a' and 'b'"),
        ("explain --compare a b --compare c d", "--compare is given twice"),
        ("--learnig-rate 1", "unknown option --learnig_rate (did you mean '--optim.lr'?)"),
        ("--tensor-parallel-size=2", "unknown option --tensor_parallel_size (did you mean '--mesh tp=N'?)"),
        ("--train.max_steps 2", "unknown option --train.max_steps (did you mean '--train.steps'?)"),
        ("--resume-from-checkpoint x", "unknown option --resume_from_checkpoint (did you mean '--resume'?)"),
        ("--config nowhere.yaml", "nowhere.yaml: no such file"),
        ("--config=", "--config is empty"),
        ("eval --checkpoint.every 3", "unknown option --checkpoint.every"),
        ("eval --checkpoint new", "checkpoint is 'new': it must be a whole number"),
        ("generate --top_p 0", "top_p is 0.0: it must be in (0, 1]"),
        ("generate --temperature 0", "temperature is 0.0: it must be positive (--greedy takes the likeliest token)"),
        ("generate --samples 0", "samples is 0: it must be a positive whole number"),
    ],
)
def test_bad_input_is_one_line_with_the_nearest_name(command, capsys, line, message):
    assert error_of(capsys, line).startswith(message)


# How commands end.


def raises(error: BaseException):
    def act():
        raise error

    return act


@pytest.mark.parametrize("result, code", [(None, 0), (0, 0), (3, 3), ({"loss": 1.0}, 0), ({"exit_code": 1}, 1)])
def test_a_command_says_how_it_ended(command, capsys, result, code):
    command.act = lambda: result
    assert cli.run([]) == code
    assert capsys.readouterr().out == "", "without --json a command prints for itself"


def test_bad_input_found_by_a_command(command, capsys):
    command.act = raises(InputError("mesh dp=3 needs 3 devices"))
    assert error_of(capsys, "") == "mesh dp=3 needs 3 devices"


def test_a_failure_shows_its_traceback(command, capsys):
    command.act = raises(RuntimeError("boom"))
    assert cli.run(["--json"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" in err and "boom" in err


def test_an_interrupt_ends_without_a_traceback(command, capsys):
    command.act = raises(KeyboardInterrupt())
    assert cli.run([]) == 1
    assert capsys.readouterr().err == "interrupted\n"


def test_json_is_alone_on_stdout(command, capsys):
    def act():
        print("a library talks")
        command.console.line("a line")
        command.console.table("T", ["a"], [[1]])
        command.console.warn("careful")
        with command.console.progress(1, every=1) as bar:
            bar.update(1, loss=2.0)
        return {"loss": np.float32(0.5), "bad": math.nan, "ids": np.arange(3), "path": Path("x"), "exit_code": 3}

    command.act = act
    assert cli.run(["--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {"loss": 0.5, "bad": None, "ids": [0, 1, 2], "path": "x"}
    assert all(text in err for text in ("a library talks", "a line", "T\n", "careful", "step 1/1  loss 2.0000"))


def test_json_is_an_object_even_when_a_command_has_no_result(command, capsys):
    assert cli.run(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {}


# Help and the configuration in print.


def test_print_config_can_be_read_back(command, capsys):
    line = "--mesh dp=4,tp=2 --optim.lr 3e-4 --log.profile_steps [3,5] --model.family llama --print_config"
    assert run(line) == 0 and command.console is None
    Path("printed.yaml").write_text(capsys.readouterr().out)
    config = load_config("printed.yaml")
    assert config.mesh == "dp=4,tp=2" and config.optim.lr == 3e-4 and config.log.profile_steps == (3, 5)
    run("--config printed.yaml")
    assert command.config == dataclasses.replace(config, output="runs/printed")


def test_the_help_of_the_program_is_one_screen(capsys):
    assert cli.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") < 24 and all(each.name in out and each.help in out for each in COMMANDS)


@pytest.mark.parametrize("each", COMMANDS, ids=lambda each: each.name)
def test_the_help_of_a_command_holds_the_options_that_it_reads(capsys, each: Command):
    """With their doc strings, and no others."""
    assert cli.run([each.name, "--mesh", "dp=2", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    hidden = tuple(f"{option.name}." for option in options_of(each.options))
    config = [option for option in options_of(Config()) if not option.name.startswith(hidden)]
    for option in (*options_of(each.options), *options_of(cli.CommonOptions()), *config):
        shown = option not in config or each.reads is None or option.name.startswith(each.reads)
        assert (f"--{option.name} " in out and option.doc in out) == shown, option.name
    for start in each.reads or ():
        assert any(option.name.startswith(start) for option in options_of(Config())), start


def test_the_help_speaks_of_values_and_not_of_python(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    cli.run(["train", "--help"])
    out = capsys.readouterr().out
    assert not any(word in out for word in ("Literal", "Optional", "null", "None", "bool", "Union"))
    assert max(map(len, out.splitlines())) <= 100
    for line in (
        "--train.steps N ",
        "--optim.lr X ",
        "--zero 0|1|2|3 ",
        "--resume [required|auto|N] ",
        "--parallel.sequence_parallel ",
        "--data.pack [true|false] ",
        "--model.tie_embeddings [true|false]",
        "--log.profile_steps [1,2] ",
        "(default: 300)",
    ):
        assert line in out, line
    cli.run(["explain", "-h"])
    assert "--compare A B " in capsys.readouterr().out


def test_the_version(capsys):
    assert cli.run(["--version"]) == 0 and capsys.readouterr().out.startswith("jaxshard 0.")


@pytest.mark.parametrize("arguments", ["--help", "train --help", "--print_config", "--train.step 3", "inspect"])
def test_help_and_bad_input_do_not_wait_for_jax(arguments, tmp_path):
    code = (
        "import sys; from jaxshard.commands import cli\n"
        f"try: cli.run({arguments.split()!r})\nexcept SystemExit: pass\nsys.exit('jax' in sys.modules)"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, timeout=600)
    assert done.returncode == 0, "jax was imported"


def test_run_py_is_the_program():
    done = subprocess.run([sys.executable, "run.py", "--zzz"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: unknown option --zzz; --help lists them\n")


def test_characters_that_stdout_lacks_end_nothing():
    code = "import sys; from jaxshard.commands import cli; cli.overview = lambda: 'x \u2581'; "
    code += "sys.argv[1:] = ['-h']; cli.main()"
    environment = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "x ?\n"), done.stderr


@pytest.mark.parametrize("arguments", ["train --help", "--help", "--print_config"])
@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
def test_output_into_a_closed_pipe_is_no_failure_with_a_traceback(arguments, buffered):
    """As of `| head`, whose end is gone whenever the text is written: at once, or from the buffer at the end."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *([] if buffered else ["-u"]), "run.py", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("each", COMMANDS, ids=lambda each: each.name)
def test_every_command_takes_its_options_as_keywords(each: Command):
    """Read from the source: importing it would load jax."""
    module, _, name = each.function.partition(":")
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    accepted = {argument.arg for argument in function.args.kwonlyargs}
    extra = {"given"} if each.wants_given else set()
    assert accepted == {"console", *extra, *(field.name for field in dataclasses.fields(each.options))}
    assert len(function.args.args) == 1, "one positional argument: the configuration"
