"""`auto` beside every other builder, and a search for partitions beside every number of them.

    python -m benchmarks.builders --rate 1gbit
    python -m benchmarks.builders --partitions --workers-per-host 2

All are parallax, on a virtual cluster, and take turns in the same processes as far as memory
permits. For each workload the table has the time of each in units of the fastest, and a letter for
its strategy: builders may come to the same, whose times differ by chance only. Builders whose
step takes 1.5 times HYBRID's when they are tried take no turns. The search takes its steps before
the turns begin.

It needs root and what `benchmarks.virtual_cluster` needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.compare import Options, memory_budget, run_all
from benchmarks.comparison import report
from benchmarks.comparison.arguments import parser_for
from benchmarks.comparison.report import Comparison, Row
from benchmarks.peers.systems import COMPUTATION, HYBRID, SYSTEMS
from benchmarks.workloads import WORKLOADS

AUTO = "parallax-auto"
PARTITIONS = "parallax-partitions-"
SEARCH = f"{PARTITIONS}search"


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    workers = args.hosts * args.workers_per_host
    subject, systems = _systems(args.partitions, workers, args.system or [])
    console = Console(width=None if sys.stdout.isatty() else 150)
    options = Options(
        args.workers_per_host,
        args.rounds,
        systems,
        args.quick,
        "",
        args.memory * 1e9 if args.memory else memory_budget(),
        # However tables are dealt, they take the same memory in all.
        trials=not args.partitions,
        near=True,
    )
    plan = [(workload, options) for workload in args.workload or WORKLOADS]
    results = run_all(args, plan, console, lambda all: console.print(table(all[-1], subject)))
    return 2 if results is None else 0


def _systems(partitions: bool, workers: int, chosen: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The one that is to be near the fastest, and all of them."""
    if partitions:
        numbers = (f"{PARTITIONS}{number}" for number in range(1, workers + 1))
        return SEARCH, (HYBRID, COMPUTATION, SEARCH, *(n for n in numbers if n in SYSTEMS))
    ours = (name for name, one in SYSTEMS.items() if one.module == "ours" and "/" not in one.option)
    return AUTO, tuple(dict.fromkeys([HYBRID, COMPUTATION, AUTO, *(chosen or ours)]))


def table(result: Comparison, subject: str) -> str:
    """As Markdown: all from the fastest to the slowest."""
    rows = sorted(
        (row for row in result.rows if not row.failure and row.system != COMPUTATION),
        key=lambda row: row.ratio,
    )
    others = [row for row in rows if row.system != subject]
    own = next((row for row in rows if row.system == subject), None)
    rate = result.rate or "not shaped"
    strategies = _letters(result)
    alike = [
        row.system
        for row in others
        if strategies.get(row.system, row.system) == strategies.get(subject)
    ]
    lines = [
        f"**{result.workload}: {result.hosts} hosts x {result.workers_per_host}, {rate}.** "
        + (_words(own, others[0], alike) if own and others else f"{subject} failed."),
        "",
        "| system | strategy | ms/step | of the fastest | MB sent |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [row.system, strategies.get(row.system, ""), f"{row.seconds * 1e3:,.1f}"]
        cells.append(f"{row.ratio / rows[0].ratio:.2f}")
        sent = f"{row.sent_bytes / report.MEGA:,.2f}" if row.rounds else "tried only"
        lines.append("| " + " | ".join([*cells, sent]) + " |")
    told = {turn.system: turn.told for turns in result.turns for turn in turns if turn.told}
    lines += [f"\n{system}: {text}" for system, text in told.items()]
    lines += [f"\n{row.system}: {row.failure}" for row in result.rows if row.failure]
    return "\n".join(lines) + "\n"


def _words(own: Row, best: Row, alike: Sequence[str]) -> str:
    words = (
        f"{own.system} takes {own.ratio / best.ratio:.2f} of the time of the best other, "
        f"{best.system}"
    )
    return f"{words}; it has the strategy of {', '.join(alike)}." if alike else f"{words}."


def _letters(result: Comparison) -> dict[str, str]:
    """By system, a letter for its strategy; the same where it is the same. HYBRID's, which is in
    every group of systems, is that of the first, as its times are."""
    found: dict[str, str] = {}
    for turns in result.turns:
        for turn in turns:
            if turn.strategy:
                found.setdefault(turn.system, turn.strategy)
    letters = {one: chr(ord("A") + n) for n, one in enumerate(dict.fromkeys(found.values()))}
    return {system: letters[strategy] for system, strategy in found.items()}


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(
        "builders",
        "Time all builders of parallax, or numbers of partitions, on a cluster.",
        rounds=5,
    )
    add = parser.add_argument
    add("--workload", action="append", choices=WORKLOADS, help="one or several (default: all)")
    add("--system", action="append", choices=SYSTEMS, help="beside `auto`; default: all builders")
    add("--partitions", action="store_true", help="numbers of partitions in place of builders")
    add("--memory", type=float, help="GB for all workers together (default: most of what is free)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
