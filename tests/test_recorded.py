"""Regions that a device records give the numbers of regions that are run; here on the CPU, with
what does the same there. On CUDA: ``test_cuda.py``."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import recorded_steps
import torch
from pool import Pool
from recorded_steps import Picky, Processor, Refusing, record_on
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import single
from parallax.runtime.runner import Runner


@pytest.mark.parametrize(
    ("option", "optimizer", "size"),
    [
        ("HYBRID", "momentum", 1),
        ("HYBRID", "adam", 2),
        ("PS", "momentum", 2),
        ("AR", "rmsprop", 3),
        ("ZeRO", "adamw", 2),
    ],
)
def test_recorded_regions_give_the_same_numbers(
    pool: Pool, option: str, optimizer: str, size: int
) -> None:
    for found in pool.run(size, recorded_steps.compare, option, optimizer):
        assert found["difference"] < 1e-12
        assert recorded_steps.regions_of(found["plan"]) > 0, found["plan"]


@pytest.mark.parametrize("size", [1, 2])
def test_shapes_that_come_often_are_recorded(pool: Pool, size: int) -> None:
    for found in pool.run(size, recorded_steps.compare_lengths, recorded_steps.LENGTHS):
        assert found["difference"] < 1e-12
        assert recorded_steps.regions_of(found["plan"]) >= 2, found["plan"]


class Training:
    """A layer, an average of it that is another tensor in each step, and a mask."""

    def __init__(self, device: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 3).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.average = torch.zeros(3, 4, dtype=torch.float64)
        step = self.step
        config = Config(workers=1, seed=1)
        self.runner = Runner(step, discover(step), config, single(torch.device("cpu")))
        self.recorder = None if device is None else record_on(self.runner, device)

    def step(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.optimizer.zero_grad()
        out = self.model(x)
        kept = out[out > 0]
        loss = (out.square().mean() - kept.sum() * 0.1).sin()
        loss.backward()
        self.optimizer.step()
        self.average = self.average * 0.9 + self.model.weight.detach() * 0.1
        return {"loss": loss, "out": out.detach()[0], "average": self.average.sum()}


def _trained(device: Any) -> tuple[Training, list[dict[str, torch.Tensor]]]:
    training = Training(device)
    torch.manual_seed(3)
    data = [torch.randn(5, 4, dtype=torch.float64) for _ in range(12)]
    return training, [training.runner.run(x) for x in data]


def _same(one: Training, other: Training, results: list[Any], others: list[Any]) -> None:
    assert torch.equal(one.model.weight, other.model.weight)
    assert torch.equal(one.average, other.average)
    for mine, theirs in zip(results, others, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_what_moves_in_each_step_is_copied_and_results_stay() -> None:
    device = Processor()
    expected, wanted = _trained(None)
    found, results = _trained(device)
    _same(expected, found, wanted, results)
    plan = str(found.runner.plan)
    assert "recorded: 3 of 3 regions" in " ".join(plan.split())
    # Each once, and again as often as it takes to see that the average moves.
    assert device.recordings <= 3 * 4


def test_what_cannot_be_recorded_runs_as_it_is() -> None:
    expected, wanted = _trained(None)
    found, results = _trained(Refusing())
    _same(expected, found, wanted, results)
    line = found.runner._compiler.describe(found.runner._last)
    reason = "RuntimeError: operation not permitted when stream is capturing"
    assert line == f"recorded: 0 of 3 regions; 3: {reason}"


def test_programs_are_cut_at_operations_that_cannot_be_recorded() -> None:
    expected, wanted = _trained(None)
    found, results = _trained(Picky(torch.ops.aten.sin.default, torch.ops.aten.pow.Tensor_Scalar))
    _same(expected, found, wanted, results)
    assert found.recorder is not None
    assert found.recorder.refused == {
        torch.ops.aten.sin.default,
        torch.ops.aten.pow.Tensor_Scalar,
    }
    plan = found.runner._compiler.describe(found.runner._last)
    assert recorded_steps.regions_of(plan) >= 3, plan


def test_memory_of_recordings_is_forgotten_with_them() -> None:
    found, _ = _trained(Processor())
    assert found.recorder is not None
    assert found.recorder._memory
    found.runner._programs.clear()
    found.runner._last = None
    gc.collect()
    assert not found.recorder._memory
