"""Two tables with much computation between their lookups, on the workers of the pool."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner
from parallax.strategy.message_sizes import MessageSizes

WIDTH, BATCH = 192, 24


class Deep(nn.Module):
    """A perceptron, a table, a perceptron, another table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(50, WIDTH)
        self.second = nn.Embedding(40, WIDTH)
        self.below = nn.Sequential(*[nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)] * 2)
        self.between = nn.Sequential(
            *[nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)] * 2
        )

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.between(torch.tanh(self.below(x) + self.first(ids)))
        return (hidden * self.second(ids % 40)).sum()


def build() -> tuple[Deep, Callable[..., torch.Tensor]]:
    torch.manual_seed(5)
    model = Deep().double()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)

    def step(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x, ids) / len(x)
        loss.backward()
        optimizer.step()
        return loss

    return model, step


def train(world: World) -> tuple[str, float]:
    """The graph that ran, and the largest difference from one device after three steps."""
    generator = torch.Generator().manual_seed(9)
    whole = [
        (
            torch.randn(BATCH * world.size, WIDTH, generator=generator, dtype=torch.float64),
            torch.randint(50, (BATCH * world.size,), generator=generator),
        )
        for _ in range(3)
    ]
    alone, one_device = build()
    for batch in whole:
        one_device(*batch)
    _, step = build()
    runner = Runner(step, discover(step), Config(workers=1, seed=1), world)
    own = slice(world.rank * BATCH, (world.rank + 1) * BATCH)
    for x, ids in whole:
        runner.run(x[own], ids[own])
    found = runner.state_dict()["model"]
    worst = max(float((found[n] - p).abs().max()) for n, p in alone.state_dict().items())
    return str(runner.graph), worst


class Wide(nn.Module):
    """One large layer between small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(300, 1023, bias=False)
        self.small = nn.Linear(1023, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.small(torch.tanh(self.large(x)))
        return out


def train_wide(world: World, average: bool) -> tuple[str, float]:
    """The same for a product that is computed piece by piece; batches of several sizes."""
    generator = torch.Generator().manual_seed(9)
    sizes = [[640, 640], [640, 9], [0, 640]]
    parts = [
        [torch.randn(n, 300, generator=generator, dtype=torch.float64) for n in row]
        for row in sizes
    ]

    def build_wide() -> tuple[Wide, Callable[..., torch.Tensor]]:
        torch.manual_seed(5)
        model = Wide().double()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)

        def step(x: torch.Tensor, scale: float) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).sum() * scale
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        return model, step

    alone, one_device = build_wide()
    for row in parts:
        whole = torch.cat(row)
        one_device(whole, 1 / len(whole))
    _, step = build_wide()
    config = Config(workers=1, seed=1, run_option="AR", average_dense=average)
    runner = Runner(step, discover(step), config, world)
    # How many pieces are worth it depends on this machine's speed in this moment.
    with mock.patch.object(MessageSizes, "measured", return_value=MessageSizes()):
        for row in parts:
            own = row[world.rank]
            count = len(own) if average else sum(map(len, row))
            runner.run(own, 1 / max(count, 1))
    found = runner.state_dict()["model"]
    worst = max(float((found[n] - p).abs().max()) for n, p in alone.state_dict().items())
    return str(runner.graph), worst
