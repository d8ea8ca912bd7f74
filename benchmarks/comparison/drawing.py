"""Comparisons as a picture: one panel for each, systems by their time in units of HYBRID's.

    python -m benchmarks.comparison.drawing lm.json dlrm.json --output docs/comparison.svg

reads what ``benchmarks.compare --json`` wrote.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.comparison.report import Comparison, Row
from benchmarks.peers.systems import CAPTURED, COMPUTATION, HYBRID

OURS, OTHERS, ALONE = "#2b6cb0", "#a0aec0", "#e2e8f0"
COLUMNS = 2
BAR, ABOVE = 0.24, 0.75
"""Height of a bar, and of what a panel has above and below its bars, in inches."""


def draw(results: Sequence[Comparison], path: Path) -> str | None:
    """Draw comparisons; returns None, or why nothing was drawn.

    Args:
        results: in the order of their panels.
        path: of a picture, whose kind its ending says.
    """
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    # The same picture of the same figures, byte by byte; text that can be searched.
    pyplot.rcParams.update({"svg.hashsalt": "parallax", "svg.fonttype": "none", "font.size": 8})
    lines = -(-len(results) // COLUMNS)
    bars = [
        max(len(_shown(result)) for result in results[line * COLUMNS : (line + 1) * COLUMNS])
        for line in range(lines)
    ]
    heights = [BAR * count + ABOVE for count in bars]
    figure, axes = pyplot.subplots(
        lines,
        COLUMNS,
        figsize=(5 * COLUMNS, sum(heights)),
        height_ratios=heights,
        squeeze=False,
    )
    for result, axis in zip(results, axes.flat, strict=False):
        _panel(result, axis)
    for axis in list(axes.flat)[len(results) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return None


def _shown(result: Comparison) -> list[Row]:
    return [row for row in result.rows if not row.failure]


def _panel(result: Comparison, axis: object) -> None:
    """One comparison: bars with their quartiles, and the limit as a dotted line."""
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    rows = _shown(result)
    places = range(len(rows))
    spread = [
        [row.ratio - row.low if row.low else 0.0 for row in rows],
        [row.high - row.ratio if row.high else 0.0 for row in rows],
    ]
    axis.barh(
        places,
        [row.ratio for row in rows],
        xerr=[[max(one, 0.0) for one in side] for side in spread],
        color=[_color(row.system) for row in rows],
        ecolor="#4a5568",
        error_kw={"linewidth": 0.8},
    )
    axis.set_yticks(places, [row.system for row in rows])
    axis.invert_yaxis()
    most = max(row.ratio for row in rows)
    axis.set_xlim(0, most * 1.25)
    for place, row in zip(places, rows, strict=True):
        end = max(row.high, row.ratio) + most * 0.02
        axis.text(end, place, f"{row.ratio:.2f}", va="center")
    if result.share:
        axis.axvline(result.share, color="black", linestyle=":", linewidth=1)
    hybrid = next((row for row in rows if row.system == HYBRID), None)
    taken = f": HYBRID {hybrid.seconds * 1e3:,.0f} ms" if hybrid is not None else ""
    rate = result.rate or "not shaped"
    axis.set_title(
        f"{result.workload}, {result.hosts} x {result.workers_per_host}, {rate}{taken}",
        loc="left",
        fontsize=9,
    )
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _color(system: str) -> str:
    if system in (COMPUTATION, CAPTURED):
        return ALONE
    return OURS if system.startswith("parallax") else OTHERS


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.comparison.drawing",
        description="Draw what benchmarks.compare measured.",
    )
    parser.add_argument("files", nargs="+", type=Path, help="what its --json wrote, in order")
    parser.add_argument("--output", type=Path, required=True, help="the picture to write")
    args = parser.parse_args(arguments)
    results = [
        result
        for file in args.files
        for result in msgspec.json.decode(file.read_bytes(), type=list[Comparison])
    ]
    if why := draw(results, args.output):
        parser.exit(1, f"{why}\n")


if __name__ == "__main__":
    main()
