"""Where the program starts: `python run.py`, `python -m jaxshard`, and the installed script `jaxshard`."""

from typing import NoReturn

from jaxshard.interrupt import leave_at_once


def main() -> NoReturn:
    """Runs the command line of this process and exits."""
    leave_at_once()
    from jaxshard.commands import cli  # only now: this takes a moment, in which Ctrl-C may come

    cli.main()


if __name__ == "__main__":
    main()
