"""What workers send: a model with dense and sparse variables, run and counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

STEPS = 4
ROWS, WIDTH, BATCH = 20_000, 32, 512


def runner_for(world: World, run_option: str, sparse_gradients: bool) -> tuple[Runner, Any]:
    """A runner and a function that makes this worker's next batch."""
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH, sparse=sparse_gradients)
    net = nn.Sequential(nn.Linear(WIDTH, 600), nn.ReLU(), nn.Linear(600, 600), nn.Linear(600, 1))
    optimizers = [torch.optim.SGD(table.parameters(), 0.1), torch.optim.Adam(net.parameters())]

    def step(ids: torch.Tensor) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss: torch.Tensor = net(table(ids)).pow(2).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    config = Config(run_option=run_option, workers=1, seed=3)  # type: ignore[arg-type]
    runner = Runner(step, discover(step), config, world)
    generator = torch.Generator().manual_seed(world.rank)
    # Squared: small ids are frequent, as words are.
    batch: Callable[[], torch.Tensor] = lambda: (  # noqa: E731
        torch.rand(BATCH, generator=generator).square() * ROWS
    ).long()
    return runner, batch


def counted(world: World, run_option: str, sparse_gradients: bool) -> dict[str, float]:
    """Bytes per step that this worker sent, and what the plan's formulas say."""
    runner, batch = runner_for(world, run_option, sparse_gradients)
    runner.run(batch())  # also sends what workers agree on before the first step
    runner.run(batch())
    before = sum(runner.traffic.values())
    for _ in range(STEPS):
        runner.run(batch())
    sent = (sum(runner.traffic.values()) - before) / STEPS
    plan = runner.plan
    by_kind = {row.choice.synchronizer: row.bytes_per_step for row in plan.rows}
    return {"sent": sent, "formula": plan.bytes_per_step, **by_kind}


def loopback_bytes() -> int:
    """Bytes that the loopback device of this network namespace carried."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[0])
    raise AssertionError("no loopback device")


def on_the_wire(world: World, run_option: str) -> dict[str, float]:
    """Bytes per step of all workers that the network saw, and that the runtime counted; and those
    that were read of shared memory."""
    runner, batch = runner_for(world, run_option, False)

    def counted() -> tuple[int, int]:
        shared = sum(world.traffic.in_memory.values())
        return sum(runner.traffic.values()) - shared, shared

    for _ in range(2):
        runner.run(batch())
    world.barrier("before")
    seen, (sent, shared) = loopback_bytes(), counted()
    world.barrier("read")
    for _ in range(STEPS):
        runner.run(batch())
    world.barrier("after")
    seen = loopback_bytes() - seen
    sent, shared = (now - before for now, before in zip(counted(), (sent, shared), strict=True))
    world.barrier("end")
    return {"seen": seen / STEPS, "sent": sent / STEPS, "shared": shared / STEPS}


def across_hosts(world: World) -> dict[str, Any]:
    """Bytes of rows per step that this worker sent to other hosts, and what it looked up."""
    runner, batch = runner_for(world, "HYBRID", False)
    runner.run(batch())
    rows, ids = ("rows: pull", "rows: push"), ("rows: ids",)
    before = dict(world.traffic.across)
    batches = [batch() for _ in range(STEPS)]
    for one in batches:
        runner.run(one)
    sent = [
        sum(world.traffic.across[kind] - before[kind] for kind in kinds) / STEPS
        for kinds in (rows, ids)
    ]
    return {"rows": sent[0], "ids sent": sent[1], "ids": [one.tolist() for one in batches]}
