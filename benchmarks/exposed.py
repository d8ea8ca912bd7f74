"""Communication that computation does not hide, of parallax and of DistributedDataParallel.

    python -m benchmarks.exposed --workload vgg --workload resnet

All take turns on a virtual cluster while PyTorch's profiler records them. A step's time in which
the thread that trains runs no operation is spent waiting, or in Python; what one device has of it,
with the same step and nothing to send, is not communication.

It needs root and what `benchmarks.virtual_cluster` needs.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from benchmarks.compare import Options, memory_budget, run_all
from benchmarks.comparison.arguments import parser_for
from benchmarks.comparison.report import Comparison
from benchmarks.peers.systems import CAPTURED, COMPUTATION, HYBRID, SYSTEMS
from benchmarks.workloads import WORKLOADS

DDP = "ddp"


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    systems = (HYBRID, COMPUTATION, CAPTURED, DDP, *(args.system or ()))
    options = Options(
        args.workers_per_host,
        args.rounds,
        tuple(dict.fromkeys(systems)),
        args.quick,
        "",
        memory_budget(),
        traced=True,
    )
    plan = [(workload, options) for workload in args.workload or ("vgg", "resnet")]
    results = run_all(args, plan, console, lambda all: console.print(table(all[-1])))
    return 2 if results is None else 0


def table(result: Comparison) -> str:
    """As Markdown: by system, what is exposed, and of how much of DDP's that is."""
    rows = {row.system: row for row in result.rows if not row.failure}
    idle = {name: row.idle_seconds for name, row in rows.items()}
    exposed = {
        name: max(seconds - idle[_alone(name)], 0.0)
        for name, seconds in idle.items()
        if name not in (COMPUTATION, CAPTURED)
    }
    lines = [
        f"**{result.workload}: {result.hosts} hosts x {result.workers_per_host}, "
        f"{result.rate or 'not shaped'}**",
        "",
        "| system | ms/step | without an operation | exposed | of DDP's |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, seconds in idle.items():
        cells = [name, f"{rows[name].seconds * 1e3:,.1f}", f"{seconds * 1e3:,.1f}", "-", "-"]
        if name in exposed:
            cells[3] = f"{exposed[name] * 1e3:,.1f}"
            if exposed.get(DDP):
                cells[4] = f"{exposed[name] / exposed[DDP]:.2f}"
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\n{row.system}: {row.failure}" for row in result.rows if row.failure]
    return "\n".join(lines) + "\n"


def _alone(name: str) -> str:
    """The same step on one device."""
    return CAPTURED if SYSTEMS[name].module == "ours" else COMPUTATION


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(
        "exposed", "Time communication that computation does not hide, on a cluster.", rounds=5
    )
    add = parser.add_argument
    add("--workload", action="append", choices=WORKLOADS, help="one or several (vgg, resnet)")
    add("--system", action="append", choices=SYSTEMS, help="beside these two")
    return parser


if __name__ == "__main__":
    sys.exit(main())
