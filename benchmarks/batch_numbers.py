"""What it costs that numbers of the batch are those of all workers' batches, paired in one run.

    python -m benchmarks.batch_numbers --workers 2

Local workers meet over loopback, and hold two copies of a small network for each loss: one counts
over all workers' batches, as the default is, the other over each worker's own
(``Config(weigh_batches=False)``). They take turns; what is printed is the median over the rounds of
their difference, and what was sent for it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import parallax
from benchmarks.lm_vs_ddp import LOOPBACK
from benchmarks.pairing import Paired, run_paired

ROWS, WIDTH, HIDDEN, CLASSES = 64, 256, 512, 16
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of scores [rows, classes], labels [rows] and values [rows]."""


def _advantages(scores: torch.Tensor, labels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    values = (values - values.mean()) / (values.std() + 1e-8)
    return (F.cross_entropy(scores, labels, reduction="none") * values).mean()


def _by_error(scores: torch.Tensor, labels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(scores, labels, reduction="none")
    return (each * (each / each.max()).detach()).mean()


def _correlation(scores: torch.Tensor, labels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    first = scores.mean(1)
    first, second = first - first.mean(), values - values.mean()
    return -(first * second).sum() / (first.square().sum() * second.square().sum()).sqrt()


LOSSES: dict[str, Loss] = {
    "mean": lambda scores, labels, values: F.cross_entropy(scores, labels),
    "labels left out": lambda scores, labels, values: F.cross_entropy(
        scores, torch.where(values > 0, labels, -1), ignore_index=-1
    ),
    "advantages": _advantages,
    "weights by error": _by_error,
    "correlation": _correlation,
}
OWN = "each worker's own"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_numbers",
        description="Time steps whose losses have numbers of the whole batch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--workers", type=int, default=2, help="local workers")
    add("--rounds", type=int, default=20, help="measured rounds, after one that is not")
    add("--steps", type=int, default=20, help="steps of a variant in its turn")
    args = parser.parse_args(arguments)
    if "RANK" in os.environ:
        measure(args.rounds, args.steps)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr", LOOPBACK, "--nproc-per-node", f"{args.workers}"]
    flags = ["--rounds", f"{args.rounds}", "--steps", f"{args.steps}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(
        [*torchrun, "-m", "benchmarks.batch_numbers", *flags], env=environment, check=True
    )


def measure(rounds: int, steps: int) -> None:
    """Time all variants as one of the workers; worker 0 prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        variants: dict[str, Callable[[], object]] = {}
        runners: dict[str, parallax.Runner] = {}
        for name, loss in LOSSES.items():
            for own in (False, True):
                title = f"{name}, {OWN}" if own else name
                runners[title], variants[title] = _variant(loss, own)
        result = run_paired(variants, rounds=rounds, steps=steps, barrier=dist.barrier)
        taken = (rounds + 1) * steps
        if dist.get_rank() == 0:
            sent = {name: _sent(runners[name]) / taken for name in LOSSES}
            _print(result, sent, rounds, steps)
    finally:
        dist.destroy_process_group()


def _variant(loss: Loss, own: bool) -> tuple[parallax.Runner, Callable[[], object]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, labels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(model(x), labels, values)
        found.backward()
        optimizer.step()
        return found

    config = parallax.Config(run_option="AR", seed=0, weigh_batches=not own)
    runner = parallax.get_runner(step, config=config)
    torch.manual_seed(1000 + dist.get_rank())
    batch = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,)), torch.randn(ROWS)
    return runner, lambda: runner.run(*batch)


def _sent(runner: parallax.Runner) -> float:
    """Bytes that numbers have taken to the other workers."""
    return sum(runner.traffic.get(kind, 0) for kind in ("batch statistics", "batch totals"))


def _print(result: Paired, sent: dict[str, float], rounds: int, steps: int) -> None:
    table = Table(
        title=f"Numbers of the batch, {dist.get_world_size()} workers",
        caption=f"{rounds} rounds of {steps} steps; torch {torch.__version__}, "
        f"{os.cpu_count()} cores",
    )
    for heading in ("loss", "ms/step, own", "ms/step, all", "more, ms", "ratio", "bytes sent"):
        table.add_column(heading, justify="left" if heading == "loss" else "right")
    for name in LOSSES:
        own = f"{name}, {OWN}"
        pairs = zip(result.seconds[name], result.seconds[own], strict=True)
        more = statistics.median(whole - alone for whole, alone in pairs)
        table.add_row(
            name,
            f"{result.median(own) * 1e3:.2f}",
            f"{result.median(name) * 1e3:.2f}",
            f"{more * 1e3:.2f}",
            f"{result.ratio(name, own):.2f}",
            f"{sent[name]:.0f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
