"""A table of half a gigabyte with Adam on every worker, and what each worker's memory holds."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import torch
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner
from parallax.runtime.state.deferral import deferred

ROWS, WIDTH, BATCH = 2_000_000, 64, 1024
TABLE_BYTES = ROWS * WIDTH * 4
STATE_BYTES = 3 * TABLE_BYTES  # the table and Adam's two slots


def resident(name: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (the peak) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def _runner(
    world: World, rows: int, defer: bool
) -> tuple[Runner, nn.Embedding, nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with deferred() if defer else contextlib.nullcontext():
        table = nn.Embedding(rows, WIDTH)
    out = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.Adam([*table.parameters(), *out.parameters()])

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = out(table(ids)).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Runner(step, discover(step), Config(workers=1, seed=1), world), table, out, optimizer


def train(world: World, rows: int, defer: bool) -> dict[str, int]:
    """Resident memory before the model, after the first step, and the peak."""
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
    before = resident("VmRSS")
    runner = _runner(world, rows, defer)[0]
    generator = torch.Generator().manual_seed(world.rank)
    runner.run(torch.randint(rows, (BATCH,), generator=generator))
    gc.collect()
    first = resident("VmRSS")
    runner.run(torch.randint(rows, (BATCH,), generator=generator))
    return {
        "pid": os.getpid(),
        "before": before,
        "first": first,
        "second": resident("VmRSS"),
        "peak": resident("VmHWM"),
    }


def what_is_left(world: World, rows: int) -> dict[str, object]:
    """Where the pieces of a small run are after a step."""
    runner, table, out, optimizer = _runner(world, rows, defer=False)
    runner.run(torch.randint(rows, (BATCH,)))
    slots = optimizer.state[table.weight]
    pieces = [table.weight, slots["exp_avg"], slots["exp_avg_sq"]]
    return {
        "table": table.weight.device.type,
        "slots": [piece.device.type for piece in pieces[1:]],
        "shapes": [tuple(piece.shape) for piece in pieces],
        "out": out.weight.device.type,
        "rows": len(runner._state.shards["table.weight"]),
    }
