"""Python values that a step sets are there after it, and for the next one, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import user_state
import user_writes
from errors_help import alone, among, warnings_of_parallax
from pool import Pool

from parallax.runtime.comm.world import World


def assert_alike(found: Any, wanted: Any) -> None:
    """Equal, but for the last digits of numbers."""
    if isinstance(wanted, tuple):
        assert isinstance(found, tuple)
        assert len(found) == len(wanted), (found, wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_alike(found[key], value)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-12)
    else:
        assert found == wanted


def batches() -> list[torch.Tensor]:
    torch.manual_seed(3)
    return list(torch.randn(user_writes.STEPS, 4, 3, dtype=torch.float64))


def both(world: World | None, name: str) -> tuple[list[Any], list[Any], float, int]:
    """What a script sees on one device, and here; how far parameters are from those; captures."""
    model, held, step = user_writes.trainer(name)
    wanted = []
    for number, batch in enumerate(batches()):
        step(batch)
        wanted.append(user_writes.plain(held))
        user_writes.CASES[name].between(held, number)
    other, held, step = user_writes.trainer(name)
    runner = alone(step) if world is None else among(world, step)
    found = []
    for number, batch in enumerate(batches()):
        part = batch if world is None else batch.chunk(world.size)[world.rank]
        runner.run(part)
        found.append(user_writes.plain(held))
        user_writes.CASES[name].between(held, number)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    distance = max(float((one - two).detach().abs().max()) for one, two in pairs)
    return wanted, found, distance, runner._preparation.captures.count


@pytest.mark.parametrize("name", user_writes.CASES)
def test_a_script_sees_what_it_would_on_one_device(name: str) -> None:
    with warnings_of_parallax() as said:
        wanted, found, distance, captures = both(None, name)
    assert not said
    assert distance < 1e-12
    for one, other in zip(found, wanted, strict=True):
        assert_alike(one, other)
    assert captures <= 4


@pytest.mark.parametrize("name", ["flag_that_decides", "lists_of_an_epoch", "metrics_with_tensors"])
def test_several_workers_see_values_of_their_own_batches(pool: Pool, name: str) -> None:
    first, second = pool.run(2, _seen, name)
    for one, other in zip(first, second, strict=True):
        assert _kinds(one) == _kinds(other)


def _seen(world: World, name: str) -> list[Any]:
    _, found, distance, _ = both(world, name)
    assert distance < 1e-12
    return found


def _kinds(value: Any) -> Any:
    """A value without its numbers, which are those of a worker's own batch."""
    if isinstance(value, tuple):
        return tuple(map(_kinds, value))
    if isinstance(value, dict):
        return {key: _kinds(item) for key, item in value.items()}
    return float if isinstance(value, float) else value


def test_attributes_of_the_step_itself_are_state() -> None:
    def trained(get: Any) -> tuple[list[float], Any]:
        torch.manual_seed(2)
        model = torch.nn.Linear(3, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            step.count += 1  # type: ignore[attr-defined]
            optimizer.zero_grad()
            loss = model(x).square().mean() / step.count  # type: ignore[attr-defined]
            loss.backward()
            optimizer.step()
            step.mean = 0.9 * step.mean + loss.detach()  # type: ignore[attr-defined]
            return loss + step.mean  # type: ignore[attr-defined, no-any-return]

        step.count, step.mean = 0, torch.zeros(())  # type: ignore[attr-defined]
        run = get(step)
        return [float(run(batch)) for batch in batches()], step

    wanted, _ = trained(lambda step: step)
    found, step = trained(lambda step: alone(step).run)
    assert found == pytest.approx(wanted, abs=1e-12)
    assert step.count == len(wanted)


def test_a_failed_step_sets_nothing() -> None:
    table = torch.nn.Embedding(5, 2)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    losses: list[float] = []

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = table(ids).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    runner = alone(step)
    runner.run(torch.tensor([1, 2]))
    with pytest.raises(Exception, match="7"):
        runner.run(torch.tensor([1, 7]))
    runner.run(torch.tensor([3, 4]))
    assert len(losses) == 2


def test_what_models_and_optimizers_have_in_their_attributes() -> None:
    """Objects of the user's classes, flags, texts, and lists that are appended to."""
    plain = user_state.settled(False, None)
    found = user_state.settled(True, lambda step: alone(step).run)
    for one, other in zip(found, plain, strict=True):
        assert one == (pytest.approx(other) if isinstance(other, float | list) else other)
