"""The clock by which the faster of two computations is chosen."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import pytest
import torch

from parallax.runtime.compute import timing


def test_one_thread_is_not_charged_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that share cores wait for each other, as this computation does."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert timing.best_of(lambda: time.sleep(0.05)) < 0.02


def test_of_several_threads_what_passes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert timing.best_of(lambda: time.sleep(0.05)) >= 0.05


def test_a_long_computation_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    runs = []

    def compute() -> None:
        runs.append(len(runs))
        time.sleep(2 * timing.IMPATIENCE)

    timing.best_of(compute)
    assert len(runs) == 2  # once to prepare


class Clock:
    """Computations that take as long as they say, by a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.order: list[str] = []
        monkeypatch.setattr(timing, "seconds", lambda: self.now)

    def taking(self, name: str, *lasting: float) -> Callable[[], None]:
        times = itertools.cycle(lasting)

        def compute() -> None:
            self.order.append(name)
            self.now += next(times)

        return compute


def test_both_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert timing.is_clearly_faster(clock.taking("other", 0.01), clock.taking("usual", 0.02))
    assert clock.order == ["other", "usual"] * (1 + timing.LEAST_RUNS)


def test_what_is_alike_takes_more_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    other, usual = clock.taking("other", 0.0023), clock.taking("usual", 0.0025)
    assert timing.is_clearly_faster(other, usual)
    assert clock.order.count("other") == 1 + math.ceil(timing.LONG_PATIENCE / 0.0048)


@pytest.mark.parametrize(("lasting", "chosen"), [(0.94, True), (0.96, False), (1.5, False)])
def test_noise_decides_nothing(
    lasting: float, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest of the turns counts, whatever the others took."""
    clock = Clock(monkeypatch)
    other = clock.taking("other", 3.0, 0.02 * lasting, 0.02)
    usual = clock.taking("usual", 0.02, 0.5, 0.02)
    monkeypatch.setattr(timing, "IMPATIENCE", 10)
    assert timing.is_clearly_faster(other, usual) is chosen
