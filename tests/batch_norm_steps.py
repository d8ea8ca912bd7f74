"""Models that normalise over the batch, on several workers and on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import difference, moved
from torch import nn

from parallax.config import Config
from parallax.errors import BatchError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

LOCAL, STEPS, SEED = 4, 3, 5


def images(affine: bool = True, momentum: float | None = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4, affine=affine, momentum=momentum),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3),
        nn.BatchNorm2d(3, momentum=momentum),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def features() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(72, 6),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.Tanh(),
        nn.Linear(6, 3),
    )


class Sequences(nn.Module):
    """Normalised [rows, channels, time], behind a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(40, 5), nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.flatten(1).abs() * 10).long() % 40
        normalized: torch.Tensor = self.norm(self.table(ids).transpose(1, 2))
        return self.out(normalized.amax(2))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "images": images,
    "no weights": lambda: images(affine=False),
    "cumulative": lambda: images(momentum=None),
    "features": features,
    "sequences": Sequences,
    "synchronised by torch": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(images()),
}


def build(
    name: str, rows: int, kind: torch.dtype, device: torch.device, steps: int = STEPS
) -> tuple[nn.Module, Any, list[Any]]:
    torch.manual_seed(SEED)
    model = MODELS[name]().to(kind).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    batches = [
        (torch.randn(rows, 2, 6, 6).to(kind), torch.randint(3, (rows,))) for _ in range(steps)
    ]
    return model, step, moved(batches, device)


def train(
    world: World,
    name: str,
    builder: str,
    division: list[int] | None,
    kind: torch.dtype,
    settings: dict[str, Any],
    steps: int = STEPS,
) -> tuple[float, dict[str, int]]:
    """How far parameters and statistics are from one device's, and the bytes that were sent."""
    parts = division or [LOCAL] * world.size
    # What torch synchronises, one device on the CPU refuses.
    alone = "images" if name == "synchronised by torch" else name
    model, step, batches = build(alone, sum(parts), kind, world.device, steps)
    for batch in batches:
        step(*batch)
    expected = moved(dict(model.state_dict()), torch.device("cpu"))

    model, step, batches = build(name, sum(parts), kind, world.device, steps)
    config = Config(strategy=builder, workers=1, seed=SEED, **settings)
    runner = Runner(step, discover(step), config, world)
    first, before = sum(parts[: world.rank]), runner.traffic
    for batch in batches:
        runner.run(*[item[first : first + parts[world.rank]] for item in batch])
    (found,) = (
        dict(state) for name, state in runner.state_dict().items() if name in runner._objects.models
    )
    return difference(expected, moved(found, torch.device("cpu"))), {
        purpose: count - before.get(purpose, 0) for purpose, count in runner.traffic.items()
    }


def refused(world: World, name: str, division: list[int], settings: dict[str, Any]) -> str:
    """What is said of a batch that is divided so."""
    _, step, batches = build(name, sum(division), torch.float64, world.device)
    runner = Runner(step, discover(step), Config(workers=1, seed=SEED, **settings), world)
    first = sum(division[: world.rank])
    with pytest.raises(BatchError) as found:
        runner.run(*[item[first : first + division[world.rank]] for item in batches[0]])
    return str(found.value)
