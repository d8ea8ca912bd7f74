"""The command line flags that every example has."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import parallax
from examples.fetch import CACHE


def flags_of(example: str, description: str) -> argparse.ArgumentParser:
    """A parser for ``python -m examples.EXAMPLE.train``, with the flags that are about the run."""
    parser = argparse.ArgumentParser(
        prog=f"python -m examples.{example}.train",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--run-option", choices=("HYBRID", "PS", "AR"), default="HYBRID", help="synchronisation")
    add("--workers", type=int, default=2, help="local workers, where there is no GPU")
    add("--resource-info", default=None, help="file that lists hosts; None: this machine")
    add("--seed", type=int, default=0, help="base of all random numbers")
    return parser


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-dir", type=Path, default=CACHE, help="where fetched and prepared data are kept"
    )


def parse(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    quickstart: Mapping[str, Any] | None = None,
) -> argparse.Namespace:
    """The values of the flags; ``quickstart`` has the defaults under ``--quickstart``."""
    if quickstart is not None:
        parser.add_argument(
            "--quickstart", action="store_true", help="small sizes: 1-2 minutes on two CPU cores"
        )
        # Defaults, not values: a flag that is given still wins over the quickstart's.
        if parser.parse_known_args(arguments)[0].quickstart:
            parser.set_defaults(**quickstart)
    return parser.parse_args(arguments)


def config_of(args: argparse.Namespace) -> parallax.Config:
    return parallax.Config(run_option=args.run_option, workers=args.workers, seed=args.seed)
