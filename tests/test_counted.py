"""Numbers that a step changes are changed by it, as on one device."""

from __future__ import annotations

from typing import Any

import counted
import pytest
import torch
from errors_help import alone, linear, rows, warnings_of_parallax
from pool import Pool

COUNT = 0


@pytest.mark.parametrize(("size", "builder"), [(1, "HYBRID"), (2, "HYBRID"), (2, "AR")])
def test_delayed_updates(pool: Pool, size: int, builder: str) -> None:
    for found in pool.run(size, counted.compare, builder):
        assert found["parameters"] < 1e-10, found
        assert found["numbers"], "numbers differ from those of one device"
        assert found["captures"] <= 7  # one to tell the rows from as many features


def test_a_number_of_this_workers_losses_changes_no_parameters(pool: Pool) -> None:
    for problem in pool.run(2, counted.refused):
        assert "VariableError" in problem
        assert "critic" in problem


def test_globals_cells_and_entries() -> None:
    model, optimizer = linear()
    cell, settings = 0, {"deep": {"count": 10}}

    def step(x: torch.Tensor) -> Any:
        global COUNT
        nonlocal cell
        COUNT += 1
        cell = cell + 2
        settings["deep"]["count"] -= 1
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return COUNT, cell * 1.0

    runner = alone(step)
    with warnings_of_parallax() as said:
        found = [runner.run(rows(4)) for _ in range(5)]
    assert not said
    assert found == [(number, 2.0 * number) for number in range(1, 6)]
    assert (COUNT, cell, settings["deep"]["count"]) == (5, 10, 5)
    assert runner._preparation.captures.count == 1


def test_a_number_that_cannot_be_a_symbol_is_captured_for_each_value() -> None:
    model, optimizer = linear()
    names: dict[str, Any] = {"count": 0, "text": ""}

    def step(x: torch.Tensor) -> None:
        names["count"] += 1
        names["text"] = f"{names['count']:04d}"
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    runner = alone(step)
    for count in range(1, 4):
        runner.run(rows(4))
        assert names == {"count": count, "text": f"{count:04d}"}
    assert runner._preparation.captures.count == 3


class Queue(torch.nn.Module):
    """A queue of keys with a pointer, in buffers (He et al. 2020, MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = torch.nn.Linear(3, 2).double()
        self.register_buffer("keys", torch.zeros(6, 2, dtype=torch.float64))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        loss = (found @ self.keys.clone().t()).square().mean() + found.square().mean()
        place = int(self.pointer)
        self.keys[place : place + len(x)] = found.detach()
        self.pointer[0] = (place + len(x)) % len(self.keys)
        return loss


def _queued(through: Any) -> dict[str, torch.Tensor]:
    model = Queue()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    run = through(step)
    torch.manual_seed(6)
    for _ in range(7):
        run(torch.randn(2, 3, dtype=torch.float64))
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_pointer_in_a_buffer_of_one_number() -> None:
    expected, found = _queued(lambda step: step), _queued(lambda step: alone(step).run)
    assert expected.keys() == found.keys()
    assert all(torch.allclose(found[name], value) for name, value in expected.items())
