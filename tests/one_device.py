"""What workers do in the tests of comparisons with one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallax.config import Config
from parallax.errors import ParallaxError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.one_device import Batch
from parallax.runtime.runner import Runner

WORDS, CLASSES, PAD = 40, 5, 0


class Net(nn.Module):
    """A table, and a layer behind it."""

    def __init__(self, drops: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.out = nn.Linear(4, CLASSES)
        self.drops = drops

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.norm(self.table(words).mean(1))
        return self.out(F.dropout(rows) if self.drops else rows)


def _mean(scores: torch.Tensor, labels: torch.Tensor, count: float) -> torch.Tensor:
    return F.cross_entropy(scores, labels, ignore_index=PAD)


def _pairs(scores: torch.Tensor, labels: torch.Tensor, count: float) -> torch.Tensor:
    return F.cross_entropy(scores, labels) + (scores @ scores.t()).square().mean()


def _counted(scores: torch.Tensor, labels: torch.Tensor, count: float) -> torch.Tensor:
    return F.cross_entropy(scores, labels, reduction="sum") / count


LOSSES = {"mean": _mean, "pairs": _pairs, "counted": _counted}


def _batch(made: torch.Generator, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(WORDS, (rows, length), generator=made)
    return words, torch.randint(CLASSES, (rows,), generator=made)


def _runner(world: World, name: str, settings: dict[str, Any], net: Net) -> Runner:
    net = net.double()
    optimizer = torch.optim.Adam(net.parameters(), 0.1)

    def step(words: torch.Tensor, labels: torch.Tensor, count: float) -> torch.Tensor:
        optimizer.zero_grad()
        loss = LOSSES[name](net(words), labels, count)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Runner(step, discover(step), Config(workers=1, **settings), world)


def compare(
    world: World, name: str, settings: dict[str, Any], net: Net
) -> tuple[list[float], str, bool]:
    """The largest differences of two steps, the table and whether random
    numbers are drawn.

    Args:
        name: of the loss.
        settings: beside the number of workers.
        net: the model.
    """
    runner = _runner(world, name, settings, net)
    made = torch.Generator().manual_seed(world.rank)
    rows = 6 - 2 * world.rank
    found = []
    for number in range(3):
        batch = (*_batch(made, rows, 3), float(rows))
        if number:
            found.append(runner.compare_with_one_device(*batch))
        else:
            runner.run(*batch)
    assert isinstance(found[-1].result, torch.Tensor)
    return [one.worst for one in found], str(found[-1]), found[-1].draws


def of_other_shapes(world: World, joins: bool) -> float | str:
    """The difference of a step of which workers have other lengths, or what is said of it.

    Args:
        joins: by a function that fills up what is missing.
    """
    runner = _runner(world, "mean", {}, Net())
    made = torch.Generator().manual_seed(world.rank)
    batch = (*_batch(made, 4, 3 + world.rank), 1.0)

    def join(batches: list[Batch]) -> Batch:
        (a, *first), (b, *second) = (args for args, _ in batches)
        # Rows of means: the other worker's words twice each, and these three times.
        words = torch.cat([a.repeat_interleave(4, 1), b.repeat_interleave(3, 1)])
        return (words, torch.cat([first[0], second[0]]), 1.0), {}

    runner.run(*batch)
    try:
        return runner.compare_with_one_device(*batch, join=join if joins else None).worst
    except ParallaxError as error:
        return f"{type(error).__name__}: {error}"
