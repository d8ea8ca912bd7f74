"""Regions of a step, replayed and compiled, give the numbers of the step that is replayed whole."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable

import compiled_steps
import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import nn

import parallax
from parallax.errors import ConfigError, DataError
from parallax.graph.passes import losses
from parallax.ops.softmax import WRITE_SOFTMAX

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX") or "g++") is None,
    reason="there is no C++ compiler for Inductor",
)


@pytest.mark.parametrize(
    ("option", "optimizer", "size"),
    [
        ("HYBRID", "adam", 1),
        ("HYBRID", "nadam", 2),
        ("PS", "momentum", 2),
        ("AR", "adagrad", 3),
        ("ZeRO", "adam", 2),
        ("Poseidon", "momentum", 2),
        ("RandomAxis", "momentum", 2),
    ],
)
def test_regions_give_the_same_numbers(pool: Pool, option: str, optimizer: str, size: int) -> None:
    for found in pool.run(size, compiled_steps.cut_and_compare, option, optimizer):
        assert found["difference"] < 1e-12
        # The forward pass and the update are large regions, whatever is between them.
        assert max(found["operations"]) > 20
        assert len(found["operations"]) <= 12


@needs_compiler
@pytest.mark.parametrize(("option", "optimizer", "size"), [("HYBRID", "adam", 2)])
def test_compiled_regions_give_the_numbers_of_one_device(
    pool: Pool, option: str, optimizer: str, size: int
) -> None:
    for difference, plan in pool.run(size, compiled_steps.compare, option, optimizer):
        assert difference < 1e-10
        ready, of, total = plan.split()[1:4]
        assert (ready, of) == (total, "of"), plan


@needs_compiler
@pytest.mark.usefixtures("one_thread")
def test_a_softmax_that_is_written_in_place_is_part_of_a_region(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(losses, "LEAST", 1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 9)).double()
    expected = copy.deepcopy(model)
    x, classes = torch.randn(12, 5, dtype=torch.float64), torch.arange(12) % 9

    def step_of(own: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(own.parameters(), 0.5)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(own(x), classes)
            loss.backward()
            optimizer.step()
            return loss

        return step

    config = parallax.Config(workers=1, compile="inductor")
    runner = parallax.get_runner(step_of(model), config=config)
    alone = step_of(expected)
    for _ in range(4):
        torch.testing.assert_close(runner.run(x), alone(x).detach(), rtol=1e-12, atol=1e-14)
    assert "compiled: 1 of 1 regions" in str(runner.plan)
    assert runner._last is not None
    assert runner._last.step.graph.find_nodes(op="call_function", target=WRITE_SOFTMAX)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-14)


def test_checks_of_ids_are_no_part_of_a_region() -> None:
    """What is computed of ids can be compiled; what sees that such rows exist cannot."""
    table, out = nn.Embedding(50, 8), nn.Linear(8, 3)
    optimizer = torch.optim.SGD([*table.parameters(), *out.parameters()], 0.1)

    def loss_of(rows: nn.Embedding, layer: nn.Linear, ids: torch.Tensor) -> torch.Tensor:
        weights = torch.log1p(ids.double()).float()
        return (layer(rows(ids)).square().sum(1) * weights).mean()

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(table, out, ids)
        loss.backward()
        optimizer.step()
        return loss

    expected = copy.deepcopy((table, out))
    runner = parallax.get_runner(step, config=parallax.Config(workers=1, compile="inductor"))
    ids = torch.tensor([1, 3, 3, 40])
    for _ in range(3):
        runner.run(ids)
    assert "compiled" in str(runner.plan)
    with pytest.raises(DataError, match="50"):
        runner.run(torch.tensor([1, 3, 50, 7]))
    rows, layer = expected
    for _ in range(3):
        optimizer = torch.optim.SGD([*rows.parameters(), *layer.parameters()], 0.1)
        loss_of(rows, layer, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(table.weight, rows.weight)
    torch.testing.assert_close(out.weight, layer.weight)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", compiled_steps.OPTIMIZERS)
@pytest.mark.parametrize(("option", "size"), [("HYBRID", 1), ("PS", 3)])
def test_the_matrix_of_compiled_regions(pool: Pool, option: str, optimizer: str, size: int) -> None:
    for difference, _ in pool.run(size, compiled_steps.compare, option, optimizer):
        assert difference < 1e-10


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        parallax.Config(compile="inducto")  # type: ignore[arg-type]
    assert str(raised.value) == (
        'compile must be one of "auto", "inductor", "none"; found \'inducto\'.\n'
        '  What to do: did you mean "inductor"?'
    )
