"""Branches that go on both ways, on what is one on all workers: see user_guesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import user_steps
from pool import Pool
from torch import nn
from user_guesses import clip

from parallax.config import Config
from parallax.errors import DataDependentError, StepError
from parallax.graph.objects.discovery import discover
from parallax.graph.symbols import guesses
from parallax.runtime.comm.world import single
from parallax.runtime.runner import Runner
from parallax.strategy.builders import Encoded

CPU = torch.device("cpu")
WIDTH = 4
Step = Callable[[torch.Tensor], Any]


def _runner(step: Step, compile: str = "none") -> Runner:
    return Runner(step, discover(step), Config(workers=1, compile=compile), single(CPU))  # type: ignore[arg-type]


def _clipped(before: Callable[[], nn.Module], most: float = 1.0) -> tuple[nn.Module, Step]:
    """A step whose gradients are clipped by hand, if a batch is large."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 6), before(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x).square().mean(1) * x.square().mean(1)).mean()
        loss.backward()
        clip(model.parameters(), most)
        optimizer.step()
        return loss

    return model, step


def _batches(*sizes: float) -> list[torch.Tensor]:
    torch.manual_seed(6)
    return [torch.randn(8, WIDTH, dtype=torch.float64) * size for size in sizes]


@pytest.mark.parametrize("compile", ["none", "inductor"])
@pytest.mark.parametrize("before", [nn.Dropout, lambda: nn.BatchNorm1d(6), nn.Tanh])
def test_a_step_that_is_run_again_leaves_nothing_behind(
    before: Callable[[], nn.Module], compile: str
) -> None:
    """Random numbers, running means and the step's own numbers are those of one run."""
    batches = _batches(9, 0.1, 9, 0.1, 0.1, 9)
    model, step = _clipped(before)
    torch.manual_seed(7)
    expected = [step(x) for x in batches]
    own, step = _clipped(before)
    runner = _runner(step, compile)
    torch.manual_seed(7)
    found = [runner.run(x) for x in batches]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(own.state_dict(), model.state_dict(), rtol=1e-12, atol=1e-15)


def test_each_way_is_captured_once() -> None:
    _, step = _clipped(nn.Tanh)
    runner = _runner(step)
    for x in _batches(9, 9, 0.1, 9, 0.1, 9):
        runner.run(x)
    assert runner._preparation.captures.count == 3  # the first step makes momentum


@pytest.mark.parametrize("size", [2, 3, (0, 0, 1, 1)])
@pytest.mark.parametrize(
    ("name", "builder"), [("clipped_by_hand", "AR"), ("clipped_beside_a_table", "PS")]
)
def test_steps_that_are_announced_may_be_run_again(
    pool: Pool, name: str, builder: str, size: int | tuple[int, ...]
) -> None:
    """Ids that travel ahead are of another program then; updates are not left to the next step."""
    for found in pool.run(size, user_steps.compare, name, builder, True):
        assert max(found.values()) < 1e-10


def test_rates_follow_their_scheduler_once() -> None:
    torch.manual_seed(5)
    model = nn.Linear(WIDTH, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    runner = _runner(step)
    for x in _batches(9, 0.1, 9, 0.1):
        runner.run(x)
    assert scheduler.get_last_lr() == [0.5**4]
    assert scheduler.last_epoch == 4


def test_many_ways_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Each element of a parameter has a branch of its own, and they go all ways."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.01)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        assert weight.grad is not None
        for place in range(3):
            if weight.grad[place] > 0:
                weight.grad[place] *= 2
        optimizer.step()

    runner = _runner(step)
    expected = torch.ones(3)
    for number in range(8):
        x = torch.tensor([1.0 if number >> place & 1 else -1.0 for place in range(3)])
        with caplog.at_level("WARNING", logger="parallax"):
            runner.run(x)
        expected -= 0.01 * torch.where(x > 0, 2 * x, x)
    torch.testing.assert_close(weight.detach(), expected)
    (told,) = [one.getMessage() for one in caplog.records]
    assert told.startswith("the step was captured 6 times for one kind of batch, as branches on ")
    assert f"step() in {__file__}" in told


def _adversaries() -> Step:
    critic, model = nn.Linear(3, 1), nn.Linear(WIDTH, 3)
    of_critic = torch.optim.SGD(critic.parameters(), 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> None:
        of_critic.zero_grad()
        critic(model(x).detach()).square().mean().backward()
        of_critic.step()  # changes
        optimizer.zero_grad()
        critic(model(x)).square().mean().backward()
        clip(model.parameters(), 1.0)  # decides
        optimizer.step()

    return step


def test_what_another_optimizer_changed_cannot_be_put_back() -> None:
    with pytest.raises(DataDependentError, match="after the step has changed others") as caught:
        _runner(_adversaries()).run(torch.randn(5, WIDTH))
    assert "of_critic.step()  # changes" in str(caught.value)
    assert caught.value.where is not None
    assert "if factor < 1" in str(caught.value)


def test_a_branch_on_a_number_of_the_batch_is_each_workers_own() -> None:
    model = nn.Linear(WIDTH, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, most: float) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        clip(model.parameters(), most)
        optimizer.step()

    with pytest.raises(DataDependentError, match="depends on the values of tensors"):
        Runner(step, discover(step), Config(workers=1), single(CPU)).run(torch.randn(5, 4), 1.0)


@pytest.mark.parametrize("of_batch", [True, False])
def test_numbers_that_are_kept_decide_if_they_are_no_workers_own(
    of_batch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An average of losses is, and is no input then; one of norms is not. Both ways are taken."""

    class Average:
        value = 0.0

    def made() -> tuple[nn.Module, Step]:
        torch.manual_seed(5)
        model, average = nn.Linear(WIDTH, 3).double(), Average()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            norm = sum(p.grad.norm().item() for p in model.parameters())  # type: ignore[union-attr]
            if norm > average.value:
                clip(model.parameters(), 0.1)
            average.value = 0.5 * average.value + 0.5 * (loss.item() if of_batch else norm)
            optimizer.step()
            return loss

        return model, step

    batches = _batches(1, 9, 0.1, 0.1, 9, 1)
    expected, plain = made()
    for x in batches:
        plain(x)
    model, step = made()
    runner = _runner(step)
    with caplog.at_level("DEBUG", logger="parallax"):
        for x in batches:
            runner.run(x)
    told = "a number that it keeps and that follows from this worker's batch"
    assert (told in caplog.text) is of_batch
    assert ("the step cannot be captured with a number that varies" in caplog.text) is of_batch
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-15)


def test_ways_without_an_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> Exception:
        return guesses.WrongGuessError({}, [])

    monkeypatch.setattr(guesses.Guess, "stop", stop)
    _, step = _clipped(nn.Tanh)
    with pytest.raises(StepError, match="begun 100 times, and each time a branch"):
        _runner(step).run(*_batches(0.1))


def test_workers_that_round_otherwise_take_one_way() -> None:
    """What one worker sees decides, if another one does not."""
    ways = [guesses.Guess(guesses.Branch((), number), True) for number in range(3)]
    found = [guesses.Found(way, failed=number == 2) for number, way in enumerate(ways)]
    error = ways[0].stop(found, 0, " on worker 1")
    assert isinstance(error, guesses.WrongGuessError)
    assert list(error.decisions.values()) == [False, True, False]


def test_residuals_are_refused(pool: Pool) -> None:
    for text in pool.run(2, user_steps.refused, "clipped_by_hand", Encoded("onebit")):
        assert "which keeps residuals, and the step's Python branches on gradients" in text
