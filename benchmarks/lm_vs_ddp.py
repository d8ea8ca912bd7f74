"""Language model with big tables: parallax beside DistributedDataParallel, paired in one run.

    python -m benchmarks.lm_vs_ddp --vocab 50000 --vocab 400000

Local workers meet over loopback, and all of them hold all variants at once:

* ``parallax``: HYBRID, on the plain model with ``nn.Embedding`` as it is (dense gradients);
* ``ddp``: DistributedDataParallel on the same model (dense gradients);
* ``ddp-sparse``: the same with ``nn.Embedding(sparse=True)``.

The variants take turns, a few steps at a time; ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import parallax
from benchmarks.models import Step, Workload, lm
from benchmarks.pairing import Paired, run_paired

VARIANTS = ("parallax", "ddp", "ddp-sparse")
CLIP = 10.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Options:
    """What one run measures, for one vocabulary."""

    vocab: int
    rounds: int
    steps: int
    variants: tuple[str, ...]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lm_vs_ddp",
        description="Time a language model's step under parallax and under DDP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--vocab", type=int, action="append", help="rows of the tables; may be given repeatedly")
    add("--workers", type=int, default=4, help="local workers")
    add("--rounds", type=int, default=10, help="measured rounds, after one that is not")
    add("--steps", type=int, default=3, help="steps of a variant in its turn")
    add("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="what to compare")
    args = parser.parse_args(arguments)
    if "RANK" in os.environ:
        (vocab,) = args.vocab
        measure(Options(vocab, args.rounds, args.steps, tuple(args.variants)))
        return
    for vocab in args.vocab or [50_000, 400_000]:
        flags = ["--rounds", args.rounds, "--steps", args.steps, "--variants", *args.variants]
        _start_workers(args.workers, ["--vocab", vocab, *flags])


def _start_workers(workers: int, flags: list[object]) -> None:
    """Run this module in ``workers`` processes by torchrun; the system chooses the port."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr", LOOPBACK, "--nproc-per-node", f"{workers}"]
    command = [*torchrun, "-m", "benchmarks.lm_vs_ddp", *map(str, flags)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, env=environment, check=True)


def measure(options: Options) -> None:
    """Time all variants as one of the workers; worker 0 prints the table."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="LSTM with projections is not supported")
    dist.init_process_group("gloo")
    try:
        variants = {name: _variant(name, options.vocab) for name in options.variants}
        torch.manual_seed(1000 + dist.get_rank())
        result = run_paired(
            variants, rounds=options.rounds, steps=options.steps, barrier=dist.barrier
        )
        peak = _largest_peak_bytes()
        if dist.get_rank() == 0:
            _print(options, result, peak)
    finally:
        dist.destroy_process_group()


def _variant(name: str, vocab: int) -> Callable[[], object]:
    torch.manual_seed(0)
    workload = lm(vocab, sparse=name == "ddp-sparse")
    if name == "parallax":
        config = parallax.Config(run_option="HYBRID", seed=0)
        step: Step = parallax.get_runner(workload.step, config=config).run
    else:
        step = _ddp_step(workload)
    return lambda: step(*workload.batch())


def _ddp_step(workload: Workload) -> Step:
    model, optimizer = workload.model, workload.optimizer
    recurrent = list(model.get_submodule("lstm").parameters())
    # Gradients in the buckets: DDP's faster setting, and one copy of the dense tables less.
    replica: nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def train_step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = replica(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(recurrent, CLIP)
        optimizer.step()
        return loss

    return train_step


def _largest_peak_bytes() -> int:
    # Linux counts in units of 1,024 bytes.
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def _print(options: Options, result: Paired, peak_bytes: int) -> None:
    base = options.variants[0]
    table = Table(
        title=f"LM, vocabulary {options.vocab:,}, {dist.get_world_size()} workers",
        caption=f"{options.rounds} rounds of {options.steps} steps; torch {torch.__version__}, "
        f"{os.cpu_count()} cores;\nlargest worker {peak_bytes / 1e9:.1f} GB, all variants in it",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("variant")
    for heading in ("ms/step", f"time / {base}", "quartiles"):
        table.add_column(heading, justify="right")
    for name in options.variants:
        low, high = result.ratio_range(name, base)
        table.add_row(
            name,
            f"{result.median(name) * 1e3:,.1f}",
            f"{result.ratio(name, base):.2f}",
            f"{low:.2f} - {high:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
