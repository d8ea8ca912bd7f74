"""Losses that are means over some of a batch, run on several workers: for the tests."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from divisor_losses import (
    ALIKE,
    CLASSES,
    GIVEN,
    LEFT_OUT,
    LENGTH,
    OTHERS,
    PACKED,
    PAD,
    SELECTED,
    WEIGHTED,
    WORDS,
    Net,
    of_each,
    of_words,
    summed,
)
from equality import difference
from errors_help import warnings_of_parallax
from torch import nn

from parallax.config import Config
from parallax.graph.analysis.totals import Batches, means_left_alone, sums_by_inputs, totals
from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover
from parallax.graph.step_graph import StepGraph
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner


def of_tasks_at_once(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two tasks whose learned weights are one vector."""
    scores, weights = net(x), net.out.bias[:2]
    tasks = torch.stack([of_words(scores, y, ignore_index=PAD), scores.square().mean()])
    return (torch.exp(-weights) * tasks + weights).sum()


def line_left_alone(loss: Callable[..., torch.Tensor]) -> str:
    """Where a loss of the net, words and labels has a mean that stays each worker's own."""
    graph, names = _captured(loss, *data([(4,)], seed=5)[0][0])
    return str(means_left_alone(graph, names, Batches(leave_out=True)) or "")


def line_of_sums_by_inputs(counted: bool) -> str:
    """Where a loss divides more than a sum over the batch by how many labels there are.

    Args:
        counted: in the step, not before it.
    """

    def loss(net: Net, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        whole = summed(net(x), y) + net.out.weight.square().sum()
        return whole / ((y != PAD).sum() if counted else count.clamp(min=1))

    x, y = data([(4,)], seed=5)[0][0]
    return str(sums_by_inputs(*_captured(loss, x, y, (y != PAD).sum())) or "")


def of_boxes(last: int) -> int:
    """How many divisors are found of a sum over the boxes of all images, where sizes are symbols.

    Args:
        last: how many boxes the last image has.
    """
    net = nn.Linear(3, 4).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def step(images: torch.Tensor, boxes: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        places = torch.cat([torch.full((len(own),), place) for place, own in enumerate(boxes)])
        far = F.l1_loss(net(images)[places], torch.cat(boxes), reduction="none")
        (far.sum() / sum(len(own) for own in boxes)).backward()
        optimizer.step()

    boxes = [torch.rand(count, 4, dtype=torch.float64) for count in (3, 2, last)]
    batch = torch.rand(3, 3, dtype=torch.float64), boxes
    graph = capture(step, discover(step), batch, {}, varying={(1, 0): 0, (2, 0): 1})
    names = [name for name, _ in net.named_parameters()]
    return len(totals(graph, names, Batches(by_rows=False)))


def uses_of_micro_batches(rows: int) -> list[int]:
    """Of two sets of which three micro-batches have means, how many gradients each mean divides.

    Args:
        rows: of each micro-batch's sets.
    """
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def step(some: torch.Tensor, others: torch.Tensor) -> None:
        optimizer.zero_grad()
        for one, other in zip(some.chunk(3), others.chunk(3), strict=True):
            far = net(other).sum(-1).square()
            ((net(one).logsumexp(-1).mean() + far.sum() / far.shape[0]) / 3).backward()
        optimizer.step()

    batch = [torch.randint(WORDS, (3 * rows,)) for _ in range(2)]
    graph = capture(step, discover(step), batch, {})
    names = [name for name, _ in net.named_parameters()]
    return [len(one.uses) for one in totals(graph, names, Batches(by_rows=False))]


def _captured(
    loss: Callable[..., torch.Tensor], *batch: torch.Tensor
) -> tuple[StepGraph, list[str]]:
    """A step of the net, and its variables."""
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(net, *batch)
        value.backward()
        optimizer.step()
        return value

    graph = capture(step, discover(step), batch, {})
    return graph, [name for name, _ in net.named_parameters()]


def data(division: Sequence[Sequence[int]], seed: int) -> list[list[tuple[torch.Tensor, ...]]]:
    """By step and worker, words and labels; 0 rows, or fewer for rows of labels left out alone."""
    made = torch.Generator().manual_seed(seed)
    found = []
    for counts in division:
        parts = []
        for count in counts:
            rows = abs(count)
            words = torch.randint(WORDS, (rows, LENGTH), generator=made)
            labels = torch.randint(1, CLASSES, (rows, LENGTH), generator=made)
            lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=made)
            left_out = torch.arange(LENGTH).expand(rows, LENGTH) >= (lengths if count > 0 else 0)
            parts.append((words, labels.masked_fill(left_out, PAD)))
        found.append(parts)
    return found


def packed_data(
    division: Sequence[Sequence[Sequence[int]]], seed: int
) -> list[list[tuple[torch.Tensor, ...]]]:
    """By step and worker, for sequences of these lengths: words, labels, and the lengths."""
    made = torch.Generator().manual_seed(seed)
    return [
        [
            (
                torch.randint(WORDS, (sum(lengths),), generator=made),
                torch.randint(CLASSES, (sum(lengths),), generator=made),
                torch.tensor(lengths, dtype=torch.int64),
            )
            for lengths in parts
        ]
        for parts in division
    ]


def train(
    world: World, name: str, division: Sequence[Sequence[int]], settings: dict[str, Any]
) -> tuple[float, int]:
    """How far parameters are from those of one device, and the bytes that this worker sent for
    totals.

    Args:
        name: of the loss.
        division: by step and worker, how many rows; fewer than none where no label counts.
        settings: beside the number of workers.
    """
    loss = {**ALIKE, **SELECTED, **LEFT_OUT, **OTHERS}[name]
    batches = data(division, seed=5)
    return _train(world, lambda net, x, y: loss(net(x), y), batches, settings)


def train_given(
    world: World, name: str, kind: type, division: Sequence[Sequence[int]], settings: dict[str, Any]
) -> tuple[float, int]:
    """As :func:`train`, with a number of labels that comes with the batch.

    Args:
        kind: of the number, ``torch.Tensor`` too.
    """
    loss = GIVEN[name]
    batches: Any = [
        [(x, y, _as(kind, (y != PAD).sum())) for x, y in parts] for parts in data(division, seed=5)
    ]
    return _train(world, lambda net, x, y, n: loss(net(x), y, n), batches, settings)


def _as(kind: type, count: torch.Tensor) -> Any:
    return count if kind is torch.Tensor else kind(count)


def train_weighted(world: World, name: str, division: Sequence[Sequence[int]]) -> tuple[float, int]:
    """As :func:`train`, with learned weights of two tasks."""
    return _train(world, WEIGHTED[name], data(division, seed=5), {})


def train_scaled(world: World, kind: str, division: Sequence[Sequence[int]]) -> tuple[float, int]:
    """As :func:`train`, of a mean over labels that is multiplied as a whole, by another number in
    each step.

    Args:
        kind: of the number: of the batch, as Python's or as a tensor; in an object of the user; or
            a tensor that is state.
    """
    kept = types.SimpleNamespace(value=torch.ones(()).double() if kind == "state" else 1.0)
    count = itertools.count()

    def number(step: int) -> float:
        return 1 / (1 + step % len(division))

    def prepare() -> None:
        value = number(next(count))
        if kind == "state":
            kept.value.fill_(value)
        else:
            kept.value = value

    def loss(net: Net, x: torch.Tensor, y: torch.Tensor, given: Any = None) -> torch.Tensor:
        mean = ALIKE["mask and a bound"](net(x), y)
        return mean * (kept.value if given is None else given)

    batches: list[list[tuple[Any, ...]]] = [[*parts] for parts in data(division, seed=5)]
    if kind in ("float", "tensor"):
        as_kind = torch.tensor if kind == "tensor" else float
        batches = [
            [(x, y, as_kind(number(step))) for x, y in parts] for step, parts in enumerate(batches)
        ]
    return _train(world, loss, batches, {}, prepare, lambda items: items[0])


def train_in_passes(world: World, division: Sequence[Sequence[int]]) -> tuple[float, int]:
    """As :func:`train`, with a backward pass for each half of the words' places."""

    def loss(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, last = (
            of_words(net(a), b, ignore_index=PAD) / 2
            for a, b in zip(x.chunk(2, 1), y.chunk(2, 1), strict=True)
        )
        first.backward()
        return last

    return _train(world, loss, data(division, seed=5), {})


BEGUN: dict[str, Callable[[torch.Tensor], None]] = {
    "half": lambda loss: loss.sum().backward(torch.tensor(0.5).double()),
    "as many halves": lambda loss: loss.backward(torch.full_like(loss, 0.5)),
    "ones": lambda loss: torch.autograd.backward([loss], [torch.ones_like(loss)]),
}
"""Ways to begin a backward pass with other gradients than none, of a loss for each label."""


def train_begun(world: World, name: str, division: Sequence[Sequence[int]]) -> tuple[float, int]:
    """As :func:`train`, of a mean over labels, with such a backward pass."""

    def loss(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return of_each(net(x), y) * (y != PAD) / (y != PAD).sum().clamp(min=1)

    return _train(world, loss, data(division, seed=5), {}, backward=BEGUN[name])


def told_of_pieces(world: World, sizes: Sequence[int]) -> list[str]:
    """What is logged of means over as many sets of labels as the worker's batch has pieces.

    Args:
        sizes: by worker, in pieces of how many words its batch is split.
    """

    def loss(net: Net, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        size = sizes[world.rank]
        halves = zip(net(words).split(size, 1), labels.split(size, 1), strict=True)
        return torch.stack([of_words(a, b, ignore_index=PAD) for a, b in halves]).sum()

    with warnings_of_parallax() as found:
        _train(world, loss, data([(2, 2)] * 4, seed=5), {})
    return [one for one in found if "differing numbers" in one]


def train_packed(
    world: World,
    name: str,
    division: Sequence[Sequence[Sequence[int]]],
    settings: dict[str, Any],
) -> tuple[float, int]:
    """As :func:`train`, by the lengths of sequences."""
    loss = PACKED[name]

    def value(net: Net, words: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> Any:
        scores = net(words)
        ends = lengths.cumsum(0)
        before = F.pad(scores.cumsum(0), (0, 0, 1, 0))
        return loss(scores, labels, before[ends] - before[ends - lengths])

    return _train(world, value, packed_data(division, seed=5), settings)


def _train(
    world: World,
    loss: Callable[..., torch.Tensor],
    batches: Sequence[Sequence[tuple[Any, ...]]],
    settings: dict[str, Any],
    prepare: Callable[[], None] = lambda: None,
    of_all: Callable[[Sequence[Any]], Any] = sum,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> tuple[float, int]:
    """As :func:`train`.

    Args:
        backward: of the loss.
        prepare: is called before each step.
        of_all: what one device has for numbers of all workers' batches.
    """
    torch.manual_seed(3)
    net = Net().double()
    start = {key: value.clone() for key, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(net, *batch)
        backward(value)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        return value.detach().sum()

    for parts in batches:
        prepare()
        step(*(_together(items, of_all) for items in zip(*parts, strict=True)))
    expected = {key: value.clone() for key, value in net.state_dict().items()}
    net.load_state_dict(start)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    runner = Runner(step, discover(step), Config(workers=1, **settings), world)
    before = world.traffic.sent["batch totals"]
    for parts in batches:
        prepare()
        runner.run(*parts[world.rank])
    (model,) = runner._objects.models
    found: dict[str, Any] = runner.state_dict()[model]
    return difference(expected, dict(found)), world.traffic.sent["batch totals"] - before


def _together(items: Sequence[Any], of_all: Callable[[Sequence[Any]], Any]) -> Any:
    """Of all workers' batches, what one device has."""
    if isinstance(items[0], torch.Tensor) and items[0].dim():
        return torch.cat([*items])
    return of_all(items)
