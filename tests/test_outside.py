"""What a step reads or keeps outside of its batch and its models: read anew, lifted, or refused."""

from __future__ import annotations

import argparse
import collections
import enum
import fractions
import functools
import logging
import math
import pathlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import user_steps
from errors_help import raised
from torch import nn

from parallax.config import Config
from parallax.errors import ParallaxError, UnsupportedError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import single
from parallax.runtime.runner import Runner

ONES = torch.ones(2, 3)


def alone(step: Callable[..., Any]) -> Runner:
    return Runner(step, discover(step), Config(workers=1), single(torch.device("cpu")))


class Trainer:
    """A step as a method, with everything that people give it besides the batch."""

    weight = 1.0
    labels = ""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Threshold(0.0, 0.0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.settings = {"power": 2, "share": 1.0, "unused": 0}
        self.criterion = F.mse_loss
        self.seen = 0

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        wanted = torch.full((2, 2), float(len(self.labels)))
        power, share = self.settings["power"], self.settings["share"]
        return self.weight * share * self.criterion(self.model(x) ** power, wanted)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(x) * FACTOR["now"]
        loss.backward()
        self.optimizer.step()
        return loss

    def fit(self, runner: Runner) -> None:
        """Not what the step calls."""
        self.seen += 1
        self.settings["unused"] += 1
        runner.run(ONES)


FACTOR = {"now": 1.0}


@pytest.mark.parametrize(
    "change",
    [
        lambda trainer: setattr(trainer, "weight", 0.5),
        lambda trainer: trainer.settings.update(power=3),
        lambda trainer: setattr(trainer, "criterion", F.l1_loss),
        lambda trainer: setattr(trainer.model[1], "threshold", 0.2),
        lambda trainer: FACTOR.update(now=FACTOR["now"] + 1),
    ],
    ids=["attribute", "entry", "function", "layer", "global"],
)
def test_values_that_the_step_reads_are_read_anew(change: Callable[[Trainer], Any]) -> None:
    plain, mine = Trainer(), Trainer()
    runner = alone(mine.step)
    for changing in (False, True, False):
        if changing:
            change(mine)
            plain.weight, plain.criterion = mine.weight, mine.criterion
            plain.settings["power"] = mine.settings["power"]
            plain.model[1].threshold = mine.model[1].threshold
        torch.testing.assert_close(runner.run(ONES), plain.step(ONES).detach())
    for own, expected in zip(mine.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(own, expected)


def test_values_that_the_step_does_not_read_cost_no_capture() -> None:
    trainer = Trainer()
    runner = alone(trainer.step)
    for _ in range(4):
        trainer.fit(runner)
    assert trainer.seen == trainer.settings["unused"] == 4
    assert runner._preparation.captures.count == 1


def test_what_changes_often_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    runner = alone(trainer.step)
    with caplog.at_level(logging.WARNING, "parallax"):
        for number in range(9):
            trainer.labels = "x" * number
            runner.run(ONES)
    said = [record.getMessage() for record in caplog.records if "has changed" in record.message]
    assert len(said) == 1
    assert "self.labels" in said[0]
    assert "pass what often changes to runner.run()" in said[0]


RATE = 1.0


def _stepping(change: str) -> tuple[Callable[[int], None], Callable[..., torch.Tensor]]:
    """What the script does before each step, and a step that follows from it."""
    trainer, beta = Trainer(), 0.0

    def between(number: int) -> None:
        nonlocal beta
        if change == "attribute":
            trainer.weight = min(1.0, number / 5)
        elif change == "entry":
            trainer.settings["share"] = number / 4
        elif change == "cell":
            beta = number / 3
        elif change == "global":
            globals()["RATE"] = 1.0 / (1 + number)
        elif change == "module":
            trainer.model[1].threshold = -0.01 * number
        else:
            trainer.seen += 1

    def step(x: torch.Tensor) -> torch.Tensor:
        trainer.optimizer.zero_grad()
        loss = trainer.loss(x) * math.exp(-beta) * (RATE if RATE > 0.3 else 0.3)
        if trainer.seen % 4 == 3:
            loss = loss / trainer.seen
        loss.backward()
        trainer.optimizer.step()
        return loss

    return between, step


@pytest.mark.parametrize(
    ("change", "captures"),
    [("attribute", 3), ("entry", 3), ("cell", 3), ("global", 3), ("module", 3), ("counter", 4)],
)
def test_a_number_that_often_changes_becomes_an_input(change: str, captures: int) -> None:
    between, step = _stepping(change)
    expected = []
    for number in range(1, 12):
        between(number)
        expected.append(step(ONES))
    between, step = _stepping(change)
    runner, found = alone(step), []
    for number in range(1, 12):
        between(number)
        found.append(runner.run(ONES))
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-5)
    assert runner._preparation.captures.count == captures


class Mode(enum.Enum):
    ONE, TWO = 1, 2


class Slots:
    __slots__ = ("beta",)


class Settings:
    beta = 1.0

    class Inner:
        beta = 1.0


Pair = collections.namedtuple("Pair", "first second")


class Holder:
    """Settings in all the ways in which people keep them."""

    def __init__(self) -> None:
        self.arguments = argparse.Namespace(beta=1.0)
        self.slots = Slots()
        self.numbers = [1.0, 1.0]
        self.nested = [[1.0], [(1.0,)]]
        self.pair = Pair(1.0, 1.0)
        self.mode = Mode.ONE
        self.chosen = {"a"}
        self.scalar = np.float32(1)
        self.array = np.ones(3)
        self.module = types.ModuleType("of the user")
        self.settings = Settings
        self.by_number = {0: 1.0, 1: 1.0}
        self.by_mode = {Mode.ONE: 1.0}
        self.by_name = {"beta": 1.0}
        self.fraction = fractions.Fraction(1)
        self.path = pathlib.Path("1")
        self.part: Any = None
        self.method: Any = None
        self.insides = {1.0: Inside(1.0), 2.0: Inside(2.0)}


KEY = "beta"


def _product(one: float, other: float) -> float:
    return one * other


class Inside:
    def __init__(self, value: float) -> None:
        self.value = value

    def read(self) -> float:
        return self.value


def _set(holder: Holder, where: str, value: float) -> None:
    if where == "numbers":
        holder.numbers[1] = value
    elif where == "nested":
        holder.nested[1][0] = (value,)
    elif where == "pair":
        holder.pair = Pair(1.0, value)
    elif where == "mode":
        holder.mode = Mode.TWO if value > 1 else Mode.ONE
    elif where == "chosen":
        holder.chosen = {"a"} if value == 1 else {"a", "b"}
    elif where == "scalar":
        holder.scalar = np.float32(value)
    elif where == "array":
        holder.array[2] = value
    elif where == "by_number":
        holder.by_number[1] = value
    elif where == "by_mode":
        holder.by_mode[Mode.ONE] = value
    elif where in ("by_name", "gone through"):
        holder.by_name["beta"] = value
    elif where == "fraction":
        holder.fraction = fractions.Fraction(int(value))
    elif where == "path":
        holder.path = pathlib.Path(str(int(value)))
    elif where == "part":
        holder.part = functools.partial(_product, value, other=1.0)
    elif where == "method":
        holder.method = holder.insides[value].read
    elif where == "inner":
        holder.settings.Inner.beta = value
    else:
        getattr(holder, where).beta = value


WHERE: dict[str, Callable[[Holder], float]] = {
    "arguments": lambda h: h.arguments.beta,
    "slots": lambda h: h.slots.beta,
    "numbers": lambda h: h.numbers[1],
    "nested": lambda h: h.nested[1][0][0],  # type: ignore[index]
    "pair": lambda h: h.pair.second,  # type: ignore[no-any-return]
    "mode": lambda h: float(h.mode is Mode.TWO) + 1,
    "chosen": lambda h: float(len(h.chosen)),
    "scalar": lambda h: float(h.scalar),
    "array": lambda h: float(h.array[2]),
    "settings": lambda h: h.settings.beta,
    "inner": lambda h: h.settings.Inner.beta,
    "module": lambda h: h.module.beta,
    "by_number": lambda h: h.by_number[1],
    "by_mode": lambda h: h.by_mode[Mode.ONE],
    "by_name": lambda h: h.by_name[KEY],
    "gone through": lambda h: sum(h.by_name[key] for key in h.by_name),
    "fraction": lambda h: float(h.fraction),
    "path": lambda h: float(h.path.name),
    "part": lambda h: h.part(),
    "method": lambda h: h.method(),
}


@pytest.mark.parametrize("where", WHERE)
def test_values_are_seen_wherever_people_keep_them(where: str) -> None:
    trainer, holder, read = Trainer(), Holder(), WHERE[where]
    holder.module.__file__ = __file__
    _set(holder, where, 1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        return trainer.step(x) * 0 + read(holder)

    runner, found = alone(step), []
    values = (1.0, 2.0, 1.0, 2.0)
    for value in values:
        _set(holder, where, value)
        found.append(float(runner.run(ONES)))
    assert found == list(values)
    assert runner._preparation.captures.count == 2


class Halved(torch.optim.lr_scheduler.LambdaLR):
    """A schedule whose class is the user's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda count: 0.5**count)


def test_a_schedule_of_the_users_own_class_follows_the_step() -> None:
    """What the step names is looked for in it, and a key of the step may be an empty text."""
    expected, trainer = Trainer(), Trainer()

    def step_of(one: Trainer) -> Callable[[torch.Tensor], torch.Tensor]:
        schedule = Halved(one.optimizer)
        settings = {"": 1.0}

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = one.step(x) * settings[""]
            schedule.step()
            return loss

        return step

    plain, runner = step_of(expected), alone(step_of(trainer))
    for _ in range(3):
        assert torch.equal(runner.run(ONES), plain(ONES))


@pytest.mark.parametrize("name", ["optimizer", "model"])
def test_another_optimizer_or_model_is_refused(name: str) -> None:
    trainer = Trainer()
    runner = alone(trainer.step)
    runner.run(ONES)
    setattr(trainer, name, getattr(Trainer(), name))
    raised(lambda: runner.run(ONES), UnsupportedError, f"'self.{name}' is another", "in place")


def test_state_where_nobody_looks_is_refused() -> None:
    trainer, hidden = Trainer(), collections.deque([torch.zeros(())])

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden[0].add_(1)
        return trainer.step(x)

    error = raised(
        lambda: alone(step).run(ONES), UnsupportedError, "does not look for state", "as a buffer"
    )
    assert "hidden[0].add_(1)" in str(error)


class Counting(torch.optim.Optimizer):
    """Counts its steps, and those that it bounds, in attributes, and has settings there."""

    def __init__(self, parameters: Any, counts_up: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.calls, self.bounded = 0, 0
        self.scale = 1.0
        self.counts_up = counts_up

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        warm = min(1.0, self.calls / 3)
        if self.counts_up:
            warm = sum(1 / (one + 1) for one in range(self.calls))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad.norm() > 0.05:
                    parameter.grad.mul_(0.05 / parameter.grad.norm())
                    self.bounded += 1
                parameter.sub_(parameter.grad * group["lr"] * self.scale * warm)
                if self.calls % 2 == 0:
                    parameter.mul_(0.9)


def test_an_optimizer_counts_in_its_attributes_and_has_settings_there() -> None:
    found = []
    for captured in (False, True):
        trainer = Trainer()
        trainer.model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
        nn.init.constant_(trainer.model[0].weight, 0.5)
        nn.init.zeros_(trainer.model[0].bias)
        trainer.optimizer = counting = Counting(trainer.model.parameters())
        run = alone(trainer.step).run if captured else trainer.step
        seen: list[Any] = []
        for number in range(7):
            counting.scale = 1.0 - 0.1 * number
            run(ONES * (1 + number % 3))
            values = [float(p.detach().sum()) for p in trainer.model.parameters()]
            seen.append((counting.calls, counting.bounded, *values))
        found.append(seen)
    plain, captured_ones = found
    assert plain[-1][0] == 7
    assert 0 < plain[-1][1] < 14
    for one, other in zip(plain, captured_ones, strict=True):
        assert other == pytest.approx(one)


def test_an_optimizer_whose_count_no_symbol_can_be_is_refused() -> None:
    trainer = Trainer()
    trainer.optimizer = Counting(trainer.model.parameters(), counts_up=True)
    runner = alone(trainer.step)
    raised(lambda: runner.run(ONES), UnsupportedError, "counts in a Python number", ".calls")


def test_an_optimizer_need_not_call_its_base() -> None:
    class Wrapping(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups = inner, inner.param_groups
            self.state = collections.defaultdict(dict)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.inner.zero_grad()

    plain, mine = Trainer(), Trainer()
    mine.optimizer = Wrapping(torch.optim.SGD(mine.model.parameters(), 0.1))  # type: ignore[assignment]
    runner = alone(mine.step)
    for _ in range(3):
        torch.testing.assert_close(runner.run(ONES), plain.step(ONES).detach())


@pytest.mark.parametrize("kind", ["dataclass", "mapping", "object", "slots"])
def test_batches_come_in_containers_of_their_own(kind: str) -> None:
    kinds: dict[str, Any] = {
        "dataclass": user_steps.Pair,
        "mapping": user_steps.Named,
        "object": user_steps.Masked,
        "slots": user_steps.Slotted,
    }
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> Any:
        x, labels = (batch["x"], batch["labels"]) if kind == "mapping" else (batch.x, batch.labels)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        if kind == "object":
            loss = loss * batch.parts["mask"].sum() * batch.settings.share
        loss.backward()
        optimizer.step()
        return loss

    def batch(number: int) -> Any:
        items = {"x": torch.full((2, 4), float(number)), "labels": torch.tensor([0, 2])}
        return kinds[kind](items) if kind == "mapping" else kinds[kind](**items)

    runner = alone(step)
    losses = [runner.run(batch(number)) for number in range(3)]
    assert len(set(map(float, losses))) == 3
    assert runner._preparation.captures.count == 1


def test_anomaly_detection_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    with torch.autograd.set_detect_anomaly(True), caplog.at_level(logging.WARNING, "parallax"):
        runner = alone(trainer.step)
        runner.run(ONES)
        assert torch.is_anomaly_enabled()
    assert any("anomaly detection" in record.message for record in caplog.records)


def test_anomaly_detection_within_the_step(caplog: pytest.LogCaptureFixture) -> None:
    plain, mine = Trainer(), Trainer()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.set_detect_anomaly(True):
            return mine.step(x)

    with caplog.at_level(logging.WARNING, "parallax"):
        found = alone(step).run(ONES)
    torch.testing.assert_close(found, plain.step(ONES).detach())
    assert not torch.is_anomaly_enabled()
    assert any("anomaly detection" in record.message for record in caplog.records)


def test_settings_for_later_groups_stay() -> None:
    trainer = Trainer()
    before = dict(trainer.optimizer.defaults)
    alone(trainer.step).run(ONES)
    assert trainer.optimizer.defaults == before


def test_sizes_that_do_not_fit_are_no_errors_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Torch logs what an operation says of them, though the step is captured for fewer then."""
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) + y).sum()
        loss.backward()
        optimizer.step()
        return loss

    runner = alone(step)
    with pytest.raises(ParallaxError):
        runner.run(torch.ones(4, 2), torch.ones(5, 3))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("stepped", [True, False])
def test_a_returned_rate_of_before_the_schedulers_step_is_noted(
    stepped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    schedule = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)

    def step(x: torch.Tensor) -> dict[str, Any]:
        loss = trainer.step(x)
        if stepped:
            schedule.step()
        return {"loss": loss, "rate": trainer.optimizer.param_groups[0]["lr"]}

    with caplog.at_level(logging.WARNING, "parallax"):
        alone(step).run(ONES)
    assert any("learning rate" in record.message for record in caplog.records) is stepped
