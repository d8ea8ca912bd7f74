"""The command line ``parallax COMMAND``; each command is one file in ``parallax/commands/``."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from parallax import commands
from parallax.errors import ParallaxError
from parallax.logs import configure_logging

__all__ = ["Command", "find_commands", "main"]


_READER_LEFT = 128 + 13
"""As a shell shows what SIGPIPE ended."""


class Command(Protocol):
    """What a file in ``parallax/commands/`` has; its name is the command's."""

    HELP: str
    """One line about the command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's own arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Does it; the exit status."""


def find_commands() -> dict[str, Command]:
    """The commands by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(commands.__path__))
    return {
        name: cast(Command, importlib.import_module(f"{commands.__name__}.{name}"))
        for name in names
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        arguments: what follows the program's name; the process's own by default.

    Returns:
        The exit status: 2 for a wrong command line, else that of the command or of its error.
    """
    parser = argparse.ArgumentParser(
        prog="parallax", description="Automatic distributed training for PyTorch."
    )
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    found = find_commands()
    for name, command in found.items():
        command.add_arguments(choices.add_parser(name, help=command.HELP, description=command.HELP))
    parsed = parser.parse_args(arguments)
    try:
        configure_logging()
        return found[parsed.command].run(parsed)
    except BrokenPipeError:
        # The reader left (`| head`); what Python has not written yet goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_LEFT
    except ParallaxError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
