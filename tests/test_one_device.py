"""A runner compares a step of all workers with the same step on one device."""

from __future__ import annotations

from typing import Any

import one_device
import pytest
import torch
from one_device import Net
from pool import Pool
from torch import nn

import parallax
from parallax.config import Config
from parallax.errors import ConfigError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import single
from parallax.runtime.runner import Runner

ROUNDING = 1e-10


@pytest.mark.parametrize(
    ("name", "settings", "size"),
    [
        ("mean", {"strategy": "HYBRID"}, 2),
        ("mean", {"strategy": "PS"}, 3),
        ("counted", {"strategy": "AR"}, 2),
        ("pairs", {"strategy": "PS"}, 2),
        ("mean", {"strategy": "ZeRO", "compile": "none"}, 2),
    ],
    ids=str,
)
def test_the_same_on_one_device(pool: Pool, name: str, settings: dict[str, Any], size: int) -> None:
    for worst, text, draws in pool.run(size, one_device.compare, name, settings, Net()):
        assert max(worst) < ROUNDING
        assert "largest difference: " in text
        assert "table.weight" in text
        assert not draws


@pytest.mark.parametrize(
    ("name", "net"),
    [("mean", Net(drops=True)), ("mean", Net(norm=True))],
    ids=["dropout", "batch norm"],
)
def test_what_is_not_the_same_is_found(pool: Pool, name: str, net: Net) -> None:
    for worst, text, draws in pool.run(2, one_device.compare, name, {"strategy": "PS"}, net):
        assert min(worst) > 1e-3
        assert draws is net.drops
        assert ("draws random numbers" in text) is draws


def test_batch_norm_of_all_workers_is_that_of_one_device(pool: Pool) -> None:
    settings = {"sync_batch_norm": True}
    for worst, _, _ in pool.run(2, one_device.compare, "mean", settings, Net(norm=True)):
        assert max(worst) < ROUNDING


def test_batches_of_other_shapes(pool: Pool) -> None:
    for far in pool.run(2, one_device.of_other_shapes, True):
        assert far < ROUNDING
    for said in pool.run(2, one_device.of_other_shapes, False):
        assert said.startswith("BatchError: Part 0 of the workers' batches cannot be put together")
        assert "(4, 3), (4, 4)" in said
        assert "join=" in said


def test_not_before_the_first_step() -> None:
    with parallax.deferred():
        net = nn.Embedding(10, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(ids).square().mean().backward()
        optimizer.step()

    runner = Runner(step, discover(step), Config(workers=1), single(torch.device("cpu")))
    with pytest.raises(ConfigError, match="workers need not have the same values yet"):
        runner.compare_with_one_device(torch.arange(4))
    runner.run(torch.arange(4))
    assert runner.compare_with_one_device(torch.arange(4)).worst < 1e-5
