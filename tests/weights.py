"""Batches whose tensors differ in their first sizes, run on several workers: for the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallax.config import Config
from parallax.errors import ParallaxError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner
from parallax.strategy.builders import StrategyBuilder

Parts = list[tuple[torch.Tensor, ...]]
"""By worker, its batch."""
Loss = Callable[..., torch.Tensor]


def _bags() -> tuple[nn.Module, Loss, list[Parts]]:
    """As many bags on both workers, and on one of them as many values."""
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(100, 4), "out": nn.Linear(4, 1)})

    def loss(values: torch.Tensor, offsets: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model["out"](model["bag"](values, offsets))[:, 0], wanted)

    wanted = torch.tensor([1.0, 2.0], dtype=torch.float64)
    first = torch.tensor([3, 7]), torch.tensor([0, 1]), wanted
    second = torch.tensor([1, 9, 20, 30, 50]), torch.tensor([0, 3]), wanted + 2
    return model, loss, [[first, second]] * 3


def _sequences(lengths: list[list[tuple[int, int]]]) -> tuple[nn.Module, Loss, list[Parts]]:
    """Sequences that lie time by time: by step and worker, how long both are."""
    model = nn.Embedding(50, 4)

    def loss(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (model(source).mean(0) - model(target).mean(0)).square().mean()

    return (
        model,
        loss,
        [
            [tuple(torch.randint(50, (size, 3)) for size in sizes) for sizes in each]
            for each in lengths
        ],
    )


def _rows(counts: list[tuple[int, int]]) -> tuple[nn.Module, Loss, list[Parts]]:
    """By step and worker, how many rows."""
    model = nn.Linear(3, 1)

    def loss(values: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(values), wanted)

    def part(count: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(count, 3).double(), torch.randn(count, 1).double()

    return model, loss, [[part(count) for count in each] for each in counts]


def _layers(name: str) -> tuple[nn.Module, Loss, list[Parts]]:
    """A layer whose gradients come in another order for one row, or none, than for several."""
    made: dict[str, Callable[[], nn.Module]] = {
        "gru": lambda: nn.GRU(4, 4, batch_first=True),
        "lstm": lambda: nn.LSTM(4, 4, batch_first=True),
        "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    }
    layer = made[name]()
    model = nn.ModuleDict({"table": nn.Embedding(20, 4), "layer": layer, "out": nn.Linear(4, 3)})

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = model["layer"](model["table"](ids))
        found = found if name == "attention" else found[0]
        return F.cross_entropy(model["out"](found).flatten(0, 1), labels.flatten())

    def part(count: int) -> tuple[torch.Tensor, ...]:
        return torch.randint(20, (count, 5)), torch.randint(3, (count, 5))

    counts = [(4, 4, 4, 4), (7, 1, 1, 2), (1, 6, 0, 2), (5, 0, 0, 2), (0, 3, 1, 0), (3, 3, 3, 3)]
    return model, loss, [[part(count) for count in each] for each in counts]


CASES: dict[str, Callable[[], tuple[nn.Module, Loss, list[Parts]]]] = {
    "bags": _bags,
    "equal by chance": lambda: _sequences([[(5, 5), (4, 6)], [(4, 6), (7, 7)]]),
    "equal for once": lambda: _sequences([[(5, 5), (5, 5)], [(4, 6), (6, 7)]]),
    "equal on one": lambda: _sequences([[(5, 5), (5, 5)], [(4, 6), (7, 7)]]),
    "recurrent": lambda: _layers("gru"),
    "LSTM": lambda: _layers("lstm"),
    "attention": lambda: _layers("attention"),
    "rows": lambda: _rows([(3, 5), (4, 4), (6, 2)]),
}


def micro_batches(world: World, strategy: str) -> float:
    """How far parameters are from those of one device, where workers' steps go backward in as many
    pieces as their batches have rows for."""
    torch.manual_seed(4)
    model, loss, _ = CASES["recurrent"]()
    model.double()
    first = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for some, wanted in zip(ids.split(2), labels.split(2), strict=True):
            part = loss(some, wanted) * len(some) / len(ids)
            part.backward()
            total = total + part.detach()
        optimizer.step()
        return total

    counts = [(4, 4), (4, 2), (6, 1), (3, 5), (1, 2), (3, 4)]
    data = [[torch.randint(3, (2, count, 5)) for count in each] for each in counts]
    for parts in data:
        step(*torch.cat(parts, 1))
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(first)
    runner = Runner(step, discover(step), Config(workers=1, strategy=strategy), world)
    for parts in data:
        runner.run(*parts[world.rank])
    (own,) = runner._objects.models
    found: dict[str, Any] = runner.state_dict()[own]
    return max(float((expected[key] - found[key]).abs().max()) for key in expected)


def compare(
    world: World,
    name: str,
    by_rows: bool,
    weigh: bool,
    strategy: StrategyBuilder | str = "HYBRID",
    clip: float = 0.0,
) -> float | str:
    """How far parameters are from those of one device, or what was refused.

    Args:
        name: of the case.
        by_rows: on one device, losses count by rows; else alike.
        weigh: the setting.
        strategy: by which workers train.
        clip: the norm to which gradients are clipped, if any.
    """
    torch.manual_seed(4)
    model, loss, everyone = CASES[name]()
    data = [parts[: world.size] for parts in everyone]
    model.double()
    first = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        own = loss(*batch)
        own.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return own

    for parts in data:
        rows = [len(batch[0]) if by_rows else 1 for batch in parts]
        optimizer.zero_grad()
        for count, batch in zip(rows, parts, strict=True):
            if count == 0:
                continue
            (loss(*batch) * count / sum(rows)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    expected = {key: value.clone() for key, value in model.state_dict().items()}

    model.load_state_dict(first)
    config = Config(workers=1, weigh_batches=weigh, strategy=strategy)
    runner = Runner(step, discover(step), config, world)
    try:
        for parts in data:
            runner.run(*parts[world.rank])
    except ParallaxError as error:
        return f"{type(error).__name__}: {error}"
    (own,) = runner._objects.models
    found: dict[str, Any] = runner.state_dict()[own]
    return max(float((expected[key] - found[key]).abs().max()) for key in expected)
