"""`auto` beside every other builder, and a search for partitions beside every number of them.

    python -m benchmarks.builders --rate 1gbit
    python -m benchmarks.builders --partitions --workers-per-host 2

All are parallax, on a virtual cluster, and take turns in the same processes as far as memory
permits. For each workload the table has the time of each in units of the fastest. Builders may come
to the same strategy, and then run the same program: their turns are put together, since they differ
by chance only. Builders whose step takes 1.5 times HYBRID's when they are tried take no turns. The
search takes its steps before the turns begin.

It needs root and what `benchmarks.virtual_cluster` needs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console

from benchmarks.compare import Options, memory_budget, run_all
from benchmarks.comparison import report
from benchmarks.comparison.arguments import parser_for
from benchmarks.comparison.report import Comparison, Row
from benchmarks.comparison.values import Turn
from benchmarks.peers.systems import HYBRID, SYSTEMS
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
        return SEARCH, (HYBRID, SEARCH, *(n for n in numbers if n in SYSTEMS))
    ours = (name for name, one in SYSTEMS.items() if one.module == "ours" and "/" not in one.option)
    return AUTO, tuple(dict.fromkeys([HYBRID, AUTO, *(chosen or ours)]))


class Way(msgspec.Struct, frozen=True):
    """One strategy, by whichever builders it was made: their turns are turns of the same program.

    Args:
        row: times are of all turns of these builders, averaged in each round.
        systems: the builders; the first is the row's.
    """

    row: Row
    systems: list[str]


def table(result: Comparison, subject: str) -> str:
    """As Markdown: a row for each strategy, from the fastest to the slowest."""
    merged, ways = _ways(result, subject)
    own = next((way for way in ways if subject in way.systems), None)
    others = [way for way in ways if way is not own]
    rate = result.rate or "not shaped"
    lines = [
        f"**{result.workload}: {result.hosts} hosts x {result.workers_per_host}, {rate}.** "
        + (_words(merged, own, others, subject) if own else f"{subject} failed."),
        "",
        "| systems of one strategy | ms/step | of the fastest | MB sent |",
        "| --- | --- | --- | --- |",
    ]
    for way in ways:
        row = way.row
        cells = [", ".join(way.systems), f"{row.seconds * 1e3:,.1f}"]
        cells.append(f"{row.ratio / ways[0].row.ratio:.2f}")
        sent = f"{row.sent_bytes / report.MEGA:,.2f}" if row.rounds else "tried only"
        lines.append("| " + " | ".join([*cells, sent]) + " |")
    told = {turn.system: turn.told for turns in result.turns for turn in turns if turn.told}
    lines += [f"\n{system}: {text}" for system, text in told.items()]
    lines += [f"\n{row.system}: {row.failure}" for row in result.rows if row.failure]
    return "\n".join(lines) + "\n"


def _words(merged: Sequence[Sequence[Turn]], own: Way, others: Sequence[Way], subject: str) -> str:
    alike = [system for system in own.systems if system != subject]
    words = f"it has the strategy of {', '.join(alike)}" if alike else ""
    if not others:
        return f"{subject}: {words}, all that there are." if words else f"{subject} alone."
    best, mine = others[0].row, own.row
    ratio, between = mine.ratio / best.ratio, ""
    for turns in merged:
        paired = report.pair(turns, mine.system, best.system)
        if paired.seconds[mine.system]:
            ratio = paired.ratio(mine.system, best.system)
            low, high = paired.ratio_range(mine.system, best.system)
            between = f" ({low:.2f} - {high:.2f})"
            break
    took = f"{subject} takes {ratio:.2f}{between} of the time of the best other strategy"
    return f"{took}, {best.system}'s" + (f"; {words}." if words else ".")


def _ways(result: Comparison, subject: str) -> tuple[list[list[Turn]], list[Way]]:
    """The turns, merged by strategy under the name of one system of it, and the strategies.

    HYBRID, which is in every group of systems and which all are compared with, names its strategy.
    """
    found: dict[str, str] = {}
    for turns in result.turns:
        for turn in turns:
            found.setdefault(turn.system, turn.strategy or turn.system)
    rows = {row.system: row for row in result.rows if not row.failure}
    by_strategy: dict[str, list[str]] = {}
    for name in dict.fromkeys((HYBRID, subject, *rows)):
        if name in rows:
            by_strategy.setdefault(found.get(name, name), []).append(name)
    heads = {name: names[0] for names in by_strategy.values() for name in names}
    merged = [_merged(turns, heads) for turns in result.turns]
    ways = []
    for names in by_strategy.values():
        row = rows[names[0]]
        for turns in merged:
            mine = [turn for turn in turns if turn.system == names[0]]
            if mine:
                row = msgspec.structs.replace(
                    row,
                    seconds=statistics.median(turn.seconds for turn in mine),
                    ratio=report.pair(turns, names[0], HYBRID).ratio(names[0], HYBRID),
                )
                break
        ways.append(Way(row, names))
    return merged, sorted(ways, key=lambda way: way.row.ratio)


def _merged(turns: Sequence[Turn], heads: Mapping[str, str]) -> list[Turn]:
    """One turn for each strategy and round: what those of its builders took on average."""
    by_round: dict[tuple[str, int], list[Turn]] = {}
    for turn in turns:
        if turn.system in heads:
            by_round.setdefault((heads[turn.system], turn.round), []).append(turn)
    return [
        msgspec.structs.replace(
            all[0], system=head, seconds=statistics.fmean(turn.seconds for turn in all)
        )
        for (head, _), all in by_round.items()
    ]


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
