"""What a step copies beside computing: bytes of each worker, by operation.

    python -m benchmarks.copies --workload nmt --workers 4

Every operation that PyTorch is asked for while a step runs is looked at, those of the runtime
around messages as well; what moves numbers without computing any counts with the bytes it writes.
The same is counted for the step that one worker runs by itself: what that copies belongs to the
model. Libraries beneath PyTorch's operations (Gloo, oneDNN) are not looked into.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

import parallax
from benchmarks.peers import alone
from benchmarks.workloads import WORKLOADS, Batch, Training, batches, find, make_step

aten: Any = torch.ops.aten
WARMUP, STEPS = 4, 4
COPIES: Mapping[Any, str] = {
    aten.copy_: "copy",
    aten._to_copy: "copy",
    aten.clone: "copy",
    aten.cat: "cat",
    aten.stack: "cat",
    aten.index_select: "rows",
    aten.index: "rows",
    aten.embedding: "rows",
    aten.zeros: "fill",
    aten.zeros_like: "fill",
    aten.new_zeros: "fill",
    aten.fill_: "fill",
    aten.zero_: "fill",
}
# What these write is not what they return, or they compute elsewhere.
ROWS_PUT = aten.index_copy_.default
SCALED_INTO = aten.mul.out
"""A gradient on its way into a bucket, weighted."""
KINDS = (*dict.fromkeys(COPIES.values()), "into buckets")


class Copied(TorchDispatchMode):
    """Counts the bytes that are written by operations which compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        kind, written = COPIES.get(getattr(func, "overloadpacket", None)), result
        if func is ROWS_PUT:
            kind, written = "rows", args[3]
        elif func is SCALED_INTO:
            kind = "into buckets"
        if kind is not None and isinstance(written, torch.Tensor):
            self.by_kind[kind] += written.numel() * written.element_size()
        return result


def count(run: Callable[..., Any], data: list[Batch]) -> dict[str, float]:
    """Bytes per step, by kind."""
    for number in range(WARMUP):
        run(*data[number % len(data)])
    with Copied() as copied:
        for number in range(STEPS):
            run(*data[number % len(data)])
    return {kind: copied.by_kind[kind] / STEPS for kind in KINDS}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copies", description=__doc__)
    add = parser.add_argument
    add("--workload", choices=tuple(WORKLOADS), default="lm-50k")
    add("--workers", type=int, default=4)
    add("--strategy", default="HYBRID")
    add("--quick", action="store_true", help="with a tiny model")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    training = find(args.workload, args.quick)
    step = _step(training)
    # Not for one step's sake: which regions are compiled would depend on how long this runs.
    config = parallax.Config(strategy=args.strategy, workers=args.workers, seed=0, compile="none")
    runner = parallax.get_runner(step, config=config)
    data = batches(training, STEPS, seed=1000 + runner.worker_id)
    together = count(runner.run, data)
    by_itself = count(alone.build(training, "captured"), data)
    if runner.worker_id:
        return
    table = Table(title=f"{args.workload}: MB copied in a step of worker 0", title_justify="left")
    table.add_column("step")
    for heading in (*KINDS, "sum", "sent"):
        table.add_column(heading, justify="right")
    sent = runner.plan.bytes_per_step
    for name, found, bytes_sent in (
        (f"{args.strategy}, {runner.num_workers} workers", together, sent),
        ("alone", by_itself, 0),
    ):
        cells = [found[kind] for kind in KINDS]
        table.add_row(name, *(f"{n / 1e6:.2f}" for n in (*cells, sum(cells), bytes_sent)))
    Console().print(table)


def _step(training: Training) -> Callable[..., torch.Tensor]:
    torch.manual_seed(0)
    model = training.model(False)
    return make_step(training, model, model, training.optimizer(model.parameters()))


if __name__ == "__main__":
    main()
