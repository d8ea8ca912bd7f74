"""What runs at capture only, and batches that cannot be inputs (RELIABILITY.md 54 and 95)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from errors_help import alone, linear, marked_line, raised, rows, warnings_of_parallax
from torch import nn

from parallax.errors import BatchError


def appends(log: list[Any], state: dict[str, Any], loss: torch.Tensor) -> None:
    log.append(loss.detach())  # here


def appends_number(log: list[Any], state: dict[str, Any], loss: torch.Tensor) -> None:
    log.append(loss.item())  # here


def adds(log: list[Any], state: dict[str, Any], loss: torch.Tensor) -> None:
    state["seen"].add(3)  # here


def writes(log: list[Any], state: dict[str, Any], loss: torch.Tensor) -> None:
    with open("/dev/null", "w") as file:  # here
        file.write("step")


def draws(log: list[Any], state: dict[str, Any], loss: torch.Tensor) -> None:
    random.shuffle([1, 2])


def times(log: list[Any], state: dict[str, Any], loss: torch.Tensor) -> None:
    time.perf_counter()  # here


ONCE: dict[str, tuple[Callable[..., Any], str]] = {
    "append": (appends, "changes Python values, which happens at capture only and is undone: log"),
    "append number": (appends_number, "is undone: log"),
    "add": (adds, "is undone: seen"),
    "file": (writes, "open runs at capture only"),
    "clock": (times, "the step reads the clock, which happens at capture only"),
    "random": (draws, "draws from Python's random module"),
}


@pytest.mark.parametrize("name", ONCE)
def test_what_runs_at_capture_only_is_said_once_with_its_line(name: str) -> None:
    body, message = ONCE[name]
    model, optimizer = linear()
    log: list[Any] = []
    state: dict[str, Any] = {"seen": set()}

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        body(log, state, loss)
        optimizer.step()
        return loss

    runner = alone(step)
    with warnings_of_parallax() as found:
        for count in (4, 4, 5):
            runner.run(rows(count))
    assert len(found) == 1, found
    assert message in found[0]
    if name != "random":
        assert marked_line(body) in found[0]
    assert (log, state) == ([], {"seen": set()})


# -- Batches --------------------------------------------------------------------------------


def batch_of(value: Callable[[], Any]) -> Callable[[], Any]:
    def case() -> Any:
        model, optimizer = linear()

        def step(x: Any) -> None:
            optimizer.zero_grad()
            model(torch.as_tensor(x)).sum().backward()
            optimizer.step()

        return alone(step).run(value())

    return case


BATCHES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "numpy": (lambda: np.zeros((4, 3)), ("a numpy ndarray", "torch.from_numpy()")),
    "nested numpy": (lambda: {"x": [np.float32(1)]}, ("a numpy float32",)),
    "sparse": (lambda: rows().to_sparse(), ("Tensor 0 of the batch is sparse", "indices")),
    "grad_fn": (
        lambda: nn.Linear(3, 3)(rows()),
        ("Tensor 0 of the batch was computed with gradients outside the step", "detach()"),
    ),
    "unhashable": (lambda: {1, 2}, ("holds a set", "pass tensors")),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_cannot_be_an_input_is_refused(name: str) -> None:
    value, fragments = BATCHES[name]
    error = raised(batch_of(value), BatchError, *fragments)
    assert error.exit_code == 5


def test_a_computed_batch_is_refused_after_one_that_wants_gradients() -> None:
    model, optimizer = linear()

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    runner = alone(step)
    runner.run(rows().requires_grad_())
    raised(lambda: runner.run(nn.Linear(3, 3)(rows())), BatchError, "computed with gradients")
