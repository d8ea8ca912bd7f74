"""Checks of what a step computes: the graph is that of the way on, and looks when it runs."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import assertions
import pytest
import torch
import torch.nn.functional as F
from cells import sampled
from pool import Pool
from torch import nn

from parallax.config import Config
from parallax.errors import CheckError, DataDependentError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import single
from parallax.runtime.runner import Runner

CPU = torch.device("cpu")
CHECKS = {**assertions.CHECKS, **assertions.LATER}
COUNTS = [(4, 4, 4), (3, -2, 1), (0, 5, 2), (2, 2, 7), (5, -1, 0), (1, 6, 3)]
"""By step and worker, rows; fewer than none where the check fails."""


def _is_told(text: str, name: str, place: str = "") -> bool:
    check, failure = {**CHECKS, **assertions.LAST}[name]
    lines, first = inspect.getsourcelines(check)
    line = first + next(i for i, one in enumerate(lines) if "# here" in one)
    told = f"A check in the step failed{place}: {failure}\n"
    return text.startswith(told) and f"assertions.py:{line}: " in text


@pytest.mark.parametrize(
    ("name", "compile"), [*((name, "none") for name in CHECKS), ("exit", "inductor")]
)
def test_one_worker(name: str, compile: str, capsys: pytest.CaptureFixture[str]) -> None:
    counts = [(max(parts[1], -3),) for parts in COUNTS]
    far, raised = assertions.train(single(CPU), name, counts, {"compile": compile})
    assert far < 1e-12
    assert len(raised) == 2
    assert all(_is_told(text, name) for text in raised), raised
    assert "stopping" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "strategy"), sampled(itertools.product(CHECKS, ["HYBRID", "PS", "ZeRO"]), 5)
)
def test_all_workers_raise_what_one_finds(pool: Pool, name: str, strategy: str) -> None:
    counts = [parts[:2] for parts in COUNTS]
    finder = 1 if name in assertions.CHECKS else 0  # gradients are those of all workers
    for far, raised in pool.run(2, assertions.train, name, counts, {"strategy": strategy}):
        assert far < 1e-12
        assert len(raised) == 2
        assert all(_is_told(text, name, f" on worker {finder}") for text in raised), raised


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("size", [3, (0, 0, 1, 1)], ids=str)
def test_nothing_is_left_under_way(pool: Pool, size: int | tuple[int, ...], late: bool) -> None:
    workers = size if isinstance(size, int) else len(size)
    counts = [(*parts, 4)[:workers] for parts in COUNTS]
    for far, raised in pool.run(size, assertions.train, "assert", counts, {"late": late}):
        assert far < 1e-12
        assert len(raised) == 2


@pytest.mark.parametrize("strategy", ["HYBRID", "ZeRO"])
def test_what_fails_after_the_update_is_too_late(pool: Pool, strategy: str) -> None:
    settings = {"strategy": strategy}
    for far, raised in pool.run(2, assertions.train, "parameters", [(2, 3), (1, -2)], settings):
        assert not far < 1e-12
        assert len(raised) == 1
        assert _is_told(raised[0], "parameters", " on worker 0")


def _runner(loss: Any) -> Runner:
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = loss(net(x))
        value.backward()
        optimizer.step()
        return value

    return Runner(step, discover(step), Config(workers=1, compile="none"), single(CPU))


def _handled(scores: torch.Tensor) -> torch.Tensor:
    loss = scores.square().mean()
    try:
        if loss > 1e9:
            raise ValueError
    except ValueError:
        loss = loss * 0
    return loss


def _halved(scores: torch.Tensor) -> torch.Tensor:
    loss = scores.square().mean()
    return loss / 2 if loss > 1 else loss


def _until_small(scores: torch.Tensor) -> torch.Tensor:
    while scores.square().mean() > 1:
        scores = scores / 2
    return scores.square().mean()


@pytest.mark.parametrize("loss", [_handled, _halved, _until_small])
def test_a_branch_that_goes_on_both_ways_is_refused(loss: Any) -> None:
    with pytest.raises(DataDependentError, match="depends on the values of tensors") as caught:
        _runner(loss).run(torch.randn(5, 4))
    assert type(caught.value) is DataDependentError


def test_checks_of_pytorch_itself() -> None:
    def loss(scores: torch.Tensor) -> torch.Tensor:
        return F.gaussian_nll_loss(scores[:, 0], scores[:, 1], 2e4 - 1e4 * scores[:, 2].square())

    runner = _runner(loss)
    assert runner.run(torch.zeros(5, 4)).isfinite()
    with pytest.raises(CheckError, match="ValueError: var has negative entry"):
        runner.run(torch.full((5, 4), 100.0))


def test_many_checks_are_looked_at_once() -> None:
    """Those that one line makes are one."""

    def loss(scores: torch.Tensor) -> torch.Tensor:
        for row in scores.unbind(0):
            assert (row < 100).all()
        return scores.square().mean()

    runner = _runner(loss)
    seen = []
    original = nn.Linear.forward

    def counted(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return original(self, x)

    nn.Linear.forward = counted  # type: ignore[method-assign]
    try:
        runner.run(torch.rand(20, 4))
    finally:
        nn.Linear.forward = original  # type: ignore[method-assign]
    assert len(seen) <= 3
