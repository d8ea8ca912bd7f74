"""Tensors that a step makes and writes to in place are as on one device, whatever reads them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import batch_statistics
import pytest
import torch
from cells import each_once
from pool import Pool
from torch.fx.experimental.proxy_tensor import make_fx
from written_parts import LOSSES

from parallax.graph.common.aliases import memory_of
from parallax.graph.common.operations import is_write, written_inputs
from parallax.graph.passes.cleanup import remove_dead
from parallax.graph.passes.written_parts import as_values

DIVISION = [(4, 4, 4), (6, 2, 3), (3, 5, 1), (5, 3, 2)]
SETTINGS = [(2, "HYBRID"), (3, "HYBRID"), (2, "PS"), (3, "AR")]


@pytest.mark.parametrize(("name", "size", "strategy"), each_once(LOSSES, SETTINGS))
def test_the_numbers_of_one_device(pool: Pool, name: str, size: int, strategy: str) -> None:
    division = [counts[:size] for counts in DIVISION]
    loss = LOSSES[name]
    batch_statistics.assert_as_on_one_device(pool, size, loss, division, strategy, 1e-12)


def _writes(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if is_write(node)]


@pytest.mark.parametrize("seed", range(60))
def test_writes_in_any_order_give_the_same_values(seed: int) -> None:
    step = _random_step(random.Random(seed))
    drawn = torch.Generator().manual_seed(seed)
    given = torch.randn(4, 5, 6, generator=drawn, dtype=torch.float64)
    module = make_fx(step, tracing_mode="fake")(given)
    found = _writes(module.graph)
    assert found
    changed = {memory_of(written_inputs(node)[0]): node for node in reversed(found)}
    for memory, first in changed.items():
        assert as_values(module.graph, memory, first, changed)
    remove_dead(module.graph)
    module.recompile()
    assert not _writes(module.graph)
    # Sums over other strides are rounded otherwise.
    torch.testing.assert_close(module(given), step(given), rtol=1e-10, atol=1e-10)


def test_a_tensor_of_another_shape_from_then_on() -> None:
    def step(given: torch.Tensor) -> torch.Tensor:
        whole = given.sum(0, keepdim=True)
        whole.mul_(2.0)
        before = whole[0] + 1
        whole.squeeze_(0)
        return before.outer(whole.add_(given[0]))

    given = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    module = make_fx(step, tracing_mode="fake")(given)
    first, *_ = _writes(module.graph)
    memory = memory_of(written_inputs(first)[0])
    assert as_values(module.graph, memory, first, {memory})
    remove_dead(module.graph)
    module.recompile()
    assert not _writes(module.graph)
    torch.testing.assert_close(module(given), step(given))


def test_memory_that_is_read_by_its_places_stays_as_it_is() -> None:
    def step(given: torch.Tensor) -> torch.Tensor:
        whole = given.t().clone()
        whole[:, 0] = 1.0
        return whole.as_strided((4,), (1,), 1) * 2

    given = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    module = make_fx(step, tracing_mode="fake")(given)
    (write,) = _writes(module.graph)
    before = str(module.graph)
    memory = memory_of(written_inputs(write)[0])
    assert not as_values(module.graph, memory, write, {memory})
    assert str(module.graph) == before


def _random_step(drawn: random.Random) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step that writes to parts of a tensor, and reads such, in a random order."""
    acts: list[tuple[Any, ...]] = [
        (drawn.choice(list(_ACTS)), _place(drawn), _place(drawn))
        for _ in range(drawn.randint(2, 8))
    ]

    def step(given: torch.Tensor) -> torch.Tensor:
        whole = given * 2
        kept = [whole[0], whole.transpose(0, 2)[1]]
        for act, place, other in acts:
            _ACTS[act](whole, place, other, given)
        return torch.cat([whole.flatten(), *(one.flatten() for one in kept)])

    return step


def _place(drawn: random.Random) -> tuple[Any, ...]:
    """Of a tensor of 4 x 5 x 6, a place of one dimension, or several from the second one on."""
    dim = drawn.randrange(3)
    whole = slice(None)
    inner = drawn.choice([0, -1, 2, slice(1, 3), slice(-2, None), slice(0, 4, 2), slice(1, -1)])
    return (*[whole] * dim, inner)


def _set(whole: torch.Tensor, place: Any, other: Any, given: torch.Tensor) -> None:
    whole[place] = given[place].sin()


def _set_number(whole: torch.Tensor, place: Any, other: Any, given: torch.Tensor) -> None:
    whole[place] = 0.5


def _set_one(whole: torch.Tensor, place: Any, other: Any, given: torch.Tensor) -> None:
    whole[place] = given[other].mean()


def _change(whole: torch.Tensor, place: Any, other: Any, given: torch.Tensor) -> None:
    whole[place] += whole[other].mean()


def _change_part(whole: torch.Tensor, place: Any, other: Any, given: torch.Tensor) -> None:
    whole[place].transpose(0, 1)[1:].mul_(whole[other].sum())


def _clear(whole: torch.Tensor, place: Any, other: Any, given: torch.Tensor) -> None:
    whole[place].zero_()


def _change_all(whole: torch.Tensor, place: Any, other: Any, given: torch.Tensor) -> None:
    whole.sub_(whole[place].max())


def _choose(whole: torch.Tensor, place: Any, other: Any, given: torch.Tensor) -> None:
    whole[given > 0] = 1.0


def _choose_part(whole: torch.Tensor, place: Any, other: Any, given: torch.Tensor) -> None:
    whole[place][given[place] > 0] *= 3


_ACTS = {
    act.__name__: act
    for act in (
        _set,
        _set_number,
        _set_one,
        _change,
        _change_part,
        _clear,
        _change_all,
        _choose,
        _choose_part,
    )
}
