"""Indexing by numbers that are known when the step runs, beside the numbers of user_indexing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import user_steps
from errors_help import alone, among, linear, marked_line, raised
from pool import Pool
from torch import nn

from parallax.config import Config
from parallax.errors import StepError, VariableError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World, single
from parallax.runtime.runner import Runner

pytestmark = pytest.mark.usefixtures("one_thread")
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX") or "g++") is None,
    reason="there is no C++ compiler for Inductor",
)

Tensor = torch.Tensor
Reading = Callable[[Tensor, Any, Tensor], Tensor]
Writing = Callable[[Tensor, Any, Tensor], None]

# Of a tensor [3, 4]; i is a symbol of 0 to 2 at capture, t a tensor of one.
READ: dict[str, Reading] = {
    "i": lambda v, i, t: v[i],
    "t": lambda v, i, t: v[t],
    "0, i": lambda v, i, t: v[0, i],
    "i, t": lambda v, i, t: v[i, t],
    "-1, i": lambda v, i, t: v[-1, i],
    ":, i": lambda v, i, t: v[:, i],
    ":, t": lambda v, i, t: v[:, t],
    "..., i": lambda v, i, t: v[..., i],
    "i, ...": lambda v, i, t: v[i, ...],
    "None, ..., i, None": lambda v, i, t: v[None, ..., i, None],
    "i, 1:": lambda v, i, t: v[i, 1:],
    "0 and i": lambda v, i, t: v[0][i],
    "-1 - i": lambda v, i, t: v[-1 - i],
    "-1 - t": lambda v, i, t: v[-1 - t],
    "size": lambda v, i, t: v[v.shape[0] - 1],
    "int32": lambda v, i, t: v[t.to(torch.int32)],
    "t:": lambda v, i, t: v[t:],
    ":, t:t + 1": lambda v, i, t: v[:, t : t + 1],
    "[i, 0]": lambda v, i, t: v[[i, 0]],
    "[[i, 0], [1, i]],": lambda v, i, t: v[[[i, 0], [1, i]],],
    ":, [i, 1]": lambda v, i, t: v[:, [i, 1]],
    "[0, 1], i": lambda v, i, t: v[[0, 1], i],
    "array, i": lambda v, i, t: v[np.array([2, 0]), i],
    "tensor, :, i": lambda v, i, t: v.view(3, 2, 2)[torch.tensor([0, 2]), :, i // 2],
    "tensor, i, tensor": lambda v, i, t: v.view(3, 2, 2)[
        torch.tensor([0, 2]), i // 2, torch.tensor([1, 0])
    ],
    "mask, i": lambda v, i, t: v.view(3, 2, 2)[v[:, :2] > 0, i // 2],
    "array of a mask, i": lambda v, i, t: v.view(3, 2, 2)[np.eye(3, 2) > 0, i // 2],
    "True, i": lambda v, i, t: v[True, i],
    "a loop": lambda v, i, t: sum((v[k] * v[0, k] for k in torch.stack([t, t - 1])), v[i]),
    "mapped": lambda v, i, t: torch.vmap(lambda row, k: row[k] * row[i])(v, t.expand(3)),
    "a gradient": lambda v, i, t: (
        torch.func.grad(lambda w: w[t].sum() * w[w[:, 0].argmax(), i])(v.detach()) + v
    ),
}


def _add(v: Tensor, i: Any, t: Tensor) -> None:
    v[i] += 1


def _double(v: Tensor, i: Any, t: Tensor) -> None:
    v[i].mul_(2)


def _columns(v: Tensor, i: Any, t: Tensor) -> None:
    v[:, t] = torch.tensor([1.0, 2.0, 3.0], dtype=v.dtype)


def _element(v: Tensor, i: Any, t: Tensor) -> None:
    v[i][0] = v[t, i]


def _several(v: Tensor, i: Any, t: Tensor) -> None:
    v[[i, 0], t] = 7.0


def _masked(v: Tensor, i: Any, t: Tensor) -> None:
    v[v[:, i] > 0, i] = 0.5


def _from(v: Tensor, i: Any, t: Tensor) -> None:
    v[t:] *= 0.5


def _number(v: Tensor, i: Any, t: Tensor) -> None:
    v[0, i] = v.sum().item()


WRITTEN: list[Writing] = [_add, _double, _columns, _element, _several, _masked, _from, _number]


def _written(write: Writing) -> Reading:
    def reading(v: Tensor, i: Any, t: Tensor) -> Tensor:
        v = v * 1
        write(v, i, t)
        return v

    return reading


ALL = {**READ, **{write.__name__: _written(write) for write in WRITTEN}}


def _made(reading: Reading) -> tuple[nn.Module, Callable[..., Tensor]]:
    torch.manual_seed(5)
    model = nn.Linear(5, 4).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step(x: Tensor, t: Tensor) -> Tensor:
        optimizer.zero_grad()
        v = model(x)
        i = v.detach().abs().sum(1).argmax().item() % 3
        loss = reading(v, i, t).square().sum() + v.square().sum() / 10
        loss.backward()
        optimizer.step()
        return loss

    return model, step


def _batches(*rows: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(6)
    count = len(rows)
    chosen = torch.arange(count) % 3
    x = [torch.randn(number, 5, dtype=torch.float64) for number in rows]
    return list(zip(x, chosen.unbind(), strict=True))


def _same(reading: Reading, batches: list[tuple[Tensor, Tensor]], **settings: Any) -> Runner:
    """A runner that has given the losses and the parameters of eager steps."""
    expected, eager = _made(reading)
    losses = [eager(*batch) for batch in batches]
    model, step = _made(reading)
    config = Config(workers=1, **settings)
    runner = Runner(step, discover(step), config, single(torch.device("cpu")))
    found = [runner.run(*batch) for batch in batches]
    assert torch.allclose(torch.stack(found), torch.stack(losses), rtol=1e-10)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10)
    return runner


@pytest.mark.parametrize("name", ALL)
def test_one_graph_holds_for_all_places(name: str) -> None:
    # Adam's first step, which makes its slots, is another program than those after it.
    assert _same(ALL[name], _batches(3, 3, 3, 3, 3))._preparation.captures.count == 2


@pytest.mark.parametrize("name", ["i, t", "size", "-1 - t", "_add", "_element"])
def test_with_sizes_that_vary(name: str) -> None:
    assert _same(ALL[name], _batches(3, 3, 5, 4, 7, 6))._preparation.captures.count == 3


def test_whole_numbers_of_batches_choose_in_one_graph() -> None:
    def counted(places: list[int]) -> int:
        model, optimizer = linear()

        def step(x: Tensor, place: int) -> Tensor:
            optimizer.zero_grad()
            loss = model(x)[place].square().sum()
            loss.backward()
            optimizer.step()
            return x[place, 0]

        runner = alone(step)
        x = torch.arange(18.0).view(6, 3)
        for place in places:
            assert runner.run(x, place) == x[place, 0]
        return runner._preparation.captures.count

    assert counted([0, 3, 1, 5, -1, 2, 4]) == counted([0, 3, 1])


@pytest.mark.parametrize("wrong", [3, -4, 100])
def test_places_that_are_not_there(wrong: int) -> None:
    model, optimizer = linear()

    def step(x: Tensor, place: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) * model.weight[:, place]).sum()  # here
        loss.backward()
        optimizer.step()
        return loss

    runner = alone(step)
    x = torch.ones(4, 2) @ torch.ones(2, 3)
    for place in (2, -3):
        runner.run(x, torch.tensor(place))
    before = model.weight.clone()
    raised(
        lambda: runner.run(x, torch.tensor(wrong)),
        StepError,
        f"IndexError: select(): index {wrong} out of range for tensor of size [2, 3]",
        f"at {marked_line(step)}: ",
    )
    assert torch.equal(model.weight, before)


def _changed_at_its_own_place(world: World) -> str:
    model, optimizer = linear()

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight[x.sum().long() % 2] = 0.0  # here

    place = f"at {marked_line(step)}: "
    with world.device:
        error = raised(
            lambda: among(world, step).run(torch.ones(4, 3)),
            VariableError,
            "'weight' outside its gradient's way",
            place,
        )
    return error.problem


def test_workers_may_not_change_a_parameter_each_at_its_place(pool: Pool) -> None:
    first, second = pool.run(2, _changed_at_its_own_place)
    assert first == second


def test_updates_that_the_next_step_finishes(pool: Pool) -> None:
    for found in pool.run(2, user_steps.compare, "rows_of_tables", "HYBRID", True):
        assert max(found.values()) < 1e-10, found


# -- Compiled regions ------------------------------------------------------------------------


def _two_rows(v: Tensor, i: Any, t: Tensor) -> Tensor:
    """Rows that are the same one in some steps, and not in that which is compiled."""
    v = v * 1
    one, other = v[t], v[0]
    one.mul_(other.detach().sin() + 1).add_(1)
    third = v[1 - t]
    third.add_(one.detach().cos()).mul_(2)
    return (one.exp() * third.tanh()).sin() + other


@needs_compiler
@pytest.mark.parametrize("name", ["i", ":, t:t + 1", "_add", "_columns", "two rows"])
def test_compiled_regions_know_no_places(name: str) -> None:
    reading = {**ALL, "two rows": _two_rows}[name]

    def curved(v: Tensor, i: Any, t: Tensor) -> Tensor:
        return reading(v.tanh().exp().sin(), i, t).cos().square().exp()

    runner = _same(curved, _batches(3, 3, 3, 3, 3, 3, 3), compile="inductor")
    regions = runner._compiler.compiled[runner._last]  # type: ignore[index]
    assert any(region.state == "compiled" for region in regions)


def test_torch_is_as_it_was() -> None:
    before = torch.Tensor.__getitem__, torch.Tensor.__setitem__
    _same(ALL["i"], _batches(3, 3))
    assert before == (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
    assert "__getitem__" not in vars(torch.Tensor)
