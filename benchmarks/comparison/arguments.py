"""Arguments that all comparisons on a virtual cluster take."""

from __future__ import annotations

import argparse


def parser_for(
    module: str,
    description: str,
    *,
    workers_per_host: int = 1,
    rate: str = "1gbit",
    rounds: int = 7,
) -> argparse.ArgumentParser:
    """A parser with the cluster, how long to measure, and where figures go.

    Args:
        module: of ``benchmarks``, that is run.
        description: in a sentence.
        workers_per_host, rate, rounds: what is measured unless something else is asked for.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--hosts", type=int, default=4, help="of the cluster")
    add("--workers-per-host", type=int, default=workers_per_host, help="processes on each host")
    add("--rate", default=rate, help="of each host's link; 'none' does not shape")
    add("--rounds", type=int, default=rounds, help="turns of each system; slow ones take three")
    add("--limit", type=float, default=180.0, help="seconds for one system's trial")
    add("--quick", action="store_true", help="tiny models: see that all works")
    add("--json", help="write the figures to this file")
    return parser
