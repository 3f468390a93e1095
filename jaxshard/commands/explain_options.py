"""What the command `explain` refuses, and says, about its options before anything is compiled."""

from pathlib import Path

from jaxshard.analysis.lock import check_writable
from jaxshard.config import Config
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.errors import InputError, nearest
from jaxshard.training.start import CONFIG_FILE


def check_options(target: str, files: dict[str, str | None], given: Given) -> None:
    """Refuses files that cannot be written and options that a target makes idle.

    Args:
        target: as given.
        files: option -> its file, or folder for `png`.
        given: options on the command line.
    """
    for name in ("devices", "fake_devices"):
        if name in given.options and target.strip().lower() != "local":
            raise InputError(
                f"--{name} {given.options[name]} and --target {target} both say what the devices are: drop one"
            )
    for name, text in files.items():
        if text is not None and not text.strip():
            raise InputError(f"--{name} is empty: name a {'folder' if name == 'png' else 'file'}, or leave it out")
        if text is not None:
            check_writable(f"--{name}", Path(text), folder=name == "png", parents=name != "lock")


def check_compare(target: str, given: Given) -> None:
    """Refuses what says what to explain beside --compare, which reads its two files and nothing else."""
    idle = ([f"target {target}"] if target != "local" else []) + [
        name if text is None else f"{name} {text}" for name, text in given.options.items()
    ]
    if idle:
        raise InputError(f"--compare reads its two files and nothing else: drop --{' --'.join(idle)}")


def named_folder(config: Config, given: Given, console: Console) -> Path | None:
    """The folder that --output names, for the page; says so where it holds no run whose step could be explained.

    Raises:
        InputError: there is no such folder.
    """
    if "output" not in given.options:
        return None
    folder = Path(config.output or ".")
    if not folder.is_dir():
        runs = sorted(path.parent.name for path in folder.parent.glob(f"*/{CONFIG_FILE}"))
        raise InputError(
            f"--output {folder}: there is no such folder, with a run to explain or room for a page"
            f"{nearest(folder.name, runs)}; leave --output out to explain what the other options say"
        )
    if not (folder / CONFIG_FILE).is_file():
        console.line(f"{folder} holds no run: what is explained is what the other options say")
    return folder
