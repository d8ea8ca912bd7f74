"""Steps of which a worker may leave out passes and updates, by its batch: for the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equality import difference
from errors_help import warnings_of_parallax
from torch import nn

from parallax.config import Config
from parallax.errors import ParallaxError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

WIDTH, LABELS = 4, 5
Step = Callable[[torch.Tensor, torch.Tensor], Any]


class Net(nn.Module):
    """A trunk with two heads, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, LABELS)
        self.second = nn.Linear(WIDTH, LABELS)
        self.table = nn.Embedding(LABELS, WIDTH)

    def scores(self, head: nn.Module, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = head(self.trunk(x).tanh())
        return scores


def _mean(scores: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores[mask], labels[mask])


def _returns(net: Net) -> Step:
    """There is nothing to learn from a batch without labels."""
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        mask = y > 2
        if not mask.any():
            return None
        optimizer.zero_grad()
        loss = _mean(net.scores(net.first, x), y, mask)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        return loss

    return step


def _optimizer(net: Net) -> Step:
    """A head has an optimizer and a scheduler of its own."""
    used = torch.optim.Adam([*net.trunk.parameters(), *net.first.parameters()], 0.05)
    other = torch.optim.AdamW(net.second.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        mask = y > 2
        some = mask.any()
        loss = F.cross_entropy(net.scores(net.first, x), y)
        if some:
            loss = loss + _mean(net.scores(net.second, x), y, mask)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        used.step()
        if some:
            other.step()
            schedule.step()
        return loss

    return step


def _second_pass(net: Net, set_to_none: bool) -> Step:
    """The same optimizer is stepped again, with the gradients of another pass."""
    optimizer = torch.optim.Adam(net.parameters(), 0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net.scores(net.first, x), y)
        loss.backward()
        optimizer.step()
        mask = y > 2
        if mask.any():
            optimizer.zero_grad(set_to_none=set_to_none)
            _mean(net.scores(net.second, x + net.table(y)), y, mask).backward()
            optimizer.step()
        return loss

    return step


def _first_pass(net: Net) -> Step:
    """What may be left out comes first, and its gradients are added to."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        mask = y > 2
        if mask.any():
            _mean(net.scores(net.second, x), y, mask).backward()
        loss = F.cross_entropy(net.scores(net.first, x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _in_turn(net: Net) -> Step:
    """Each of two tasks is trained where a batch has something for it."""
    optimizer = torch.optim.Adam(net.parameters(), 0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for_first, for_second = y > 2, y == 0
        total = x.new_zeros(())
        if for_first.any():
            optimizer.zero_grad()
            loss = _mean(net.scores(net.first, x), y, for_first)
            loss.backward()
            optimizer.step()
            total = total + loss.detach()
        if for_second.any():
            optimizer.zero_grad()
            loss = _mean(net.scores(net.second, x + net.table(y)), y, for_second)
            loss.backward()
            optimizer.step()
            total = total + loss.detach()
        return total

    return step


def _heads(net: Net) -> Step:
    optimizer = torch.optim.SGD(net.parameters(), 0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net.scores(net.second, x), y)
        for_first = y > 2
        if for_first.any():
            loss = loss + 0 * net.scores(net.first, x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def _micro_batches(net: Net) -> Step:
    optimizer = torch.optim.Adam(net.parameters(), 0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        mask = y > 2
        if not mask.any():
            return None
        optimizer.zero_grad()
        for rows, labels, some in zip(x.chunk(2), y.chunk(2), mask.chunk(2), strict=True):
            scores = net.scores(net.first, rows)
            each = F.cross_entropy(scores, labels, reduction="none")
            ((each * some).sum() / mask.sum()).backward()
        optimizer.step()
        return mask.sum()

    return step


def _bound(net: Net) -> Step:
    """Updates follow from a number that the step changes."""
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    state = {"bound": 0.5}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net.scores(net.first, x), y)
        mask = y > 2
        if mask.any():
            loss = loss + _mean(net.scores(net.second, x), y, mask)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), state["bound"])
        state["bound"] *= 0.9
        optimizer.step()
        return loss

    return step


STEPS: dict[str, Callable[[Net], Step]] = {
    "returns": _returns,
    "optimizer": _optimizer,
    "second pass": lambda net: _second_pass(net, True),
    "zeroed": lambda net: _second_pass(net, False),
    "first pass": _first_pass,
    "in turn": _in_turn,
    "micro batches": _micro_batches,
    "bound": _bound,
}
OF_SIZES: dict[str, Callable[[Net], Step]] = {"heads": _heads}
"""For batches of several sizes."""
SEVERAL_UPDATES = ("second pass", "zeroed", "in turn")
"""Variables are used behind an update, which needs all of them on every worker."""


def batches(
    ranges: list[tuple[tuple[int, int], ...]], more: int = 0
) -> list[list[tuple[torch.Tensor, ...]]]:
    """By step and worker, rows and their labels, between two numbers.

    Args:
        ranges: of labels.
        more: rows, of every second step, and twice as many of every third one.
    """
    made = torch.Generator().manual_seed(2)

    def batch(rows: int, low: int, high: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(rows, WIDTH, generator=made, dtype=torch.float64)
        return x, torch.randint(low, high, (rows,), generator=made)

    return [
        [
            batch(4 + 2 * worker + more * (step % 3), low, high)
            for worker, (low, high) in enumerate(each)
        ]
        for step, each in enumerate(ranges)
    ]


def train(
    world: World, name: str, given: list[list[tuple[torch.Tensor, ...]]], strategy: str
) -> float:
    """How far parameters are from those of one device, which has all workers' batches as one.

    Args:
        name: of the step.
        given: by step and worker, the batch.
    """
    torch.manual_seed(1)
    net = Net().double()
    start = {key: value.clone() for key, value in net.state_dict().items()}
    step = {**STEPS, **OF_SIZES}[name](net)
    for parts in given:
        step(*(torch.cat(items) for items in zip(*parts, strict=True)))
    expected = {key: value.clone() for key, value in net.state_dict().items()}
    net.load_state_dict(start)
    step = {**STEPS, **OF_SIZES}[name](net)
    runner = Runner(step, discover(step), Config(workers=1, strategy=strategy), world)
    for parts in given:
        runner.run(*parts[world.rank])
    (model,) = runner._objects.models
    found: dict[str, Any] = runner.state_dict()[model]
    return difference(expected, dict(found))


def refused(world: World, given: list[list[tuple[torch.Tensor, ...]]], what: str) -> str:
    """What is said of a step that others cannot do for a worker."""
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(net.scores(net.first, x), y).backward()
        some = (y > 2).any()
        if some and what == "clips":
            nn.utils.clip_grad_norm_(net.first.parameters(), x.abs().max())
        if some and what == "decays":
            net.first.weight.data.mul_(0.9)
        if some and what == "forgets":
            net.first.bias.grad = None
        optimizer.step()
        if some and what == "schedules":
            schedule.step(0.1)

    runner = Runner(step, discover(step), Config(workers=1), world)
    try:
        for parts in given:
            runner.run(*parts[world.rank])
    except ParallaxError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def told_of_none(
    world: World, given: list[list[tuple[torch.Tensor, ...]]]
) -> tuple[str, list[str]]:
    """What is said where no worker's first batch has something to learn from."""
    torch.manual_seed(1)
    step = _returns(Net().double())
    runner = Runner(step, discover(step), Config(workers=1), world)
    with warnings_of_parallax() as found:
        try:
            for parts in given:
                runner.run(*parts[world.rank])
        except ParallaxError as error:
            return f"{type(error).__name__}: {error}", found
    return "", found
