"""Data and random numbers that a step would take by itself, at capture only."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from errors_help import alone, linear, marked_line, raised, rows
from test_errors_capture_only import warnings_of_parallax
from torch.utils.data import DataLoader

from parallax.errors import UnsupportedError


class Endless:
    """Begins anew at the end, as scripts do that count steps."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batches = iter(loader)

    def __next__(self) -> Any:
        try:
            return next(self.batches)  # here
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)


def forever(items: list[Any]) -> Iterator[Any]:
    while True:
        yield from items


LOADER = DataLoader(list(rows(8)), batch_size=2)
ONLY: Iterator[Any] = iter([])
"""Each test puts its own here."""


class Keeping:
    def __init__(self, kept: Any) -> None:
        self.kept = kept


# What takes a value, given something that has it; what that is, and the name of the place.
TAKEN: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], str]] = {
    "a list's": (lambda it: next(it), lambda: iter(list(rows(8))), "held"),
    "a loader's": (lambda it: next(it), lambda: iter(LOADER), "held"),
    "a generator's": (lambda it: next(it), lambda: forever([rows()]), "held"),
    "in a loop": (lambda it: [x * 1 for x in it], lambda: iter([rows(), rows()]), "held"),
    "counted": (lambda it: rows() * next(it), lambda: itertools.count(1), "held"),
    "of an attribute": (lambda it: next(it.kept), lambda: Keeping(iter([rows()])), "held.kept"),
    "of an entry": (lambda it: next(it["x"]), lambda: {"x": iter([rows()])}, "held['x']"),
    "of an item": (lambda it: next(it[1]), lambda: [1, iter([rows()])], "held[1]"),
    "of two at once": (
        lambda it: next(zip(*it, strict=False)),
        lambda: [iter([rows()])],
        "held[0]",
    ),
    "inside the user's": (lambda it: next(it), lambda: Endless(LOADER), "held.batches"),
    "of a loader": (lambda it: next(iter(it)), lambda: LOADER, "iter(loader)"),
    "of a loader's epoch": (lambda it: [x * 1 for x in it], lambda: LOADER, "iter(loader)"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_step_that_takes_its_data_itself_is_refused(name: str) -> None:
    take, make, place = TAKEN[name]
    model, optimizer = linear()
    held = make()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        taken = take(held)
        loss: torch.Tensor = model(taken if isinstance(taken, torch.Tensor) else taken[0]).sum()
        loss.backward()
        optimizer.step()
        return loss

    before = [parameter.clone() for parameter in model.parameters()]
    runner = alone(step)
    error = raised(runner.run, UnsupportedError, f"The step takes a value from {place!r}")
    own = f"{__file__}:{take.__code__.co_firstlineno}:"
    line = marked_line(Endless.__next__) if name.startswith("inside") else own
    assert str(error.where).startswith(line)
    assert "runner.run(next(batches))" in error.hint
    assert all(map(torch.equal, before, model.parameters()))
    # Nothing was taken, and what was there is there again.
    assert torch.equal(torch.as_tensor(take(held)[0]), torch.as_tensor(take(make())[0]))


def test_a_global_iterator_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = linear()
    monkeypatch.setitem(globals(), "ONLY", iter([rows()]))

    def step() -> None:
        optimizer.zero_grad()
        model(next(ONLY)).sum().backward()  # here
        optimizer.step()

    error = raised(alone(step).run, UnsupportedError, "takes a value from 'ONLY' (list_iterator)")
    assert marked_line(step) in str(error.where)
    assert next(ONLY).shape == rows().shape


def test_iterators_of_the_step_and_those_that_it_leaves_alone_are_fine() -> None:
    model, optimizer = linear()
    batches = iter([rows(2), rows(3)])
    log = Keeping(batches)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        assert log.kept is batches
        x = x.to(next(model.parameters()).dtype)
        for _, part in enumerate(x.split(1)):
            model(part).sum().backward()
        optimizer.step()
        return x.sum()

    runner = alone(step)
    assert [len(x) for x in batches if runner.run(x) is not None] == [2, 3]
    assert log.kept is batches


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "python": (lambda: random, lambda r: r.random(), "Python's random module"),
    "numpy": (lambda: np.random, lambda r: r.rand(), "NumPy's random module"),
    "own python": (lambda: random.Random(3), lambda r: r.random(), "'generator'"),
    "own numpy": (lambda: np.random.default_rng(3), lambda r: r.beta(1, 1), "'generator'"),
    "old numpy": (lambda: np.random.RandomState(3), lambda r: r.randn(), "'generator'"),
    "second of two": (
        lambda: {"a": random.Random(3), "b": random.Random(4)},
        lambda r: r["b"].random(),
        "\"generator['b']\"",
    ),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_random_numbers_of_python_and_numpy_are_noted(name: str) -> None:
    make, draw, told = GENERATORS[name]
    model, optimizer = linear()
    generator = make()
    random.seed(5)
    np.random.seed(5)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).sum() * float(draw(generator))
        loss.backward()
        optimizer.step()
        return loss

    runner = alone(step)
    with warnings_of_parallax() as found:
        for _ in range(3):
            runner.run(rows())
    assert len(found) == 1, found
    assert f"the step draws from {told}, which runs at capture only; draw outside" in found[0]
    after = draw(generator)
    random.seed(5)
    np.random.seed(5)
    assert draw(make()) == after
