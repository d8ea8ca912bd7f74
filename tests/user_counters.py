"""Steps that do otherwise by a number that they count themselves, as people do: see user_steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from user_cases import STEPS, Built, case, classes, mlp

_WARM, _LAST, _LEAST = 2, 3, 0.01


def _rate(number: int) -> float:
    """A warm-up, a cosine, and a floor."""
    if number < _WARM:
        return 0.1 * (number + 1) / (_WARM + 1)
    if number > _LAST:
        return _LEAST
    share = (number - _WARM) / (_LAST - _WARM)
    return _LEAST + 0.5 * (1 + math.cos(math.pi * share)) * (0.1 - _LEAST)


def _counting(
    rows: int, model: nn.Module, optimizer: torch.optim.Optimizer, before: Callable[[int], None]
) -> Built:
    """A step that counts, and does something by its number first."""
    held = SimpleNamespace(number=0)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        before(held.number)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        held.number += 1
        return loss

    return [model], step, [*classes(rows), *classes(rows)]


@case
def rates_with_a_floor(rows: int) -> Built:
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def before(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = _rate(number)

    return _counting(rows, model, optimizer, before)


@case
def momentum_that_is_set(rows: int) -> Built:
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)

    def before(number: int) -> None:
        optimizer.param_groups[0]["momentum"] = 0.8
        if number == _WARM:
            optimizer.param_groups[0]["lr"] = 0.01

    return _counting(rows, model, optimizer, before)


@case
def thawed_within(rows: int) -> Built:
    """Layers that the step freezes and unfreezes once, and that stay so."""
    model = mlp(4, 3)
    first: nn.Module = model[0]

    def before(number: int) -> None:
        if number == 0:
            first.requires_grad_(False)
        if number == _WARM:
            for parameter in first.parameters():
                parameter.requires_grad = True

    return _counting(rows, model, torch.optim.Adam(model.parameters(), 0.05), before)


class _Scaled(nn.Module):
    """Does more while it is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x


@case
def modes_that_stay(rows: int) -> Built:
    """Parts of a model are set to evaluation once; that a number is one is no truth value."""
    last = _Scaled()
    model = nn.Sequential(_Scaled(), mlp(4, 3), last)

    def before(number: int) -> None:
        if number == 1:
            model.eval()
        if number == STEPS:
            last.train()

    return _counting(rows, model, torch.optim.Adam(model.parameters(), 0.05), before)


@case
def steps_that_train_nothing(rows: int) -> Built:
    """Now and then; and a parameter that says how far a model is."""
    model, held = mlp(4, 3), SimpleNamespace(number=0)
    model.phase = nn.Parameter(torch.tensor(0, dtype=torch.uint8), requires_grad=False)
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], 0.05)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        held.number += 1
        if held.number % _LAST == 0:
            with torch.no_grad():
                return F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels) * (1 + model.phase)
        loss.backward()
        optimizer.step()
        model.phase.data += 1
        return loss

    return [model], step, [*classes(rows), *classes(rows)]


class _Average:
    """A callback that a trainer calls by the name of what has happened."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = {name: one.detach().clone() for name, one in model.named_parameters()}

    def __call__(self, event: str) -> None:
        if event == "after_step":
            for name, parameter in self.model.named_parameters():
                self.values[name] -= 0.1 * (self.values[name] - parameter.detach())


@case
def averages_of_callbacks(rows: int) -> Built:
    model = mlp(4, 3)
    trainer = SimpleNamespace(callbacks=[_Average(model)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        average = trainer.callbacks[0].values
        target = torch.func.functional_call(model, average, (x,)).detach()
        loss = F.cross_entropy(model(x), labels) + F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        for callback in trainer.callbacks:
            callback("after_step")
        return loss

    return [model], step, [*classes(rows), *classes(rows)]
