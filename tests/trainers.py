"""A trainer that keeps all it has in itself, its runner and its own data included."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equality import difference
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

LOCAL, STEPS, SEED = 3, 4, 5


class Source:
    """The data of one worker, read by hand."""

    def __init__(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        self.x, self.labels = x, labels


class Trainer:
    """Trains on one device as well as by a runner that it keeps."""

    def __init__(self, world: World | None = None, workers: int = 1) -> None:
        torch.manual_seed(SEED)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.steps = torch.zeros((), dtype=torch.float64)
        self.losses: list[torch.Tensor] = []
        x = torch.randn(STEPS, LOCAL * workers, 4, dtype=torch.float64)
        labels = torch.randint(3, (STEPS, LOCAL * workers))
        self.run: Any = self.step
        rank = 0
        if world is not None:
            rank = world.rank
            self.runner = Runner(self.step, discover(self.step), Config(workers=1), world)
            self.run = self.runner.run
            workers = world.size
        # Of another number of batches on each worker, as data that do not divide have it.
        own = slice(rank * LOCAL, None if world is None else (rank + 1) * LOCAL)
        more = torch.randn(rank, LOCAL, 4, dtype=torch.float64)
        self.source = Source(x[:, own] if world is None else torch.cat([x[:, own], more]), labels)
        self.first = x[0, own].clone()
        self.dataset = torch.utils.data.TensorDataset(x[:, own])
        self.labels = labels[:, own]

    def step(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), labels)
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.average[name].lerp_(parameter, 0.1)
        return loss

    def fit(self, first: int = 0, last: int = STEPS) -> None:
        for number in range(first, last):
            loss = self.run(self.source.x[number], self.labels[number])
            self.losses.append(loss.detach())


def compare(world: World) -> dict[str, Any]:
    """A trainer's numbers against one device's, what its state has, and whether data stay."""
    alone = Trainer(workers=world.size)
    alone.fit()
    trainer = Trainer(world, world.size)
    own = [trainer.source.x.clone(), trainer.first.clone()]
    trainer.fit(last=2)
    state = trainer.runner.state_dict()
    again = Trainer(world, world.size)
    again.runner.load_state_dict(state)
    again.fit(2)
    found = again.runner.state_dict()
    expected = {f"model.{k}": v for k, v in alone.model.state_dict().items()}
    expected |= {f"average.{k}": v for k, v in alone.average.items()}
    got = {f"model.{k}": v for k, v in found["model"].items()}
    got |= {f"average.{k}": v for k, v in again.average.items()}
    kept = [trainer.source.x, trainer.first]
    return {
        "difference": difference(expected, got),
        "steps": float(again.steps),
        "names": sorted(state),
        "data": all(torch.equal(a, b) for a, b in zip(own, kept, strict=True)),
    }
