"""`python run.py [COMMAND] [options]`: from the command line to a `Config`, a command, and an exit code. Free of jax.

Exit codes: 0 done, 2 bad input (one message), 3 stopped by a signal after saving, 1 any other failure.
"""

import contextlib
import importlib
import importlib.metadata
import io
import json
import math
import os
import shutil
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from jaxshard.commands.table import COMMANDS, Command, SavedRun
from jaxshard.config import Config, unread
from jaxshard.config.file import config_to_yaml, defaults_of, load_config, load_run
from jaxshard.config.options import (
    Given,
    Option,
    given_options,
    help_text,
    instantiate,
    make_parser,
    options_of,
    parse_arguments,
)
from jaxshard.console import Console
from jaxshard.errors import InputError, RunError, nearest
from jaxshard.interrupt import raise_from_now
from jaxshard.suggestions import suggest


@dataclass(frozen=True)
class CommonOptions:
    """Options of every command"""

    config: str | None = None
    """YAML file; options beside it override what it says."""
    json: bool = False
    """Print the result as JSON on stdout, and everything else on stderr."""
    print_config: bool = False
    """Print the configuration with comments, as a file for --config, and stop."""


@dataclass(frozen=True)
class Invocation:
    """A command line, understood: what to run with what."""

    command: Command
    common: CommonOptions
    options: Any
    config: Config
    given: Given
    """Options of the configuration, and --config, that stood on the line."""


def main() -> NoReturn:
    """Runs the command line of this process and exits."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks must not end a long run
        sys.stdout.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Runs one command line and returns its exit code; raises nothing."""
    try:
        code = _answer(argv)
        # What is left in the buffer is written here: when the interpreter ends nobody handles a reader that has gone.
        print(end="", flush=True)
        return code
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of what is printed, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def _answer(argv: list[str]) -> int:
    """Prints what the line asks to know, or runs its command; returns the exit code."""
    if argv[:1] in (["--help"], ["-h"]):
        print(overview())
        return 0
    if argv == ["--version"]:
        print(f"jaxshard {importlib.metadata.version('jaxshard')}")
        return 0
    if {"--help", "-h"} & set(argv):
        print(command_help(_command(argv)[0]))
        return 0
    invocation = understand(argv)
    if invocation.common.print_config:
        print(config_to_yaml(invocation.config, comments=True), end="")
        return 0
    return execute(invocation)


def understand(argv: list[str]) -> Invocation:
    """Parses a command line. Raises InputError for whatever is wrong with it or with the files that it names.

    The line is parsed twice: the first pass finds --config, --output and --resume, which say on which configuration
    the options of the second pass are laid.
    """
    command, argv = _command(argv)
    first = _parse(command, argv, Config(), forgives="all")
    file = first.common.config
    if file is not None and not file.strip():
        raise InputError("--config is empty: name a file, or leave it out")
    base = load_config(file) if file else Config()
    folder = Path(first.config.output or base.output or f"runs/{Path(file).stem if file else 'default'}").expanduser()
    needs = command.saved_run(first.options)
    if needs in ("if named", "if named and there"):
        needs = "no" if not first.config.output else "needed" if needs == "if named" else "if there"
    own = base
    if needs != "no":
        base = _with_saved(base, needs, command, folder, file)
    invocation = _parse(command, argv, base, "nothing" if base is own else "what is not given")
    if invocation.common.print_config:  # the folder stays open: what is printed may become a file of another name
        return invocation
    return replace(invocation, config=replace(invocation.config, output=str(folder)))


def execute(invocation: Invocation) -> int:
    """Imports and calls the command's function; prints the result as JSON where that is asked for."""
    console = Console(sys.stderr if invocation.common.json else sys.stdout)
    module, _, name = invocation.command.function.partition(":")
    # Whatever else prints while a command makes JSON must not end up within it.
    with contextlib.redirect_stdout(sys.stderr) if invocation.common.json else contextlib.nullcontext():
        function = getattr(importlib.import_module(module), name)
        raise_from_now()
        extra = {"given": invocation.given} if invocation.command.wants_given else {}
        result = function(invocation.config, console=console, **vars(invocation.options), **extra)
    code = result if isinstance(result, int) else 0
    if isinstance(result, dict):
        code = result.get("exit_code", 0)
        result = {key: value for key, value in result.items() if key != "exit_code"}
    if invocation.common.json and not console.muted:
        print(json.dumps(_jsonable(result if isinstance(result, dict) else {}), indent=2, allow_nan=False))
    return code


def overview() -> str:
    """Returns the help of the program: one screen; the help of a command lists all its options."""
    rows = [f"  {command.name:<{max(len(each.name) for each in COMMANDS)}}  {command.help}" for command in COMMANDS]
    return "\n".join(
        [
            f"usage: {_program()} [COMMAND] [--config FILE.yaml] [--mesh dp=4,tp=2] [--zero 0|1|2|3] [options]",
            "",
            "commands:",
            *rows,
            "",
            f"'{_program()} COMMAND --help' lists all options of a command, such as --train.steps 100,",
            f"and '{_program()} --print_config' prints them as YAML with their defaults.",
        ]
    )


def command_help(command: Command) -> str:
    """Returns the help of a command: its own options, and those of the configuration that it reads."""
    own, common, config = _options(command, Config())
    shown = [option for option in config if command.reads is None or option.name.startswith(command.reads)]
    text = help_text([*own, *common, *shown], shutil.get_terminal_size().columns)
    ends = ["Dashes and underscores in names are the same. Configuration files use the names as they stand here."]
    if len(shown) < len(config):
        ends.append("Other options of the configuration, which train --help lists, are taken too.")
    return "\n".join([f"usage: {_program()} {command.name} [options]", "", command.help, text, "", *ends])


def _options(command: Command, base: Config) -> tuple[list[Option], list[Option], list[Option]]:
    """A command's own options, those of every command, and those of the configuration.

    A command with an option --checkpoint STEP saves nothing, and so needs no --checkpoint.every beside it.
    """
    own = options_of(command.options)
    hidden = tuple(f"{option.name}." for option in own)
    config = [option for option in options_of(base) if not option.name.startswith(hidden)]
    return own, options_of(CommonOptions()), config


def _command(argv: list[str]) -> tuple[Command, list[str]]:
    """Splits off the command, `train` when the line starts with an option or is empty."""
    if not argv or argv[0].startswith("-"):
        return COMMANDS[0], argv
    names = [command.name for command in COMMANDS]
    if argv[0] not in names:
        hint = "; a configuration goes after --config" if argv[0].endswith((".yaml", ".yml")) else ""
        closest = nearest(argv[0], names)
        raise InputError(f"unknown command {argv[0]!r}{hint or closest or '; there are ' + ', '.join(names)}")
    return COMMANDS[names.index(argv[0])], argv[1:]


def _parse(
    command: Command, argv: list[str], base: Config, forgives: Literal["nothing", "what is not given", "all"]
) -> Invocation:
    """Parses the options of a command over a configuration.

    What nothing reads may be forgiven: where a saved run has it, and `all` before it is known what stands beside it.
    """
    own_options, common_options, config_options = _options(command, base)
    options = [*own_options, *common_options, *config_options]
    _refuse_others_options(command, argv, {option.name for option in options})
    parser = make_parser(options)
    values = parse_arguments(parser, options, argv)
    given = given_options(argv, ["config", *(option.name for option in config_options)])
    if forgives != "nothing":
        every = {option.name: option.default for option in options_of(base)} | values
        values |= defaults_of(name for name in unread(every) if forgives == "all" or name not in given.options)
    own, common, config = (instantiate(instance, values) for instance in (command.options, CommonOptions(), base))
    return Invocation(command, common, own, config, given)


def _refuse_others_options(command: Command, argv: list[str], names: set[str]) -> None:
    """Raises InputError for an option of another command, which a nearest name would only obscure."""
    for token in argv:
        name = token.removeprefix("--").partition("=")[0].replace("-", "_")
        for other in COMMANDS:
            if token.startswith("--") and name not in names and hasattr(other.options, name):
                instead = suggest(name, names, dashes="--")
                raise InputError(f"--{name} is an option of {other.name}, not of {command.name}{instead}")


def _with_saved(base: Config, needs: SavedRun, command: Command, folder: Path, file: str | None) -> Config:
    """Returns the configuration of the run in `folder`, for commands that go on from one.

    eval, generate and inspect always take the run's own, since the checkpoint fits no other; there --config does no
    more than name the run. `train --resume --config FILE` keeps to the file: the user states the run in full.
    """
    saved = folder / "config.yaml"
    lost = not saved.is_file() and (folder / "checkpoints").is_dir() and command.name == "train"
    if needs == "if there" and not saved.is_file() and not lost:
        return base
    if file and command.name != "train" and folder != Path(base.output or f"runs/{Path(file).stem}"):
        raise InputError(f"--output {folder} and --config {file} name two runs; {command.name} takes one of them")
    if not saved.is_file() and not lost:
        raise InputError(f"{folder} holds no run (there is no {saved}){_runs_beside(folder)}")
    return base if file and command.name == "train" else load_run(saved)


def _runs_beside(folder: Path) -> str:
    """Returns what to say about runs in the same parent folder."""
    runs = sorted(path.parent.name for path in folder.parent.glob("*/config.yaml"))
    if not runs:
        return "; train one first, or name its folder with --output"
    closest = nearest(folder.name, runs)
    return closest or f"; --output can name {', '.join(str(folder.parent / name) for name in runs[:5])}"


def _program() -> str:
    name = os.path.basename(sys.argv[0]) or "jaxshard"
    return "python -m jaxshard" if name == "__main__.py" else name


def _jsonable(value: Any) -> Any:
    """Arrays become lists, paths text, and numbers that JSON lacks (nan, inf) null."""
    if isinstance(value, dict):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_jsonable(inner) for inner in value]
    if hasattr(value, "tolist"):
        return _jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
