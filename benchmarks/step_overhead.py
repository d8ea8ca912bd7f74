"""One worker's captured step beside the eager one, paired in one run.

    python -m benchmarks.step_overhead

Two equal copies of each model take turns, one run by parallax (one worker) and one by plain
PyTorch. The price of the beginning is measured as well: get_runner and the first three runs, less
three steady steps, are capture, analysis and rewriting (a second time for an optimizer that makes
its slots in its first step).
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import parallax
from benchmarks.models import Workload, lm, mlp, resnet18
from benchmarks.pairing import run_paired

CASES: dict[str, Callable[[], Workload]] = {"lm": lm, "resnet18": resnet18, "mlp40": mlp}
FIRST_RUNS = 3


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_overhead",
        description="Time a captured step against the eager step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--case", choices=tuple(CASES), action="append", help="may be given repeatedly; all")
    add("--rounds", type=int, default=30, help="measured rounds, after two that are not")
    add("--steps", type=int, default=2, help="steps of a variant in its turn")
    add("--threads", type=int, default=1, help="torch's threads")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message="LSTM with projections is not supported")

    table = Table(
        title="Captured and eager step, one worker",
        caption=f"{args.rounds} rounds of {args.steps} steps; torch {torch.__version__}, "
        f"{args.threads} of {os.cpu_count()} cores",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("model")
    for heading in ("eager ms", "captured ms", "ratio", "quartiles", "begin s"):
        table.add_column(heading, justify="right")
    for name in args.case or CASES:
        table.add_row(name, *_row(CASES[name], args.rounds, args.steps))
    Console().print(table)


def _row(build: Callable[[], Workload], rounds: int, steps: int) -> list[str]:
    torch.manual_seed(0)
    eager = build()
    torch.manual_seed(0)
    captured = build()
    batch = eager.batch()

    begin = time.perf_counter()
    runner = parallax.get_runner(captured.step, config=parallax.Config(workers=1, seed=0))
    for _ in range(FIRST_RUNS):
        runner.run(*batch)
    first = time.perf_counter() - begin

    variants = {"eager": lambda: eager.step(*batch), "captured": lambda: runner.run(*batch)}
    result = run_paired(variants, rounds=rounds, steps=steps, warmup=2)
    low, high = result.ratio_range("captured", "eager")
    return [
        f"{result.median('eager') * 1e3:.2f}",
        f"{result.median('captured') * 1e3:.2f}",
        f"{result.ratio('captured', 'eager'):.3f}",
        f"{low:.3f} - {high:.3f}",
        f"{first - FIRST_RUNS * result.median('captured'):.2f}",
    ]


if __name__ == "__main__":
    main()
