"""Sums in memory that the workers of a host share, on the workers of the pool."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.host_sums import HostArea, HostSum
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

STEPS = 20
SIZES = (1, 3, 1000, 70_001)


def filled(rank: int, number: int, step: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What a worker adds to a sum in a step."""
    seed = (rank * 1009 + number) * 1013 + step
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sums(world: World, dtype: torch.dtype, crosses: bool) -> float:
    """The largest difference of several sums under way at once, over some steps.

    Workers have their buffers full in the same order, and wait in another.
    """
    assert world.host_sums is not None
    areas = [HostArea(world.host_sums.links, "test", size, dtype) for size in SIZES]
    own = [
        HostSum(area, 0, 0, size, crosses=crosses) for area, size in zip(areas, SIZES, strict=True)
    ]
    # A gradient in pieces: two parts of the same memory.
    area = HostArea(world.host_sums.links, "test", 11, dtype)
    own += [HostSum(area, 0, 0, 4, crosses=crosses), HostSum(area, 1, 4, 11, crosses=crosses)]
    sizes = (*SIZES, 4, 7)
    among = range(world.size) if crosses else world.members[world.hosts[world.rank]]
    worst = 0.0
    for step in range(STEPS):
        for number, (one, size) in enumerate(zip(own, sizes, strict=True)):
            one.buffer.copy_(filled(world.rank, number, step, size, dtype))
            world.host_sums.start(one)
        world.host_sums.wait(own[3:] + own[:3])
        for number, (one, size) in enumerate(zip(own, sizes, strict=True)):
            parts = [filled(rank, number, step, size, dtype) for rank in among]
            expected = torch.stack(parts).sum(0)
            worst = max(worst, float((one.result - expected).abs().max()))
    return worst


def leaves_while_computing(world: World) -> bool:
    """Whether a sum leaves for other hosts while all workers but one start it and then do
    something else, until the last worker of each host has started it too."""
    sums = world.host_sums
    assert sums is not None
    one = HostSum(HostArea(sums.links, "test", 1000, torch.float64), 0, 0, 1000, crosses=True)
    one.buffer.fill_(world.rank + 1.0)
    last = sums.links.place == sums.links.size - 1
    for turn in (False, True):
        if turn is last:
            sums.start(one)
        world.barrier("started")
    deadline = time.monotonic() + 60
    while one in sums._waiting and time.monotonic() < deadline:
        torch.ones(100, 100) @ torch.ones(100, 100)
    left = one not in sums._waiting
    sums.wait([one])
    assert torch.equal(one.result, torch.full((1000,), sum(range(1, world.size + 1))).double())
    return left


def _model(clip: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(x).square().sum(1).mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.02)
        optimizer.step()
        return loss

    return net, step


def train(world: World, clip: bool, even: bool) -> dict[str, Any]:
    """The difference from one device after some steps, and how gradients were summed."""
    net, step = _model(clip)
    plain, one_device = _model(clip)
    runner = Runner(step, discover(step), Config(workers=1, run_option="AR"), world)
    generator = torch.Generator().manual_seed(5)
    for number in range(6):
        rows = [3 if even else 1 + (rank + number) % 4 for rank in range(world.size)]
        x = torch.randn(sum(rows), 5, dtype=torch.float64, generator=generator)
        one_device(x)
        runner.run(x.split(rows)[world.rank])
    difference = max(
        float((one - other).abs().max().detach())
        for one, other in zip(plain.parameters(), net.parameters(), strict=True)
    )
    assert runner._last is not None
    waits = [
        node.args[1:]
        for node in runner._last.step.graph.nodes
        if getattr(node.target, "__name__", "") == "wait_gradients"
    ]
    shared = world.traffic.in_memory["dense: sum"]
    return {"difference": difference, "changed": waits, "in memory": shared}


def exchanges(world: World, group: str) -> list[str]:
    """Several exchanges under way at once, of sizes that grow and shrink; what came wrong."""
    among = world.group(group)
    size, problems = len(among.ranks), []

    def part(step: int, kind: int, source: int, to: int) -> torch.Tensor:
        count = (source * 7 + to * 3 + step * step * 11 + kind) % (5 + 400 * (step % 3))
        return torch.full((count, 2), float(step * 1000 + kind * 100 + source * 10 + to))

    def start(step: int, kind: int) -> Any:
        sent = [part(step, kind, among.place, to) for to in range(size)]
        comes = [part(step, kind, source, among.place) for source in range(size)]
        expected = torch.cat(comes)
        received = torch.empty_like(expected)
        counts = [len(one) for one in comes], [len(one) for one in sent]
        purpose = f"test {kind % 2}"
        return (
            world.all_to_all(received, torch.cat(sent), *counts, purpose, group),
            received,
            expected,
        )

    for step in range(STEPS):
        started = [start(step, kind) for kind in range(5)]
        for pending, received, expected in reversed(started):
            pending.wait()
            if not torch.equal(received, expected):
                problems.append(f"step {step}: {received} in place of {expected}")
        assert all(pending.has_arrived for pending, _, _ in started)
    assert world.host_exchange is not None
    return [*problems, *(["too much memory"] if len(world.host_exchange._arenas) > 40 else [])]
