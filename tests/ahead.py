"""Runs whose batches are read ahead, so that ids travel a step before their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import equality
import torch
from equality import LOCAL_BATCH, Case, difference
from example_steps import EXAMPLES, LOCAL
from torch import nn
from torch.utils import _pytree as pytree
from varying_sizes import ROWS, WIDTH, Bags, Tagger

from parallax.config import Config
from parallax.errors import RowIdError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.control import Step
from parallax.runtime.comm.world import World
from parallax.runtime.exchange.ahead import IdsAhead
from parallax.runtime.runner import Runner

Batch = tuple[torch.Tensor, ...]


@contextmanager
def counted() -> Iterator[list[int]]:
    """The numbers of exchanges that had their ids from the step before, so far, in a list."""
    found = [0]
    take = IdsAhead.take

    def counting(self: Any, step: Step) -> Any:
        taken = take(self, step)
        found[0] += taken is not None
        return taken

    with mock.patch.object(IdsAhead, "take", counting):
        yield found


def runner_of(step: Any, world: World, option: str = "HYBRID") -> Runner:
    config = Config(run_option=option, workers=1, seed=1)  # type: ignore[arg-type]
    return Runner(step, discover(step), config, world)


def example(world: World, name: str, option: str, late: bool = False) -> tuple[float, int]:
    """How far an example's parameters are from one device's, and how often ids came ahead.

    Args:
        late: steps leave updates to the ones that follow.
    """
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        (expected, step, _), batches = EXAMPLES[name](LOCAL * world.size)
        for batch in batches:
            step(*batch)
        torch.manual_seed(3)
        (_, step, _), batches = EXAMPLES[name](LOCAL * world.size)
        runner = runner_of(step, world, option)
        part = slice(world.rank * LOCAL, (world.rank + 1) * LOCAL)
        own = [pytree.tree_map(lambda item: item[part], batch) for batch in batches]
        with counted() as found:
            for batch in runner.ahead(own, late_updates=late):
                runner.run(*batch)
        state = runner.state_dict()["model"]
    finally:
        torch.set_default_dtype(torch.float32)
    return difference(dict(expected.state_dict()), state), found[0]


def _case(world: World) -> tuple[Case, Runner, list[Batch], list[Batch]]:
    """A model with a table, its runner, this worker's batches, and those of all together."""
    case = equality.build("several", "adagrad", "clip_norm")
    whole = equality.batches(world.size)
    first = world.rank * LOCAL_BATCH
    own = [tuple(item[first : first + LOCAL_BATCH] for item in batch) for batch in whole]
    return case, runner_of(case.step, world, "PS"), own, whole


def _expected(whole: Sequence[Batch]) -> Any:
    case = equality.build("several", "adagrad", "clip_norm")
    for batch in whole:
        case.step(*batch)
    return dict(case.models[0].state_dict())


def _difference(runner: Runner, whole: Sequence[Batch]) -> float:
    (name,) = runner._objects.models
    return difference(_expected(whole), dict(runner.state_dict()[name]))


def one_reads_less_ahead(world: World) -> tuple[float, int]:
    """Worker 0 reads four of ten batches ahead; the others read all."""
    _, runner, own, whole = _case(world)
    with counted() as found:
        batches = runner.ahead(own if world.rank else own[:4])
        for batch in batches:
            runner.run(*batch)
        for batch in own[4:] if world.rank == 0 else []:
            runner.run(*batch)
    return _difference(runner, whole), found[0]


def another_in_between(world: World) -> tuple[float, int]:
    """All workers run a batch twice, of which the second time was not announced."""
    _, runner, own, whole = _case(world)
    with counted() as found:
        for number, batch in enumerate(runner.ahead(own)):
            runner.run(*batch)
            if number == 5:
                runner.run(*(item.clone() for item in batch))
    return _difference(runner, [*whole[:6], *whole[5:]]), found[0]


def moved_by_the_loop(world: World) -> tuple[float, int]:
    """A loop that does not pass on what it was given."""
    _, runner, own, whole = _case(world)
    with counted() as found:
        for batch in runner.ahead(own):
            runner.run(*(item.clone() for item in batch))
    return _difference(runner, whole), found[0]


def changed_by_the_loop(world: World) -> tuple[float, int]:
    """A loop that changes its batches in place, after their ids may have left."""
    _, runner, own, whole = _case(world)
    with counted() as found:
        for batch in runner.ahead([tuple(item.clone() for item in batch) for batch in own]):
            batch[0].clamp_(max=4)
            runner.run(*batch)
    return _difference(runner, [(ids.clamp(max=4), *rest) for ids, *rest in whole]), found[0]


def nested(world: World) -> tuple[float, int]:
    """A step that takes the batch as one argument."""
    case, _, own, whole = _case(world)

    def step(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = case.step(*batch)
        return loss

    runner = runner_of(step, world, "PS")
    with counted() as found:
        for batch in runner.ahead(own):
            runner.run(batch)
    return _difference(runner, whole), found[0]


def look_up_too_far(world: World, own: list[Batch], place: int) -> None:
    """Let the last worker's batch at a place have a row that does not exist."""
    if world.rank == world.size - 1:
        ids = own[place][0].clone()
        ids[0, 0] = equality.ROWS
        own[place] = (ids, *own[place][1:])


def bad_id(world: World, place: int) -> tuple[float, int, list[str]]:
    """One worker's batch has a row that does not exist: no worker updates, and all go on."""
    _, runner, own, whole = _case(world)
    look_up_too_far(world, own, place)
    errors = []
    with counted() as found:
        for batch in runner.ahead(own):
            try:
                runner.run(*batch)
            except RowIdError as error:
                errors.append(str(error))
    return _difference(runner, [*whole[:place], *whole[place + 1 :]]), found[0], errors


def other_shapes(world: World, kind: str) -> tuple[float, int]:
    """Batches of ever other lengths."""
    torch.manual_seed(4)
    makers: dict[str, Any] = {"rows": Tagger, "bags": Bags}
    batches = [_varying(kind, length, world.size) for length in (4, 4, 7, 5, 4, 9, 7, 7, 7, 3)]
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(makers[kind]().double())
    expected, model = models
    _train(expected, [whole for whole, _ in batches])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        return loss

    runner = runner_of(step, world, "PS")
    with counted() as found:
        for batch in runner.ahead([parts[world.rank] for _, parts in batches]):
            runner.run(*batch)
    state = runner.state_dict()["model"]
    return difference(dict(expected.state_dict()), state), found[0]


def _train(model: nn.Module, batches: Sequence[Batch]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()


def _varying(kind: str, length: int, workers: int) -> tuple[Batch, list[Batch]]:
    """A whole batch, and each worker's part of it."""
    rows = 2 * workers
    parts: list[Batch]
    if kind == "rows":
        words, labels = torch.randint(ROWS, (rows, length)), torch.randint(3, (rows, length))
        parts = list(zip(words.split(2), labels.split(2), strict=True))
        return (words, labels), parts
    even = torch.randint(ROWS, (rows, length))
    others = torch.randint(ROWS, (rows * length,))
    # Uneven bags, of which two together have as many ids on each worker.
    starts = torch.arange(0, rows * length, length)
    starts[1::2] -= WIDTH // 3
    parts = [
        (even[w : w + 2], others[w * length : (w + 2) * length], starts[w : w + 2] - w * length)
        for w in range(0, rows, 2)
    ]
    return (even, others, starts), parts
