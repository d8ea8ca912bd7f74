"""What was measured, put together: medians, paired ratios, the limit; table and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks.comparison.values import Trial, Turn
from benchmarks.pairing import Paired
from benchmarks.peers.systems import COMPUTATION, HYBRID

MEGA = 1e6
HEADINGS = (
    "ms/step",
    "predicted",
    "CPU ms",
    "time / hybrid",
    "quartiles",
    "rounds",
    "MB sent",
    "MB most",
    "peak MB",
)


class Row(msgspec.Struct, frozen=True):
    """One system with one workload.

    Args:
        system: its name.
        failure: why there are no figures; else empty.
        seconds: median of a step.
        predicted_seconds: of a step, by parallax itself; 0 for other systems.
        cpu_seconds: of the average worker, median of a step.
        ratio: median over the rounds of its time in units of parallax HYBRID's.
        low, high: quartiles of these ratios.
        rounds: how many there were; none if it was only tried by itself, as it was far from others.
        sent_bytes: per step, by the average host; median.
        most_bytes: per step, of the busiest direction of any host; median.
        peak_bytes: of the largest worker, in processes of its own; 0 if it was not tried so.
        losses: of the first steps, mean over workers; none if it was not tried.
        idle_seconds: of a step, in which no operation of PyTorch ran; median, where it was traced.
    """

    system: str
    failure: str = ""
    seconds: float = 0.0
    predicted_seconds: float = 0.0
    cpu_seconds: float = 0.0
    ratio: float = 0.0
    low: float = 0.0
    high: float = 0.0
    rounds: int = 0
    sent_bytes: float = 0.0
    most_bytes: float = 0.0
    peak_bytes: int = 0
    losses: list[float] = []
    idle_seconds: float = 0.0


class Comparison(msgspec.Struct, frozen=True):
    """All systems with one workload on one cluster.

    Args:
        workload: its name.
        hosts, workers_per_host, rate: of the cluster.
        rows: one for each system.
        computation: seconds that computing takes alone; 0, as all that follows from it, if that
            did not play.
        cross_bytes: least bytes that the average host must send per step.
        wire: seconds that these bytes take on a link.
        share: median over the rounds of max(computation, wire) / HYBRID's time.
        turns: of the systems that took them beside each other, one list for each such group.
        captured_share: share with the computation of the captured step; 0 if it did not play.
    """

    workload: str
    hosts: int
    workers_per_host: int
    rate: str | None
    rows: list[Row]
    computation: float = 0.0
    cross_bytes: float = 0.0
    wire: float = 0.0
    share: float = 0.0
    turns: list[list[Turn]] = []
    captured_share: float = 0.0


def compare(
    names: Sequence[str],
    trials: dict[str, Trial | str],
    groups: Sequence[Sequence[Turn]],
    failed: Mapping[str, str],
) -> list[Row]:
    """A row for each name.

    Args:
        names: of systems, in the order of the table.
        trials: each one's trial, or why it failed.
        groups: turns of systems that took them beside each other.
        failed: why there are none, of those that failed then.
    """
    rows = []
    for name in names:
        trial = trials[name]
        if isinstance(trial, str):
            rows.append(Row(name, failure=trial))
            continue
        if name in failed:
            why = failed[name]
            rows.append(Row(name, failure=why, peak_bytes=trial.peak_bytes, losses=trial.losses))
            continue
        found = [group for group in groups if name in {turn.system for turn in group}]
        if not found:
            rows.append(_tried(name, trials))
            continue
        (turns, *_) = found
        mine = [turn for turn in turns if turn.system == name]
        paired = pair(turns, name, HYBRID)
        low, high = paired.ratio_range(name, HYBRID)
        rows.append(
            Row(
                name,
                seconds=statistics.median(turn.seconds for turn in mine),
                predicted_seconds=mine[0].predicted_seconds,
                cpu_seconds=statistics.median(turn.cpu_seconds for turn in mine),
                ratio=paired.ratio(name, HYBRID),
                low=low,
                high=high,
                rounds=len(mine),
                sent_bytes=statistics.median(turn.sent_bytes for turn in mine),
                most_bytes=statistics.median(turn.most_bytes for turn in mine),
                peak_bytes=trial.peak_bytes,
                losses=trial.losses,
                idle_seconds=statistics.median(turn.idle_seconds for turn in mine),
            )
        )
    return rows


def _tried(name: str, trials: dict[str, Trial | str]) -> Row:
    """Of a system that was only tried by itself, beside HYBRID's trial."""
    trial, hybrid = trials[name], trials[HYBRID]
    assert isinstance(trial, Trial)
    assert isinstance(hybrid, Trial)
    ratio = trial.seconds / hybrid.seconds
    return Row(
        name, seconds=trial.seconds, ratio=ratio, peak_bytes=trial.peak_bytes, losses=trial.losses
    )


def pair(turns: Sequence[Turn], one: str, other: str) -> Paired:
    """The rounds in which both took part."""
    seconds = {
        name: {turn.round: turn.seconds for turn in turns if turn.system == name}
        for name in (one, other)
    }
    both = sorted(seconds[one].keys() & seconds[other].keys())
    return Paired({name: [times[number] for number in both] for name, times in seconds.items()})


def reached(turns: Sequence[Turn], wire: float, computation: str = COMPUTATION) -> float:
    """Median share of the limit that HYBRID reaches; 0 if that system took no turns.

    Args:
        turns: of systems that took them beside each other.
        wire: seconds that the bytes which must cross take.
        computation: the system that computes alone.
    """
    paired = pair(turns, computation, HYBRID).seconds
    shares = [
        max(alone, wire) / hybrid
        for alone, hybrid in zip(paired[computation], paired[HYBRID], strict=True)
    ]
    return statistics.median(shares) if shares else 0.0


def table(result: Comparison) -> Table:
    """For a terminal."""
    title, caption = _words(result)
    failures = [f"{row.system}: {row.failure}" for row in result.rows if row.failure]
    caption = "\n".join([caption, *failures])
    made = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    made.add_column("system")
    for heading in HEADINGS:
        made.add_column(heading, justify="right")
    for row in result.rows:
        made.add_row(*_cells(row))
    return made


def markdown(result: Comparison) -> str:
    """For a page of the documentation."""
    title, caption = _words(result)
    lines = [f"**{title}.** {caption}", ""]
    lines.append(" | ".join(["| system", *HEADINGS]) + " |")
    lines.append("| --- " * (len(HEADINGS) + 1) + "|")
    for row in result.rows:
        lines.append(f"| {' | '.join(_cells(row))} |")
    lines += [f"\n{row.system}: {row.failure}" for row in result.rows if row.failure]
    return "\n".join(lines) + "\n"


def _words(result: Comparison) -> tuple[str, str]:
    """Title and caption."""
    rate = result.rate or "not shaped"
    return (
        f"{result.workload}: {result.hosts} hosts x {result.workers_per_host}, {rate}",
        f"Limit: max(computation {result.computation * 1e3:,.0f} ms, "
        f"{result.cross_bytes / MEGA:,.2f} MB that must cross = {result.wire * 1e3:,.0f} ms); "
        f"{HYBRID} reaches {result.share:.0%} of it"
        + (
            f", {result.captured_share:.0%} with its own computation."
            if result.captured_share
            else "."
        ),
    )


def _cells(row: Row) -> list[str]:
    if row.failure:
        return [row.system, "fails", *["-"] * (len(HEADINGS) - 1)]
    return [
        row.system,
        f"{row.seconds * 1e3:,.1f}",
        _predicted(row),
        f"{row.cpu_seconds * 1e3:,.1f}",
        f"{row.ratio:.2f}",
        f"{row.low:.2f} - {row.high:.2f}",
        f"{row.rounds}",
        f"{row.sent_bytes / MEGA:,.2f}",
        f"{row.most_bytes / MEGA:,.2f}",
        f"{row.peak_bytes / MEGA:,.0f}",
    ]


def _predicted(row: Row) -> str:
    if not row.predicted_seconds:
        return "-"
    error = row.predicted_seconds / row.seconds - 1
    return f"{row.predicted_seconds * 1e3:,.1f} ({error:+.0%})"


def write_json(results: Sequence[Comparison], path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(results))))
