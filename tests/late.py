"""Runs whose steps leave updates of dense variables to the steps that follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ahead
import equality
import torch
from by_host import forced
from equality import LOCAL_BATCH, STEPS, Case, difference
from torch import nn
from torch.utils import _pytree as pytree

from parallax.config import Config
from parallax.errors import RowIdError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.late import LateUpdates
from parallax.runtime.runner import Runner

Batch = tuple[torch.Tensor, ...]


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many updates a following step has finished so far, in a list."""
    found = [0]
    settle, finish = LateUpdates.settle, LateUpdates.finish

    def settling(self: Any, number: int) -> None:
        found[0] += number in self._left
        settle(self, number)

    def finishing(self: Any) -> None:
        before = found[0]
        finish(self)
        found[0] = before

    with (
        mock.patch.object(LateUpdates, "settle", settling),
        mock.patch.object(LateUpdates, "finish", finishing),
    ):
        yield found


def cases(
    world: World, option: str, chosen: list[tuple[str, str, str]]
) -> tuple[dict[str, float], int]:
    """How far cases are from one device, and how many updates were late."""
    with counted() as found:
        return equality.compare(world, option, chosen, late=True), found[0]


def by_levels(world: World, levels: str, what: tuple[str, str, str]) -> tuple[float, int]:
    """As :func:`cases`, with gradients and rows in these levels, for one case."""
    with counted() as found, forced(levels):
        (difference,) = equality.compare(world, "HYBRID", [what], late=True).values()
    return difference, found[0]


def example(world: World, name: str, option: str) -> tuple[float, int]:
    """How far an example's parameters are from one device's, and how many updates were late."""
    with counted() as found:
        difference, _ = ahead.example(world, name, option, late=True)
    return difference, found[0]


def _case(
    world: World, what: tuple[str, str, str], option: str = "HYBRID", **settings: Any
) -> tuple[Case, Runner, list[Batch], list[Batch]]:
    """A case, its runner, this worker's batches, and those of all together."""
    case = equality.build(*what)
    whole = equality.batches(world.size)
    first = world.rank * LOCAL_BATCH
    own = [tuple(item[first : first + LOCAL_BATCH] for item in batch) for batch in whole]
    config = Config(run_option=option, workers=1, seed=1, **settings)  # type: ignore[arg-type]
    return case, Runner(case.step, discover(case.step), config, world), own, whole


def compiled(world: World, what: tuple[str, str, str]) -> tuple[float, int, str]:
    """A compiled step, how many updates were late, and what its plan says."""
    case, runner, own, whole = _case(world, what, compile="inductor")
    with counted() as found:
        for batch in runner.ahead(own, late_updates=True):
            runner.run(*batch)
    expected = equality.single_device(equality.build(*what), whole)
    return difference(expected, equality.state_of(case, runner)), found[0], str(runner.plan)


def looked_at(world: World, what: tuple[str, str, str]) -> tuple[list[float], list[bool]]:
    """After each step of a loop, how far the state is from one device's; and in every second one,
    whether the model itself was behind before, and is not when updates are settled."""
    case, runner, own, whole = _case(world, what)
    reference = equality.build(*what)
    dense = [name for name, _ in case.models[0].named_parameters() if "table" not in name]
    states, behind = [], []
    for number, (batch, all_of_it) in enumerate(
        zip(runner.ahead(own, late_updates=True), whole, strict=True)
    ):
        runner.run(*batch)
        expected = equality.single_device(reference, [all_of_it])
        if number % 2 and number < STEPS - 1:
            before = _distance(case, expected, dense)
            runner.settle()
            behind.append(before > 1e-6 and _distance(case, expected, dense) <= 1e-10)
        states.append(difference(expected, equality.state_of(case, runner)))
    return states, behind


def _distance(case: Case, expected: dict[str, Any], names: Sequence[str]) -> float:
    own = dict(case.models[0].named_parameters())
    return max(float((own[n].data - expected["models"][0][n]).abs().max()) for n in names)


def left_early(world: World, what: tuple[str, str, str]) -> tuple[float, int]:
    """The loop ends with batches that were not run; then come steps of its own."""
    case, runner, own, whole = _case(world, what)
    with counted() as found:
        for number, batch in enumerate(runner.ahead(own, late_updates=True)):
            runner.run(*batch)
            if number == 4:
                break
        for batch in own[5:]:
            runner.run(*batch)
    expected = equality.single_device(equality.build(*what), whole)
    return difference(expected, equality.state_of(case, runner)), found[0]


def loaded(world: World, what: tuple[str, str, str]) -> float:
    """A state of some steps ago is loaded while updates are under way."""
    case, runner, own, whole = _case(world, what)
    kept: dict[str, Any] = {}
    for number, batch in enumerate(runner.ahead(own, late_updates=True)):
        runner.run(*batch)
        if number == 3:
            kept = pytree.tree_map_only(torch.Tensor, torch.clone, runner.state_dict())
        if number == 6:
            runner.load_state_dict(kept)
    expected = equality.single_device(equality.build(*what), [*whole[:4], *whole[7:]])
    return difference(expected["models"], equality.state_of(case, runner)["models"])


def bad_id(world: World, place: int) -> tuple[float, int, list[str]]:
    """A batch has a row that does not exist: the step before is finished, and this one is not."""
    what = ("several", "momentum", "none")
    case, runner, own, whole = _case(world, what, "PS")
    ahead.look_up_too_far(world, own, place)
    errors = []
    with counted() as found:
        for batch in runner.ahead(own, late_updates=True):
            try:
                runner.run(*batch)
            except RowIdError as error:
                errors.append(str(error))
    reference = equality.build(*what)
    expected = equality.single_device(reference, [*whole[:place], *whole[place + 1 :]])
    state = equality.state_of(case, runner)
    return difference(expected["models"], state["models"]), found[0], errors


def uneven(world: World) -> tuple[float, int]:
    """Batches of ever other sizes, weighted by their rows: two programs take turns."""
    torch.manual_seed(4)
    sizes = [2, 3, 1, 2, 4, 2, 3, 3]
    # Worker 0 has a row more in every second step.
    parts = [[size + (w == 0 and n % 2) for w in range(world.size)] for n, size in enumerate(sizes)]
    data = [
        (torch.randn(sum(rows), 5, dtype=torch.float64), torch.randint(3, (sum(rows),)))
        for rows in parts
    ]

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    expected, step = made()
    for batch in data:
        step(*batch)
    _, step = made()
    runner = ahead.runner_of(step, world, "AR")
    own = [
        tuple(item.split(rows)[world.rank] for item in batch)
        for batch, rows in zip(data, parts, strict=True)
    ]
    with counted() as found, small_buckets():
        for batch in runner.ahead(own, late_updates=True):
            runner.run(*batch)
    state = runner.state_dict()["model"]
    return difference(dict(expected.state_dict()), state), found[0]


def dense(world: World, what: tuple[str, str, str]) -> tuple[float, int]:
    """A model without tables: the bucket that is full last tells whether workers agree."""
    case, runner, own, whole = _case(world, what, "AR")
    with counted() as found, small_buckets():
        for batch in runner.ahead(own, late_updates=True):
            runner.run(*batch)
    expected = equality.single_device(equality.build(*what), whole)
    return difference(expected, equality.state_of(case, runner)), found[0]


@contextmanager
def small_buckets() -> Iterator[None]:
    """A bucket for every few gradients."""
    from parallax.strategy.message_sizes import MessageSizes

    sizes = MessageSizes(operations=1, overlapped=1, most=1)
    with mock.patch.object(MessageSizes, "measured", return_value=sizes):
        yield


def in_turn(
    world: World, what: tuple[str, str, str], turns: Sequence[int] = ()
) -> tuple[float, list[list[str]], list[list[str]]]:
    """A model without tables whose late messages start in the opposite order, or by ``turns``.

    Returns:
        How far it is from one device; which messages each step started, by the last of each one's
        variables; and these in the order of groups, and of late turns.
    """
    from parallax.runtime.exchange.dense import Buckets
    from parallax.strategy import late_order

    started: list[list[str]] = []
    start = Buckets._start

    def starting(self: Any, bucket: Any) -> None:
        name = self.spec.entries[bucket.entries[-1]].name
        if name not in started[-1]:  # as a piece of the same
            started[-1].append(name)
        start(self, bucket)

    def ordered(sums: Sequence[Any]) -> list[int]:
        places = list(range(len(sums)))
        if not turns:
            return places[::-1]
        return [*(places[turn - 1] for turn in turns), *places[len(turns) :]]

    case, runner, own, whole = _case(world, what, "AR")
    with (
        small_buckets(),
        mock.patch.object(Buckets, "_start", starting),
        mock.patch.object(late_order, "in_order_of_need", ordered),
    ):
        for batch in runner.ahead(own, late_updates=True):
            started.append([])
            runner.run(*batch)
    assert runner.strategy is not None
    chosen = {name: runner.strategy.variables[name] for name in started[0]}
    orders = [sorted(chosen, key=lambda n: getattr(chosen[n], f)) for f in ("group", "late_turn")]
    expected = equality.single_device(equality.build(*what), whole)
    return difference(expected, equality.state_of(case, runner)), started, orders
