"""Steps that count in Python's numbers, on several workers and on one device."""

from __future__ import annotations

from typing import Any

import torch
from equality import difference
from torch import nn

from parallax.config import Config
from parallax.errors import ParallaxError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

LOCAL, STEPS = 3, 10


class Counting(nn.Module):
    """A layer that counts its calls in a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * (1 + 0.1 * self.calls)  # type: ignore[no-any-return]


class Delayed:
    """Twin networks of which one is trained in every second step (TD3's delayed updates)."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.critic, self.actor = Counting().double(), nn.Linear(4, 4).double()
        self.critics = torch.optim.Adam(self.critic.parameters(), 0.01)
        self.actors = torch.optim.SGD(self.actor.parameters(), 0.1)
        self.iterations, self.total = 0, 0.0
        self.counts = {"resets": 0}

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.iterations += 1
        loss = self.critic(x).square().mean()
        self.critics.zero_grad()
        loss.backward()
        self.critics.step()
        self.total += loss.item()
        if self.iterations % 2 == 0:
            self.actors.zero_grad()
            (self.actor(x) - self.critic(x).detach()).square().mean().backward()
            self.actors.step()
        if self.iterations % 4 == 0:
            self.total = 0.0
            self.counts["resets"] += 1
        return loss

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.iterations, self.counts["resets"], self.critic.calls


class Scaled(Delayed):
    """Updates by what a worker's own losses add up to, which is not equal on all workers."""

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().step(x)
        with torch.no_grad():
            for parameter in self.critic.parameters():
                parameter.mul_(1 - 0.001 * self.total)
        return loss


def _batches(size: int) -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [torch.randn(LOCAL * size, 4, dtype=torch.float64) for _ in range(STEPS)]


def compare(world: World, builder: str) -> dict[str, Any]:
    """How far parameters and numbers are from one device's; and how often it was captured."""
    own = slice(world.rank * LOCAL, (world.rank + 1) * LOCAL)
    alone, divided = Delayed(), Delayed()
    runner = Runner(
        divided.step, discover(divided.step), Config(strategy=builder, workers=1), world
    )
    total, numbers = 0.0, []
    for number, batch in enumerate(_batches(world.size), 1):
        alone.step(batch)
        total += float(runner.run(batch[own]))
        if number % 4 == 0:
            total = 0.0
        numbers.append(divided.numbers == alone.numbers and abs(divided.total - total) < 1e-12)
    state = runner.state_dict()
    models = {id(model): name for name, model in runner._objects.models.items()}
    pairs = ((alone.critic, divided.critic), (alone.actor, divided.actor))
    found = [(dict(one.state_dict()), dict(state[models[id(own)]])) for one, own in pairs]
    return {
        "parameters": max(difference([one], [other]) for one, other in found),
        "numbers": all(numbers),
        "captures": runner._preparation.captures.count,
    }


def refused(world: World) -> str:
    """What is said of updates that follow from a worker's own losses."""
    trainer = Scaled()
    runner = Runner(trainer.step, discover(trainer.step), Config(workers=1), world)
    try:
        for batch in _batches(1):
            runner.run(batch)
    except ParallaxError as error:
        return f"{type(error).__name__}: {error}"
    return ""
