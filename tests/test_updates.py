"""Updates of many variables in one kernel: the numbers of torch's optimizers, and no others."""

from __future__ import annotations

import copy
from typing import Any

import fused_updates
import pytest
import torch
from errors_help import alone
from fused_updates import OPTIMIZERS, Layers, batches, kernels, training
from pool import Pool
from torch import nn

from parallax.ops import updates
from parallax.ops.updates import SGD
from parallax.runtime.compute.update_chains import find_chains


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_those_of_eager_training(name: str, clip: bool) -> None:
    make, kernel = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = Layers().double()
    twin = copy.deepcopy(model)
    optimizer, other = make(model.parameters()), make(twin.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    others = torch.optim.lr_scheduler.StepLR(other, 2, 0.5)
    step, expected = training(model, optimizer, clip), training(twin, other, clip)
    runner = alone(step, model=model, optimizer=optimizer)
    for x in batches(6):
        torch.testing.assert_close(runner.run(x), expected(x), rtol=1e-12, atol=1e-14)
        scheduler.step()
        others.step()
    assert kernels(runner) == ([] if kernel is None else [kernel]), "one for all variables"
    for own, twins in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, twins, rtol=1e-12, atol=1e-14)
        assert own.stride() == twins.stride()
        slots = other.state[twins]
        for slot, value in optimizer.state[own].items():
            torch.testing.assert_close(value, slots[slot], rtol=1e-12, atol=1e-14)


def test_groups_of_an_optimizer_have_a_call_each() -> None:
    """They differ in their numbers, as do the types of variables."""
    torch.manual_seed(0)
    model = Layers().double()
    groups = [
        {"params": [model.first.weight, model.hidden.weight]},
        {"params": [model.last.weight], "weight_decay": 0.1},
        {"params": [model.first.bias, model.hidden.bias, model.last.bias], "lr": 0.3},
    ]
    optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9)
    runner = alone(training(model, optimizer), model=model, optimizer=optimizer)
    for x in batches(3):
        runner.run(x)
    assert kernels(runner) == [SGD] * 3


def test_what_reads_a_variable_between_updates_reads_the_same() -> None:
    """Two steps of an optimizer in one, and averages that follow variables."""
    torch.manual_seed(0)
    model = Layers().double()
    twin = copy.deepcopy(model)

    def make(model: nn.Module) -> tuple[Any, nn.Module]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        average = copy.deepcopy(model).requires_grad_(False)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                size = model.last.weight.abs().sum()
            optimizer.step()
            with torch.no_grad():
                for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.1)
            return loss.detach() + size

        return step, average

    step, average = make(model)
    expected, averages = make(twin)
    runner = alone(step)
    for x in batches(4):
        torch.testing.assert_close(runner.run(x), expected(x), rtol=1e-12, atol=1e-14)
    assert SGD in kernels(runner)
    assert len(kernels(runner)) >= 2
    for own, twins in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, twins, rtol=1e-12, atol=1e-14)
    for own, twins in zip(average.parameters(), averages.parameters(), strict=True):
        torch.testing.assert_close(own, twins, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("lie", ["alike", "apart", "in gaps"])
def test_kernels_take_tensors_that_lie_in_any_way(lie: str) -> None:
    generator = torch.Generator().manual_seed(1)

    def tensor(turned: bool) -> torch.Tensor:
        if lie == "in gaps":
            return torch.rand(6, 8, generator=generator)[:, ::2]
        made = torch.rand(4, 6, generator=generator)
        return made.t() if turned or lie == "alike" else made.t().contiguous()

    parameter, gradient, buffer = tensor(True), tensor(False), tensor(True)
    direction = buffer * 0.9 + 0.5 * (gradient + 0.1 * parameter)
    expected = parameter - 0.2 * direction
    strides = parameter.stride(), buffer.stride()
    updates.sgd([parameter], [gradient], [buffer], 0.2, 0.1, 0.9, 0.5, nesterov=False)
    torch.testing.assert_close(buffer, direction)
    torch.testing.assert_close(parameter, expected)
    assert (parameter.stride(), buffer.stride()) == strides


def test_other_devices_and_types_stay() -> None:
    model = Layers().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    runner = alone(training(model, optimizer), model=model, optimizer=optimizer)
    for x in batches(3):
        runner.run(x.bfloat16())
    assert kernels(runner) == []
    assert list(find_chains(runner._last.step.graph)) == []  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", ["AR", "PS", "UnevenPS", "ZeRO"])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_parts_of_variables_are_updated_so_too(pool: Pool, name: str, strategy: str) -> None:
    """Equal batches on both workers: the numbers of one device."""
    found = pool.run(2, fused_updates.train, name, strategy, 5)
    torch.manual_seed(0)
    model = Layers().double()
    step = training(model, OPTIMIZERS[name][0](model.parameters()), clip=True)
    expected = [float(step(x)) for x in batches(5)]
    for losses, used in found:
        assert losses == pytest.approx(expected, rel=1e-11)
        assert used == [str(OPTIMIZERS[name][1])]
