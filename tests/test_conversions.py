"""Numbers that a step's Python makes of what it computes: float(), int(), max() and min()."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors_help import alone, linear, marked_line, raised
from torch import nn
from user_cases import squares

from parallax.errors import CaptureError, DataDependentError

LABELS = torch.tensor([0, 1, 1, 0])


class Meter:
    best, total, seen = 9.0, 0.0, 0

    def add(self, loss: torch.Tensor, rows: int) -> float:
        self.total += float(loss) * rows
        self.seen += int(rows)
        self.best = min(self.best, float(loss))
        return self.total / self.seen


METER = Meter()


def _kinds(y: torch.Tensor, loss: torch.Tensor) -> Any:
    number = float(loss)
    return isinstance(number, float), isinstance(loss, float), isinstance(3, int | float), number


def _selected(y: torch.Tensor, loss: torch.Tensor) -> Any:
    """As many as a label says."""
    return torch.arange(int(LABELS.to(y.device).sum() + y.argmax(1).sum()) + 1).sum()


def _at_labels(scores: torch.Tensor) -> torch.Tensor:
    count = scores.shape[0]
    return scores[range(count), LABELS[:count]].sum()


def _seen(y: torch.Tensor, loss: torch.Tensor) -> Any:
    return METER.add(loss.detach(), len(y))


STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "float": lambda y, loss: float(loss.detach()),
    "float of a whole number": lambda y, loss: float((y.argmax(1) == LABELS).sum()) / 4,
    "float of a number": lambda y, loss: float((y.argmax(1) == LABELS).sum().item()),
    "float of a condition": lambda y, loss: float(loss > 0.5),
    "int": lambda y, loss: 100 * int((y.argmax(1) == LABELS).sum()) / len(y),
    "int of a float": lambda y, loss: int(-10 * loss),
    "int of a number": lambda y, loss: int(10 * loss.item()),
    "int of a condition": lambda y, loss: int((loss > 0.5).any()),
    "a size": _selected,
    "in a comprehension": lambda y, loss: sum([float(one) for one in y.detach().flatten()]),
    "mapped": lambda y, loss: sum(map(float, y.detach().flatten())) + float(loss.detach()),
    "isinstance": _kinds,
    "of Python's own": lambda y, loss: (
        float("1.5"),
        int("11", 2),
        float(loss),
        float.fromhex("8"),
    ),
    "max of numbers": lambda y, loss: max(loss.item(), 0.5, y.max().item()),
    "max of tensors": lambda y, loss: max(y.detach().flatten()),
    "max of both": lambda y, loss: max(0.1, loss.detach()),
    "max of Python's own": lambda y, loss: (max([3, 5]), max("ab", "c", key=len), min(2, 1)),
    "max of nothing": lambda y, loss: max([], default=loss.detach()),
    "clamped": lambda y, loss: max(0.2, min(float(loss), 0.7)),
    "exp": lambda y, loss: math.exp(min(float(loss), 20)),
    "meter": _seen,
    "range": lambda y, loss: _at_labels(y.detach()[y[:, 0] < 9]),
    "len of selected": lambda y, loss: float(len(y[y[:, 0] < 9])) + 2 * len([y]) + len("ab"),
    "equal": lambda y, loss: int(torch.equal(y, y.clone())) + 2 * int(y.equal(-y)),
    "equal of other shapes": lambda y, loss: y.equal(y[:1]),
    "close": lambda y, loss: (
        float(torch.allclose(y, 1.1 * y)) + 2 * int(y.allclose(1.1 * y, rtol=0.2))
    ),
    "one_hot": lambda y, loss: F.one_hot(y.argmax(1)).sum(),
    "one_hot of three": lambda y, loss: F.one_hot(y.argmax(1), 3),
}


def _built(read: Callable[[torch.Tensor, torch.Tensor], Any], trains: bool = False) -> Any:
    model, optimizer = linear()

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        y = model(x)
        loss = F.cross_entropy(y, LABELS)
        found = read(y, loss)
        (found if trains else loss).backward()
        optimizer.step()
        return found

    return model, step


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 3, generator=generator) for _ in range(4)]


@pytest.mark.parametrize("name", STEPS)
def test_what_python_makes_of_numbers(name: str) -> None:
    _, plain = _built(STEPS[name])
    METER.__dict__.clear()
    expected = [plain(x) for x in _batches()]
    meter = dict(METER.__dict__)
    METER.__dict__.clear()
    _, step = _built(STEPS[name])
    runner = alone(step)
    for x, wanted in zip(_batches(), expected, strict=True):
        found = runner.run(x)
        assert type(found) is type(wanted)
        same = torch.equal(found, wanted) if _is_exact(found) else found == pytest.approx(wanted)
        assert same
    assert pytest.approx(meter) == METER.__dict__
    assert {builtins.max, builtins.min, builtins.float, builtins.int} == {max, min, float, int}
    assert "float" not in globals()
    assert "int" not in globals()
    assert "range" not in globals()
    assert "len" not in globals()


def _is_exact(found: Any) -> bool:
    return isinstance(found, torch.Tensor) and not found.is_floating_point()


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "the greater": lambda y, loss: max(loss, y.square().mean()),
    "the less, or a number": lambda y, loss: min(loss, y.square().mean(), 5.0),
    "the first of equal ones": lambda y, loss: max(loss, loss + 0 * y.sum()),
    "a list": lambda y, loss: loss + max([one.square().sum() for one in y]),
    "of a generator": lambda y, loss: loss + min(one.square().sum() for one in y),
    "weighted": lambda y, loss: loss * min(1.0, 0.5 / float(loss)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_what_is_greater(name: str) -> None:
    model, plain = _built(LOSSES[name], trains=True)
    for x in _batches():
        plain(x)
    other, step = _built(LOSSES[name], trains=True)
    runner = alone(step)
    for x in _batches():
        runner.run(x)
    assert torch.allclose(model.weight, other.weight, rtol=1e-6)


def test_one_graph_for_all_numbers() -> None:
    """A queue's pointer, which Python's number would have a graph for each value of."""

    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("keys", torch.zeros(8, 2))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            place = int(self.place)  # type: ignore[operator]
            self.keys[place : place + 4] = y.detach()
            self.place[0] = (place + 4) % 8
            return y @ self.keys.clone().T

    def trained(through: bool) -> tuple[Queue, int]:
        torch.manual_seed(0)
        model = Queue()
        step = squares(model)
        runner = alone(step)
        for x in _batches():
            (runner.run if through else step)(x)
        return model, runner._preparation.captures.count

    (model, captures), (plain, _) = trained(True), trained(False)
    for name, value in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value), name
    assert captures == 1


def _times(y: torch.Tensor, loss: torch.Tensor) -> Any:
    return [y for _ in range(int(loss))]  # here


def _texts(y: torch.Tensor, loss: torch.Tensor) -> Any:
    return "%.3f" % float(loss)  # noqa: UP031 # here


def test_where_a_symbol_does_not_do() -> None:
    for read in (_times, _texts):
        raised(
            lambda read=read: alone(_built(read)[1]).run(_batches()[0]),
            DataDependentError,
            "depends on the values of tensors",
            f"at {marked_line(read)}: ",
        )
    assert "int" not in globals()


def test_what_else_fails_is_said() -> None:
    def read(y: torch.Tensor, loss: torch.Tensor) -> float:
        if float(loss) is not None:
            raise ValueError("no luck today")
        return 0.0

    raised(lambda: alone(_built(read)[1]).run(_batches()[0]), CaptureError, "no luck today")


def test_settings_that_python_needs_stay_guards() -> None:
    """range() takes numbers of Python's own: there is a graph for each value, as before."""
    model, optimizer = linear()
    model.register_buffer("times", torch.tensor(1))

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        y = model(x)
        for _ in range(int(model.times)):
            y = y.tanh()
        loss = y.square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    runner = alone(step)
    found = []
    for times in (1, 2, 1):
        model.times.fill_(times)
        before = model(_batches()[0])
        found.append((runner.run(_batches()[0]), before))
    for times, (loss, y) in zip((1, 2, 1), found, strict=True):
        for _ in range(times):
            y = y.tanh()
        assert torch.allclose(loss, y.square().sum())
    assert runner._preparation.captures.count == 2
