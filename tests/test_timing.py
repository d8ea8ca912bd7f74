"""The clock by which the faster of two computations is chosen."""

from __future__ import annotations

import time

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
