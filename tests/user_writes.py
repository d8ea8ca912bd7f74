"""Python values that steps set, as people do in trainers: what a script sees after each step."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

STEPS = 7
Held = SimpleNamespace


@dataclass
class Result:
    """What a trainer keeps of a step."""

    loss: float
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A trainer's values.

    Args:
        first: what is there before the first step.
        body: what the step does after its update, given the loss.
        factor: what the step multiplies its loss by.
        between: what the loop does after each step.
    """

    first: Callable[[], dict[str, Any]]
    body: Callable[[Held, torch.Tensor], None]
    factor: Callable[[Held], float] = lambda held: 1.0
    between: Callable[[Held, int], None] = lambda held, number: None


CASES: dict[str, Case] = {}


def case(
    factor: Callable[[Held], float] = lambda held: 1.0,
    between: Callable[[Held, int], None] = lambda held, number: None,
    **first: Callable[[], Any],
) -> Callable[[Callable[[Held, torch.Tensor], None]], None]:
    """Add what a step does, with the values that are there at first."""

    def add(body: Callable[[Held, torch.Tensor], None]) -> None:
        def make() -> dict[str, Any]:
            return {name: value() for name, value in first.items()}

        CASES[body.__name__] = Case(make, body, factor, between)

    return add


def trainer(name: str) -> tuple[nn.Module, Held, Callable[[torch.Tensor], torch.Tensor]]:
    """A model, what the trainer holds, and its step."""
    wanted = CASES[name]
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    held = Held(**wanted.first())
    body, factor = wanted.body, wanted.factor

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() * factor(held)
        loss.backward()
        optimizer.step()
        body(held, loss)
        return loss

    return model, held, step


@case(last=lambda: 0.0)
def last_loss(held: Held, loss: torch.Tensor) -> None:
    held.last = loss.item()


@case()
def new_attribute(held: Held, loss: torch.Tensor) -> None:
    held.last = loss.item()


@case(flag=lambda: False, factor=lambda held: 2.0 if held.flag else 1.0)
def flag_that_decides(held: Held, loss: torch.Tensor) -> None:
    held.flag = True


def _reset(held: Held, number: int) -> None:
    if number % 2 == 0:
        held.flag, held.number = False, 3


@case(flag=lambda: False, number=lambda: 3, between=_reset)
def flag_that_the_loop_resets(held: Held, loss: torch.Tensor) -> None:
    held.flag = True
    held.number = 5


@case(mode=lambda: "a", factor=lambda held: 2.0 if held.mode == "b" else 1.0)
def modes_in_turn(held: Held, loss: torch.Tensor) -> None:
    held.mode = "b" if held.mode == "a" else "a"


@case(counts=dict, factor=lambda held: 1 / (1 + held.counts.get("n", 0)))
def count_that_is_not_there_at_first(held: Held, loss: torch.Tensor) -> None:
    held.counts["n"] = held.counts.get("n", 0) + 1


@case(factor=lambda held: 1 / (1 + getattr(held, "count", 0)))
def attribute_that_is_not_there_at_first(held: Held, loss: torch.Tensor) -> None:
    if not hasattr(held, "count"):
        held.count = 0
    held.count += 1


@case(sums=lambda: collections.defaultdict(float), counts=collections.Counter)
def sums_of_an_epoch(held: Held, loss: torch.Tensor) -> None:
    held.sums["loss"] += loss.item()
    held.sums["n"] += 1
    held.counts.update(steps=2)


@case(metrics=lambda: None)
def metrics_in_a_new_dict(held: Held, loss: torch.Tensor) -> None:
    held.metrics = {"loss": loss.item(), "n": 1, "big": (loss > 1e-3).double().item()}


@case()
def metrics_with_tensors(held: Held, loss: torch.Tensor) -> None:
    held.metrics = {"loss": loss.item(), "all": [loss.detach(), 2], "name": ("a", loss.item())}


@case()
def object_of_a_class(held: Held, loss: torch.Tensor) -> None:
    held.result = Result(loss.item(), (1, loss.item(), "a"))


@case(metrics=dict)
def updated_dict(held: Held, loss: torch.Tensor) -> None:
    held.metrics.update(loss=loss.item(), twice=(2 * loss).item())


@case(entries=lambda: {"old": 3})
def removed_entry(held: Held, loss: torch.Tensor) -> None:
    held.entries.pop("old", None)
    held.entries["new"] = None


def _new_epoch(held: Held, number: int) -> None:
    if number % 3 == 2:
        held.losses, held.flags, held.history = [], {}, {"loss": []}


@case(losses=list, flags=dict, history=lambda: {"loss": []}, between=_new_epoch)
def lists_of_an_epoch(held: Held, loss: torch.Tensor) -> None:
    held.losses.append(loss.item())
    held.flags["any"] = True
    held.history["loss"].append(loss.detach())


@case(history=lambda: collections.defaultdict(list))
def histories_by_name(held: Held, loss: torch.Tensor) -> None:
    held.history["loss"].append(loss.item())
    held.history["tensor"].append(loss)


@case(records=list)
def records_of_steps(held: Held, loss: torch.Tensor) -> None:
    held.records.append({"loss": loss.item(), "parts": (loss.detach(), 1, "a")})
    held.records.extend([1, 2.0])


@case(window=lambda: collections.deque([0.0], maxlen=3), all=collections.deque)
def windows_of_losses(held: Held, loss: torch.Tensor) -> None:
    held.window.append(loss.item())
    held.all.extend([loss.detach(), 2])


def plain(value: Any) -> Any:
    """A copy to compare: tensors as numbers."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.item())
    if isinstance(value, SimpleNamespace | Result):
        return (type(value).__name__, plain(vars(value)))
    if isinstance(value, dict):
        return (type(value).__name__, {key: plain(item) for key, item in value.items()})
    if isinstance(value, list | tuple | collections.deque):
        return (type(value).__name__, *map(plain, value))
    return (type(value).__name__, value)
