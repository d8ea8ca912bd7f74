"""Steps that check what they compute, run alone or on workers: for the tests."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from parallax.config import Config
from parallax.errors import CheckError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

ROWS, WIDTH = 6, 4
Check = Callable[[torch.Tensor, nn.Module], None]
"""Of the loss and the model."""


def _asserts(loss: torch.Tensor, net: nn.Module) -> None:
    assert not torch.isnan(loss), "the loss is no number"  # here


def _raises(loss: torch.Tensor, net: nn.Module) -> None:
    if not torch.isfinite(loss):
        raise ValueError(f"loss {loss.item():.3f}, {loss:.2f}, {loss}")  # here


def _exits(loss: torch.Tensor, net: nn.Module) -> None:
    value = loss.item()
    if not math.isfinite(value):
        print(f"Loss is {value}, stopping")
        sys.exit(1)  # here


def _by_numpy(loss: torch.Tensor, net: nn.Module) -> None:
    if np.isnan(loss.item()):
        raise FloatingPointError("nan: %.3f" % loss.item())  # here # noqa: UP031


def _each(loss: torch.Tensor, net: nn.Module) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None and parameter.grad.isnan().any():
            raise RuntimeError  # here


def _bounded(loss: torch.Tensor, net: nn.Module) -> None:
    assert -1 < loss.detach() <= 50, (loss, "large")  # here


CHECKS: dict[str, tuple[Check, str]] = {
    "assert": (_asserts, "AssertionError: the loss is no number."),
    "raise": (_raises, "ValueError: loss ?, ?, ?."),
    "exit": (_exits, "SystemExit: 1."),
    "numpy": (_by_numpy, "FloatingPointError: nan: nan."),
    "bounds": (_bounded, "AssertionError: (?, 'large')."),
}
"""Checks of the loss, and what they raise."""


def _settled(loss: torch.Tensor, net: nn.Module) -> None:
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())  # here


LATER: dict[str, tuple[Check, str]] = {
    "gradients": (_each, "RuntimeError."),
}
"""Checks between the backward pass and the update."""
LAST: dict[str, tuple[Check, str]] = {"parameters": (_settled, "AssertionError.")}
"""Checks after the update."""


class Net(nn.Module):
    """Looks up words, and scores their sum with some numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, words: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.table(words).sum(1) + x)
        return found


def make(name: str) -> tuple[Net, Any]:
    """A model, and the step that trains it with a check."""
    torch.manual_seed(2)
    net = Net().double()
    optimizer = torch.optim.Adam(net.parameters(), 0.1)

    def step(words: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(words, x), y)
        if name in CHECKS:
            CHECKS[name][0](loss, net)
        loss.backward()
        if name in LATER:
            LATER[name][0](loss, net)
        optimizer.step()
        if name in LAST:
            LAST[name][0](loss, net)
        return loss

    return net, step


def batches(counts: Sequence[Sequence[int]]) -> list[list[tuple[torch.Tensor, ...]]]:
    """By step and worker, a batch of so many rows; of fewer than none, with no numbers in it."""
    made = torch.Generator().manual_seed(4)
    found = []
    for parts in counts:
        found.append([])
        for count in parts:
            rows = abs(count)
            x = torch.randn(rows, WIDTH, generator=made).double()
            words = torch.randint(20, (rows, 3), generator=made)
            y = torch.randint(3, (rows,), generator=made)
            found[-1].append((words, x if count >= 0 else x * math.nan, y))
    return found


def train(
    world: World, name: str, counts: Sequence[Sequence[int]], settings: dict[str, Any]
) -> tuple[float, list[str]]:
    """How far parameters are from those of one device that leaves out steps whose check fails,
    and what was raised in these.

    Args:
        name: of the check.
        counts: see :func:`batches`.
        settings: beside the number of workers; ``late`` leaves updates to the step that follows.
    """
    given = batches(counts)
    net, step = make("")
    for division, parts in zip(counts, given, strict=True):
        if min(division) >= 0:
            step(*(torch.cat(both) for both in zip(*parts, strict=True)))
    expected = {key: value.clone() for key, value in net.state_dict().items()}
    net, step = make(name)
    settings = dict(settings)
    late = settings.pop("late", False)
    runner = Runner(step, discover(step), Config(workers=1, **settings), world)
    raised = []
    own = [parts[world.rank] for parts in given]
    for batch in runner.ahead(own, late_updates=True) if late else own:
        try:
            runner.run(*batch)
        except CheckError as error:
            raised.append(str(error))
    (model,) = runner._objects.models
    found: dict[str, Any] = runner.state_dict()[model]
    far = max(float((expected[key] - found[key]).abs().max()) for key in expected)
    return far, raised
