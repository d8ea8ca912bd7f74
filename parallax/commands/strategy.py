"""``parallax strategy``: read a strategy's file, or compare two."""

from __future__ import annotations

import argparse

__all__ = ["HELP", "add_arguments", "run"]

HELP = "show a strategy's file, or what differs between two"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    choices = parser.add_subparsers(dest="what", required=True, metavar="show|diff|list")
    show = choices.add_parser("show", help="one strategy as a table")
    show.add_argument("file", metavar="FILE", help="a strategy.json")
    diff = choices.add_parser("diff", help="what differs between two; exit status 1 if something")
    diff.add_argument("one", metavar="A", help="a strategy.json")
    diff.add_argument("other", metavar="B", help="another")
    choices.add_parser("list", help="the builders that Config(strategy=...) can name")


def run(arguments: argparse.Namespace) -> int:
    """Prints what is asked for; 1 if two strategies differ, else 0.

    Raises:
        StrategyError: a file cannot be read or holds no strategy.
    """
    # Not at the top: the command line starts without torch.
    from parallax.strategy.builders import described_builders
    from parallax.strategy.compare import differences, shown, shown_differences
    from parallax.strategy.data import Strategy

    if arguments.what == "list":
        width = max(map(len, described_builders()))
        for name, text in described_builders().items():
            print(f"{name:{width}}  {text}")
        return 0
    if arguments.what == "show":
        print(shown(Strategy.load(arguments.file)))
        return 0
    one, other = Strategy.load(arguments.one), Strategy.load(arguments.other)
    print(shown_differences(one, other, (arguments.one, arguments.other)))
    return 1 if differences(one, other) else 0
