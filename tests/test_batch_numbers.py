"""Whole numbers of a batch: constants of the graph until they have differed, then its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors_help import alone, warnings_of_parallax
from torch import nn

Loss = Callable[[nn.Module, torch.Tensor, Any], torch.Tensor]


def _step(loss: Loss) -> Callable[..., torch.Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.001)

    def step(x: torch.Tensor, number: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, x, number)
        value.backward()
        optimizer.step()
        return value

    return step


def _captures(loss: Loss, numbers: list[Any]) -> int:
    """How often a step is captured that gives what eager steps give."""
    torch.manual_seed(6)
    batches = [(torch.randn(3, 8, 4, dtype=torch.float64), number) for number in numbers]
    step = _step(loss)
    expected = [step(*batch) for batch in batches]
    runner = alone(_step(loss))
    found = [runner.run(*batch) for batch in batches]
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-12)
    return runner._preparation.captures.count


def _squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


COUNTS = list(range(1, 13))
USES: dict[str, tuple[Loss, int]] = {
    "a factor": (lambda m, x, n: _squares(m, x) * n, 3),
    "a power": (lambda m, x, n: _squares(m, x) * 0.5**n, 3),
    "a function": (lambda m, x, n: _squares(m, x) * math.cos(n / 3), 3),
    "a mask": (lambda m, x, n: (m(x) * (torch.arange(4) < n)).square().sum(), 3),
    # Before three, from three to ten, and after: each side of a branch is a graph.
    "a schedule": (lambda m, x, n: _squares(m, x) * min(1.0, n / 10), 4),
    "a turn": (lambda m, x, n: _squares(m if n % 4 else m[0], x), 4),
    "a slice": (lambda m, x, n: m(x[:, : n % 8 + 1]).square().sum(), 3),
    "its kind": (lambda m, x, n: _squares(m, x) * (n if isinstance(n, int) else 0), 3),
}


@pytest.mark.parametrize("use", USES)
def test_a_number_that_counts_is_an_input(use: str) -> None:
    loss, captures = USES[use]
    assert _captures(loss, COUNTS) <= captures


def test_a_choice_between_two_kinds_of_steps_stays_a_constant() -> None:
    def chosen(model: nn.Module, x: torch.Tensor, which: int) -> torch.Tensor:
        return _squares(model[which], x)  # type: ignore[index]

    assert _captures(chosen, [0, 1, 0, 1, 1, 0]) == 2


def test_what_must_be_a_constant_stays_one() -> None:
    def formatted(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
        return _squares(model, x) * len(f"{number:d}")

    with warnings_of_parallax() as found:
        assert _captures(formatted, [1, 2, 3, 10, 100, 2, 100]) == 5
    assert any("a whole number of the batch: 3 values were seen" in line for line in found)


def test_numbers_in_lists() -> None:
    def weighed(model: nn.Module, x: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        weights = torch.as_tensor(numbers, dtype=x.dtype)
        return (model(x).square().mean((1, 2)) * weights).sum()

    assert _captures(weighed, [[n, 7 * n % 5, 1] for n in COUNTS]) == 3


def test_truth_values_are_constants() -> None:
    def either(model: nn.Module, x: torch.Tensor, flag: bool) -> torch.Tensor:
        return _squares(model, x) if flag else _squares(model[0], x)  # type: ignore[index]

    assert _captures(either, [True, False, True, False]) == 2
