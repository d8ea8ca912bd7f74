"""Tables of which a step reads some columns, or as a smaller type; run on the pool's workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallax import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

ROWS, WIDTH, BATCH = 60, 12, 16

Reader = Callable[[nn.ModuleDict, torch.Tensor], torch.Tensor]


def whole(model: nn.ModuleDict, ids: torch.Tensor) -> torch.Tensor:
    return model["table"](ids).sum(-1)


def columns(model: nn.ModuleDict, ids: torch.Tensor) -> torch.Tensor:
    """Columns 2 to 6, in two lookups, with views in between."""
    one = model["table"](ids)[:, 2:5].view(-1, 3)
    other = model["table"]((ids + 7) % ROWS).unsqueeze(1)[:, :, :7][..., 4:]
    return model["net"](one).squeeze(-1) + other.pow(2).sum((1, 2))


def smaller(model: nn.ModuleDict, ids: torch.Tensor) -> torch.Tensor:
    """All values, as float32."""
    rows = model["table"](ids)
    return rows.float().sum(-1) + rows.view(-1, 2, WIDTH // 2).float().pow(2).mean((1, 2))


def both(model: nn.ModuleDict, ids: torch.Tensor) -> torch.Tensor:
    """Columns 9 to 11 as float32."""
    return model["table"](ids)[..., -3:].float().pow(2).sum(-1)


READERS: dict[str, Reader] = {
    "whole": whole,
    "columns": columns,
    "smaller": smaller,
    "both": both,
}


def build(
    reader: str, optimizer: str, lazy: bool
) -> tuple[nn.ModuleDict, Callable[[torch.Tensor], torch.Tensor]]:
    torch.manual_seed(4)
    model = nn.ModuleDict(
        {"table": nn.Embedding(ROWS, WIDTH, sparse=lazy), "net": nn.Linear(3, 1)}
    ).double()
    tables = list(model["table"].parameters())
    made: torch.optim.Optimizer
    if lazy:
        made = torch.optim.SparseAdam(tables, 0.05)
    elif optimizer == "adam":
        made = torch.optim.AdamW(tables, 0.05)
    else:
        made = torch.optim.SGD(tables, 0.5, momentum=0.9, weight_decay=0.1)
    others = torch.optim.SGD(model["net"].parameters(), 0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        made.zero_grad()
        others.zero_grad()
        loss = READERS[reader](model, ids).square().mean()
        loss.backward()
        made.step()
        others.step()
        return loss

    return model, step


def compare(
    world: World, reader: str, optimizer: str, run_option: str, lazy: bool = False
) -> dict[str, Any]:
    """The largest difference from one device, bytes of rows in a step, and what a plan says."""
    generator = torch.Generator().manual_seed(9)
    data = [torch.randint(0, ROWS, (BATCH * world.size,), generator=generator) for _ in range(4)]
    model, step = build(reader, optimizer, lazy)
    for ids in data:
        step(ids)
    _, own_step = build(reader, optimizer, lazy)
    config = Config(run_option=run_option, workers=1)  # type: ignore[arg-type]
    runner = Runner(own_step, discover(own_step), config, world)
    before = dict(runner.traffic)
    own = slice(world.rank * BATCH, (world.rank + 1) * BATCH)
    for ids in data:
        runner.run(ids[own])
    found, expected = runner.state_dict()["model"], model.state_dict()
    sent = {
        purpose: (count - before.get(purpose, 0)) / len(data)
        for purpose, count in runner.traffic.items()
        if purpose.startswith("rows")
    }
    row = next(row for row in runner.plan.rows if "table" in row.variable.name)
    return {
        "difference": max(float((expected[k] - found[k]).abs().max()) for k in expected),
        "sent": sent,
        "formula": row.bytes_per_step,
        "read": (row.variable.read.columns, str(row.variable.read.dtype)),
        "synchronizer": row.choice.synchronizer,
    }


def autocast(world: World, rows: str) -> dict[str, float]:
    """Bytes that pulls and pushes of a table take under bfloat16 autocast."""
    from parallax.strategy.builders import Encoded

    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(ROWS, WIDTH), "net": nn.Linear(WIDTH, 1)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=rows != "float32"):
            loss = model["net"](model["table"](ids)).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    if rows == "encoded":
        config = Config(strategy=Encoded("bf16", rows=True), workers=1)
    else:
        config = Config(workers=1)
    runner = Runner(step, discover(step), config, world)
    ids = torch.arange(BATCH) * 3 + world.rank
    runner.run(ids)
    before = dict(runner.traffic)
    runner.run(ids)
    return {
        purpose: count - before.get(purpose, 0)
        for purpose, count in runner.traffic.items()
        if purpose in ("rows: pull", "rows: push")
    }
