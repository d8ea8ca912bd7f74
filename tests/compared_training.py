"""Training with losses that compare rows of the batch with each other: for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from compared_rows import ALL, ITEMS, KINDS, USERS, WIDTH, Loss, Towers
from equality import difference
from errors_help import warnings_of_parallax
from reduced_rows import LOSSES
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.ops.whole_batch import WholeBatchSpec
from parallax.runtime.comm.world import World
from parallax.runtime.exchange.whole_batch import WholeBatch
from parallax.runtime.runner import Runner

_KNOWN: dict[str, Loss] = {**ALL, **LOSSES}


def towers() -> tuple[Towers, Callable[[Loss], Callable[..., torch.Tensor]]]:
    """A model, and what makes its training step of a loss."""
    torch.manual_seed(1)
    model = Towers().double()

    def training(loss: Loss) -> Callable[..., torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)

        def step(*batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            found = loss(model, *batch)
            found.backward()
            optimizer.step()
            return found.detach()

        return step

    return model, training


def batches(division: Sequence[Sequence[int]]) -> list[list[tuple[torch.Tensor, ...]]]:
    """By step and worker, users, items and kinds.

    Args:
        division: by step and worker, how many rows.
    """
    made = torch.Generator().manual_seed(4)
    return [
        [
            tuple(torch.randint(most, (rows,), generator=made) for most in (USERS, ITEMS, KINDS))
            for rows in counts
        ]
        for counts in division
    ]


def train(
    world: World, name: str, division: Sequence[Sequence[int]], strategy: str
) -> tuple[float, float, dict[str, float], list[str]]:
    """How far parameters are from those of one device, which has all workers' batches as one, and
    how far they have come; the bytes that were sent, by purpose; and warnings.

    Args:
        name: of the loss.
        division: by step and worker, rows.
    """
    model, training = towers()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    given = batches(division)
    step = training(_KNOWN[name])
    for parts in given:
        step(*(torch.cat(items) for items in zip(*parts, strict=True)))
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(start)
    step = training(_KNOWN[name])
    with warnings_of_parallax() as said:
        runner = Runner(step, discover(step), Config(workers=1, strategy=strategy), world)
        before = dict(runner.traffic)
        for parts in given:
            runner.run(*parts[world.rank])
    (own,) = runner._objects.models
    sent = {key: count - before.get(key, 0) for key, count in dict(runner.traffic).items()}
    return (
        difference(expected, dict(runner.state_dict()[own])),
        difference(expected, start),
        {key: count for key, count in sent.items() if count},
        said,
    )


def losses_of(
    world: World, name: str, division: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """What steps return, and what they return on one device."""
    _, training = towers()
    given = batches(division)
    step = training(_KNOWN[name])
    whole = [step(*(torch.cat(items) for items in zip(*parts, strict=True))) for parts in given]
    _, training = towers()
    step = training(_KNOWN[name])
    runner = Runner(step, discover(step), Config(workers=1), world)
    found: list[Any] = [runner.run(*parts[world.rank]) for parts in given]
    return [float(one) for one in found], [float(one) for one in whole]


class Texts(nn.Module):
    """Texts of any length beside their titles."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ITEMS, 6)
        self.layer = nn.LSTM(6, WIDTH, batch_first=True)
        self.of_titles = nn.Linear(6, WIDTH)

    def forward(self, texts: torch.Tensor, titles: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layer(self.words(texts))
        a = F.normalize(hidden.mean(1), dim=1)
        b = F.normalize(self.of_titles(self.words(titles).mean(1)), dim=1)
        return F.cross_entropy(a @ b.t() / 0.1, torch.arange(len(a)))


def train_texts(
    world: World, sizes: Sequence[Sequence[tuple[int, int]]]
) -> tuple[float, int, list[str]]:
    """The same of texts, with Adam and clipping: how far it is from one device, how often the step
    was captured, and warnings.

    Args:
        sizes: by step and worker, rows and words.
    """
    made = torch.Generator().manual_seed(4)
    given = [
        [
            tuple(torch.randint(ITEMS, (rows, n), generator=made) for n in (words, 3))
            for rows, words in counts
        ]
        for counts in sizes
    ]

    def training() -> tuple[Texts, Callable[..., torch.Tensor]]:
        torch.manual_seed(1)
        model = Texts().double()
        optimizer = torch.optim.Adam(model.parameters(), 0.05)

        def step(texts: torch.Tensor, titles: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(texts, titles)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            return loss.detach()

        return model, step

    whole, step = training()
    for parts in given:
        step(*(torch.cat(items) for items in zip(*parts, strict=True)))
    _, step = training()
    with warnings_of_parallax() as said:
        runner = Runner(step, discover(step), Config(workers=1), world)
        for parts in given:
            runner.run(*parts[world.rank])
    (own,) = runner._objects.models
    far = difference(dict(whole.state_dict()), dict(runner.state_dict()[own]))
    return far, runner._preparation.captures.count, said


def with_other_layouts(world: World) -> None:
    """Workers that do not compare the same rows."""
    exchange = WholeBatch(WholeBatchSpec((), (), 1 + world.rank, "t.py:3"), world)
    exchange.start(0, 2)
    exchange.finish(0)
