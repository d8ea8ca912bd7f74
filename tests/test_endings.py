"""Branches that leave an update out: all workers take the way that one of them has to take."""

from __future__ import annotations

import itertools
import math
from typing import Any

import endings
import pytest
import torch
import torch.nn.functional as F
from cells import sampled
from errors_help import alone, linear, raised, rows
from pool import Pool
from torch import nn

from parallax.errors import CaptureError, DataDependentError, UnsupportedError
from parallax.runtime.comm.world import single

CPU = torch.device("cpu")
COUNTS = [(4, 4, 4), (3, -2, 1), (1, 5, 2), (2, 2, 7), (5, -1, 2), (1, 6, 3), (2, 2, 2)]
"""By step and worker, rows; fewer than none with numbers that are not finite."""
STRATEGIES = ("HYBRID", "PS", "ZeRO", "AR", "Horovod")


def _check(found: dict[str, Any], kind: str, *, of_own: bool) -> None:
    assert found["difference"] < 1e-12
    assert found["rate"]
    assert found["scale"]
    assert found["left out"] == ((2, 2) if kind == "counts" else (0, 0))
    assert len(found["returned"]) == 2
    for result in found["returned"]:
        if kind == "number":
            assert result == -1.0
        else:
            loss = result["loss"] if isinstance(result, dict) else result
            assert math.isfinite(loss) is not of_own


@pytest.mark.parametrize(
    ("kind", "compile"), [*((kind, "none") for kind in endings.KINDS), ("clipped", "inductor")]
)
def test_one_worker(kind: str, compile: str) -> None:
    counts = [(parts[1],) for parts in COUNTS]
    found = endings.train(single(CPU), kind, counts, {"compile": compile})
    _check(found, kind, of_own=True)


@pytest.mark.parametrize(
    ("kind", "strategy"), sampled(itertools.product(endings.KINDS, STRATEGIES), 6)
)
def test_all_workers_leave_the_update_out(pool: Pool, kind: str, strategy: str) -> None:
    counts = [parts[:2] for parts in COUNTS]
    settings = {"strategy": strategy}
    for worker, found in enumerate(pool.run(2, endings.train, kind, counts, settings)):
        _check(found, kind, of_own=worker == 1)


@pytest.mark.parametrize("kind", ["returns", "clipped"])
@pytest.mark.parametrize("size", [3, (0, 0, 1, 1)], ids=str)
def test_several_hosts(pool: Pool, size: int | tuple[int, ...], kind: str) -> None:
    workers = size if isinstance(size, int) else len(size)
    counts = [(*parts, 4)[:workers] for parts in COUNTS]
    for worker, found in enumerate(pool.run(size, endings.train, kind, counts, {})):
        _check(found, kind, of_own=worker == 1)


def _scaled(sparse: bool, optimizers: int) -> Any:
    table = nn.Embedding(5, 2, sparse=sparse)
    layer = nn.Linear(2, 2)
    chosen = [torch.optim.SGD(one.parameters(), 0.1) for one in (table, layer)[:optimizers]]
    scaler = torch.amp.GradScaler("cpu")

    def step(ids: torch.Tensor) -> torch.Tensor:
        for optimizer in chosen:
            optimizer.zero_grad()
        layer.zero_grad()
        loss = layer(table(ids)).sum()
        scaler.scale(loss).backward()
        for optimizer in chosen:
            scaler.step(optimizer)
        scaler.update()
        return loss

    return lambda: alone(step).run(torch.tensor([1, 2]))


def test_what_a_scaler_cannot_do_is_refused() -> None:
    raised(_scaled(True, 1), UnsupportedError, "unscales a sparse gradient", "sparse=False")
    raised(_scaled(False, 2), UnsupportedError, "steps a second optimizer", "bfloat16")
    _scaled(False, 1)()


def test_a_scaler_is_used_as_on_one_device() -> None:
    model, optimizer = linear()
    scaler = torch.amp.GradScaler("cpu")

    def twice(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)

    raised(lambda: alone(twice).run(rows()), CaptureError, "unscale_() has already been called")

    def early(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.update()

    raised(lambda: alone(early).run(rows()), CaptureError, "No inf checks were recorded prior")


def test_scaled_training_in_float16_is_that_of_one_device() -> None:
    expected, found, scales = endings.half(CPU, 30)
    assert scales[-1] < scales[0]
    assert found == pytest.approx(expected, rel=0.02)


def _branching(change: Any) -> Any:
    model, optimizer = linear()

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if loss.isfinite():
            optimizer.step()
        else:
            change(model)
        return loss

    return lambda: alone(step).run(rows())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.init.zeros_(model.weight),
        lambda model: torch.rand(2),
        lambda model: setattr(model, "last", torch.ones(2)),
    ],
    ids=["state", "random", "kept"],
)
def test_ways_that_both_change_something_are_refused(change: Any) -> None:
    raised(_branching(change), DataDependentError, "not one graph", "torch.where")


def test_a_branch_about_numbers_alone_is_refused() -> None:
    model, optimizer = linear()

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return "low" if loss < 1 else loss.item()

    raised(lambda: alone(step).run(rows()), DataDependentError, "not one graph")


def test_what_is_computed_on_the_way_out_is_returned() -> None:
    model, optimizer = linear()

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :2])
        if loss > 1e6:
            return {"loss": loss.log() * 2, "rows": x.sum(1), "why": "large"}
        loss.backward()
        optimizer.step()
        return {"loss": loss, "rows": None, "why": ""}

    runner = alone(step)
    assert runner.run(rows())["why"] == ""
    before = model.weight.detach().clone()
    large = 1e6 * rows()
    with torch.no_grad():
        expected = F.mse_loss(model(large), large[:, :2]).log() * 2
    result = runner.run(large)
    assert result["why"] == "large"
    assert torch.equal(result["loss"], expected)
    assert torch.equal(result["rows"], large.sum(1))
    assert torch.equal(model.weight, before)
    assert runner.run(rows())["why"] == ""
    assert not torch.equal(model.weight, before)


def test_what_only_python_does_on_the_way_out() -> None:
    model, optimizer = linear()
    left_out: list[str] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if not loss.isfinite():
            left_out.append("one")
            return loss
        loss.backward()
        optimizer.step()
        return loss

    runner = alone(step)
    runner.run(rows())
    assert left_out == []
    runner.run(rows() * math.inf)
    runner.run(rows())
    assert left_out == ["one"]
