"""Batches with lists that have a tensor for each item, such as an image: for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from equality import difference
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

WIDTH, CLASSES, STEPS = 4, 3, 3
Item = tuple[torch.Tensor, torch.Tensor]
"""Points [points, width] and their classes."""


def _counted(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    found = F.cross_entropy(scores, classes, reduction="none") * (classes > 0)
    return found.sum() / (classes > 0).sum().clamp(min=1)


def _normalised(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """With what is computed of the classes of the item alone."""
    share = (classes > 0).double().mean()
    found = F.cross_entropy(scores, classes, reduction="none")
    return (found * torch.where(classes > 0, 1 - share, share)).mean()


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "counted": _counted,
    "normalised": _normalised,
    "mean": lambda scores, classes: F.cross_entropy(scores, classes),
    "squares": lambda scores, classes: F.mse_loss(scores, F.one_hot(classes, CLASSES).double()),
    "sum": lambda scores, classes: (
        F.cross_entropy(scores, classes, reduction="sum") / max(len(classes), 1)
    ),
    "selected": lambda scores, classes: scores[classes < 2].square().sum() / len(classes),
}


def train(world: World, name: str, told_by: str, items: int, strategy: str) -> float:
    """How far parameters are from those of one device, which has all workers' items in its lists.

    Args:
        name: of the loss of an item.
        told_by: what else tells that lists have items: a tensor with a row for each, or another
            list, whose tensors have another first size.
        items: of each worker.
    """
    torch.manual_seed(1)
    made = torch.Generator().manual_seed(2)
    net = nn.Linear(WIDTH, CLASSES).double()
    start = {key: value.clone() for key, value in net.state_dict().items()}

    def item(points: int) -> Item:
        x = torch.randn(points, WIDTH, generator=made, dtype=torch.float64)
        return x, torch.randint(CLASSES, (points,), generator=made)

    given = [
        [[item(2 + 2 * worker + number) for number in range(items)] for worker in range(world.size)]
        for _ in range(STEPS)
    ]

    def stepping() -> Callable[..., torch.Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(
            points: Sequence[torch.Tensor], classes: Sequence[torch.Tensor], more: torch.Tensor
        ) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.stack([c.double() for c in more]).mean() * net.bias.square().sum()
            for x, y in zip(points, classes, strict=True):
                loss = loss + LOSSES[name](net(x), y) / len(points)
            loss.backward()
            optimizer.step()
            return loss

        return step

    def batch(parts: Sequence[Item]) -> tuple[Sequence[torch.Tensor], ...]:
        points, classes = zip(*parts, strict=True)
        if told_by == "rows":
            return points, classes, torch.stack([x.mean() for x in points])
        return points, classes, [torch.ones(1 + len(x)).mean(0, True) for x in points]

    step = stepping()
    for parts in given:
        step(*batch([one for part in parts for one in part]))
    expected = {key: value.clone() for key, value in net.state_dict().items()}
    net.load_state_dict(start)
    step = stepping()
    runner = Runner(step, discover(step), Config(workers=1, strategy=strategy), world)
    for parts in given:
        runner.run(*batch(parts[world.rank]))
    (model,) = runner._objects.models
    return difference(expected, dict(runner.state_dict()[model]))
