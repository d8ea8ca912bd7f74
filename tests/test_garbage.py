"""While a step is prepared Python collects garbage less often, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import single
from parallax.runtime.garbage import ALLOCATIONS, collected_seldom
from parallax.runtime.runner import Runner


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_a_step_is_prepared_so() -> None:
    seen: list[tuple[int, int, int]] = []
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.get_threshold())
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    gc.set_threshold(700, 11, 12)
    runner = Runner(step, discover(step), Config(), single(torch.device("cpu")))
    runner.run(torch.ones(4, 3))
    assert seen[0][0] == ALLOCATIONS
    assert gc.get_threshold() == (700, 11, 12)


def test_what_the_user_has_set_higher_stays() -> None:
    for threshold in (0, ALLOCATIONS * 2):
        gc.set_threshold(threshold, 11, 12)
        with collected_seldom():
            assert gc.get_threshold() == (threshold, 11, 12)
        assert gc.get_threshold() == (threshold, 11, 12)


def test_after_an_error_it_is_as_before() -> None:
    gc.set_threshold(700, 11, 12)
    with pytest.raises(ValueError, match="wrong"), collected_seldom():
        raise ValueError("wrong")
    assert gc.get_threshold() == (700, 11, 12)
