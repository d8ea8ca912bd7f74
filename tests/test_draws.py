"""Data and random numbers that a step takes by itself."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from errors_help import alone, among, linear, marked_line, raised, rows, warnings_of_parallax
from pool import Pool
from torch.utils.data import DataLoader

from parallax.errors import UnsupportedError
from parallax.runtime.comm.world import World


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


def test_another_thread_may_read_data_meanwhile() -> None:
    """As one that reads batches ahead does, with an iterator and generators that the step has."""
    model, optimizer = linear()
    batches = iter([rows(2), rows(3)])
    asked, given = queue.Queue[str](), queue.Queue[Any]()

    def read() -> None:
        while asked.get() != "stop":
            given.put((next(batches), len(list(DataLoader([1, 2]))), random.random()))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        asked.put("more")
        return loss, (given.get(timeout=60)[1], batches is not None)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        with warnings_of_parallax() as said:
            assert alone(step).run(rows())[1] == (2, True)
    finally:
        asked.put("stop")
        thread.join()
    assert next(batches).shape == (3, 3)
    assert not [text for text in said if "takes a value" in text]


# What a step makes of its loss, with generators of its own in ``own``.
DRAWN: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "scaled": lambda loss, own: loss * random.random(),
    "two of python": lambda loss, own: loss * random.uniform(0.5, 2) + loss * random.gauss(0, 1),
    "mixed": lambda loss, own: loss * np.random.beta(0.4, 0.4),
    "chosen": lambda loss, own: loss * random.choice([0.5, 1.0, 2.0]),
    "decided": lambda loss, own: loss if random.random() < 0.5 else loss * np.random.rand() + 1,
    "decided twice": lambda loss, own: (
        loss * (1 + (random.random() < 0.3)) + (loss if np.random.rand() < 0.5 else 0)
    ),
    "picked": lambda loss, own: loss * [1.0, 3.0][random.randrange(2)],
    "own python": lambda loss, own: loss * own["python"].random(),
    "own numpy": lambda loss, own: loss * own["numpy"].normal() ** 2,
    "old numpy": lambda loss, own: loss * own["old"].exponential(),
}


def _losses(name: str, run_of: Callable[[Any], Any], part: slice) -> tuple[list[float], Any]:
    """Of ten steps, whose numbers follow from the same seeds; and the model."""
    model, optimizer = linear()
    model.double()
    change = DRAWN[name]
    own = {
        "python": random.Random(3),
        "numpy": np.random.default_rng(3),
        "old": np.random.RandomState(3),
    }

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = change(model(x).square().mean(), own)
        loss.backward()
        optimizer.step()
        return loss

    run = run_of(step)
    random.seed(5)
    np.random.seed(5)
    found = [float(run(rows(4).double()[part])) for _ in range(10)]
    return found, model


@pytest.mark.parametrize("name", DRAWN)
def test_numbers_are_drawn_anew_in_each_step(name: str) -> None:
    wanted, one_device = _losses(name, lambda step: step, slice(None))
    after = random.random(), np.random.rand()
    with warnings_of_parallax() as said:
        found, model = _losses(name, lambda step: alone(step).run, slice(None))
    assert not said
    assert found == pytest.approx(wanted, abs=1e-12)
    torch.testing.assert_close(model.weight, one_device.weight)
    # As many as on one device, and no more.
    assert (random.random(), np.random.rand()) == after


def _weights(world: World, name: str, option: str) -> torch.Tensor:
    """What a worker has learned that has drawn numbers of its own before."""
    for _ in range(world.rank):
        random.random()
    held: list[Any] = []

    def run_of(step: Any) -> Any:
        held.append(among(world, step, option))
        return held[0].run

    half = slice(2 * world.rank, 2 * world.rank + 2)
    _losses(name, run_of, half)
    weight: torch.Tensor = next(iter(held[0].state_dict()["model"].values()))
    return weight


@pytest.mark.parametrize(
    ("name", "option"),
    [("mixed", "HYBRID"), ("decided twice", "PS"), ("picked", "AR"), ("own numpy", "HYBRID")],
)
def test_all_workers_draw_the_same_numbers(pool: Pool, name: str, option: str) -> None:
    _, one_device = _losses(name, lambda step: step, slice(None))
    for found in pool.run(2, _weights, name, option):
        torch.testing.assert_close(found, one_device.weight.detach())


def test_another_seed_on_a_worker_changes_nothing(pool: Pool) -> None:
    first, second = pool.run(2, _seeded)
    assert torch.equal(first, second)


def _seeded(world: World) -> torch.Tensor:
    """As :func:`_weights`, with other seeds on each worker."""
    model, optimizer = linear()

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean() * np.random.beta(0.4, 0.4)
        if random.random() < 0.5:
            loss = loss * 2
        loss.backward()
        optimizer.step()

    runner = among(world, step)
    random.seed(world.rank)
    np.random.seed(world.rank)
    for _ in range(6):
        runner.run(rows())
    return model.weight.detach()


NOT_NUMBERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "permutation": (lambda own: np.random.permutation(4)[0], "NumPy's random module"),
    "shuffled": (lambda own: random.shuffle([1, 2]) or 1, "Python's random module"),
    "bound before": (lambda own: own["draw"](), "Python's random module"),
    "of one's own": (lambda own: own["numpy"].permutation(3)[0], "\"own['numpy']\""),
}


@pytest.mark.parametrize("name", NOT_NUMBERS)
def test_what_is_no_number_is_noted(name: str) -> None:
    draw, told = NOT_NUMBERS[name]
    model, optimizer = linear()
    own: dict[str, Any] = {"numpy": np.random.default_rng(3), "draw": random.random}

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(x).sum() * float(draw(own))).backward()
        optimizer.step()

    runner = alone(step)
    random.seed(5)
    np.random.seed(5)
    with warnings_of_parallax() as found:
        for _ in range(3):
            runner.run(rows())
    assert len(found) == 1, found
    assert f"the step draws from {told}, which runs at capture only; draw outside" in found[0]
    after = random.random(), np.random.rand(), own["numpy"].random()
    random.seed(5)
    np.random.seed(5)
    assert after == (random.random(), np.random.rand(), np.random.default_rng(3).random())
