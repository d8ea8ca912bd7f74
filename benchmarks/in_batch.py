"""A loss with in-batch negatives beside DistributedDataParallel, paired in one run.

    python -m benchmarks.in_batch --workers 2

Two towers are trained to tell each other's rows apart, by local workers over loopback. parallax
takes the step as it is written for one device. With DistributedDataParallel it is written anew:
vectors are gathered by ``torch.distributed.nn.functional.all_gather``, which has gradients, and
each worker's loss is of its own rows against all. Variants in which each worker compares its own
rows alone show what the rows of the others cost. That both losses are of all rows is checked.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.nn.functional import all_gather

import parallax
from benchmarks.lm_vs_ddp import LOOPBACK
from benchmarks.pairing import Paired, run_paired

WIDTH, HIDDEN, VECTOR = 256, 512, 128
ALL, OWN = "parallax", "parallax, own rows alone"
BY_HAND, DDP_OWN = "DDP, gathered by hand", "DDP, own rows alone"
VARIANTS = (ALL, BY_HAND, OWN, DDP_OWN)
SAME = 1e-4
"""How far losses of variants that compare all rows may be apart."""


class Towers(nn.Module):
    """Two networks, whose rows belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _tower(), _tower()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.first(x), dim=1), F.normalize(self.second(y), dim=1)


def _tower() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, VECTOR),
    )  # fmt: skip


def contrast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As one device has it."""
    logits = a @ b.t() / 0.07
    labels = torch.arange(len(a))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def gathered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Own rows against those of all workers, whose mean over the workers is the same."""
    all_a, all_b = torch.cat(all_gather(a)), torch.cat(all_gather(b))
    labels = torch.arange(len(a)) + dist.get_rank() * len(a)
    first = F.cross_entropy(a @ all_b.t() / 0.07, labels)
    return (first + F.cross_entropy(b @ all_a.t() / 0.07, labels)) / 2


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.in_batch",
        description="Time steps with in-batch negatives.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--workers", type=int, default=2, help="local workers")
    add("--rows", type=int, default=128, help="of a worker's batch")
    add("--rounds", type=int, default=12, help="measured rounds, after one that is not")
    add("--steps", type=int, default=10, help="steps of a variant in its turn")
    args = parser.parse_args(arguments)
    if "RANK" in os.environ:
        measure(args.rows, args.rounds, args.steps)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr", LOOPBACK, "--nproc-per-node", f"{args.workers}"]
    flags = [f"--{name}={getattr(args, name)}" for name in ("rows", "rounds", "steps")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*torchrun, "-m", "benchmarks.in_batch", *flags], env=environment, check=True)


def measure(rows: int, rounds: int, steps: int) -> None:
    """Time all variants as one of the workers; worker 0 prints the table."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*all_gather is deprecated", FutureWarning)
    dist.init_process_group("gloo")
    try:
        torch.manual_seed(1000 + dist.get_rank())
        batch = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
        variants = {
            ALL: _parallax(batch, own=False),
            BY_HAND: _ddp(batch, gathered),
            OWN: _parallax(batch, own=True),
            DDP_OWN: _ddp(batch, contrast),
        }
        _compare({name: variants[name]() for name in (ALL, BY_HAND)})
        result = run_paired(variants, rounds=rounds, steps=steps, barrier=dist.barrier)
        if dist.get_rank() == 0:
            _print(result, rows, rounds, steps)
    finally:
        dist.destroy_process_group()


def _model() -> tuple[Towers, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Towers()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _parallax(batch: tuple[torch.Tensor, ...], own: bool) -> Callable[[], torch.Tensor]:
    model, optimizer = _model()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = contrast(*model(x, y))
        loss.backward()
        optimizer.step()
        return loss

    config = parallax.Config(run_option="AR", seed=0, weigh_batches=not own)
    runner = parallax.get_runner(step, config=config)
    return lambda: runner.run(*batch)


def _ddp(
    batch: tuple[torch.Tensor, ...], loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    model, _ = _model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(*wrapped(*batch))
        found.backward()
        optimizer.step()
        return found.detach()

    return step


def _compare(losses: dict[str, torch.Tensor]) -> None:
    """See that all are of the whole batch: by hand, in the mean over the workers."""
    by_hand = losses[BY_HAND].clone()
    dist.all_reduce(by_hand)
    off = float(losses[ALL] - by_hand / dist.get_world_size())
    if abs(off) > SAME:
        raise RuntimeError(f"losses are {off} apart")


def _print(result: Paired, rows: int, rounds: int, steps: int) -> None:
    workers = dist.get_world_size()
    table = Table(
        title=f"In-batch negatives, {workers} workers of {rows} rows",
        caption=f"{rounds} rounds of {steps} steps; torch {torch.__version__}, "
        f"{os.cpu_count()} cores",
    )
    for heading in ("variant", "ms/step", "time / parallax", "quartiles"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name in result.seconds:
        low, high = result.ratio_range(name, ALL)
        table.add_row(
            name,
            f"{result.median(name) * 1e3:.2f}",
            f"{result.ratio(name, ALL):.2f}",
            f"{low:.2f} - {high:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
