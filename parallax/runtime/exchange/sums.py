"""Sums of all workers, and values for all, by our own schedules, run in the background."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from parallax.cluster.network import number_of_parts
from parallax.ops.reductions import Part, Schedule, Transfer, gathering, scattering, schedule
from parallax.runtime.comm.background import Later
from parallax.runtime.comm.pending import Transferring
from parallax.runtime.comm.world import World

LANES = 2
"""How many messages of a schedule are under way at once: while what one brought is added up, the
next one travels."""


def sum_by(
    world: World, buffer: torch.Tensor, reduction: str, order: Sequence[int], purpose: str
) -> Later:
    """Start to sum ``buffer`` over all workers in place.

    Args:
        world: this worker and the others.
        buffer: flat.
        reduction: a schedule of :mod:`parallax.ops.reductions`.
        order: of the workers in it; empty for the order of their numbers.
        purpose: what the bytes are counted as.
    """
    order = tuple(order) or tuple(range(world.size))
    return _start(world, buffer, schedule(reduction, order, world.rank, len(buffer)), purpose)


def scatter_by(
    world: World, buffer: torch.Tensor, parts: Sequence[Part], order: Sequence[int], purpose: str
) -> Later:
    """Start to sum parts of ``buffer`` in a ring, each for one worker, in place.

    Args:
        world, buffer, order, purpose: as for :func:`sum_by`.
        parts: by worker, what it wants: first and one-past-last element. What is left of the others
            is of no use.
    """
    order = tuple(order) or tuple(range(world.size))
    return _start(world, buffer, scattering(order, world.rank, tuple(parts)), purpose)


def gather_by(
    world: World, buffer: torch.Tensor, parts: Sequence[Part], order: Sequence[int], purpose: str
) -> Later:
    """Start to bring this worker's part of ``buffer`` to all in a ring, and theirs to it.

    Args:
        world, buffer, order, purpose: as for :func:`sum_by`.
        parts: by worker, what it has: first and one-past-last element.
    """
    order = tuple(order) or tuple(range(world.size))
    return _start(world, buffer, gathering(order, world.rank, tuple(parts)), purpose)


@lru_cache(maxsize=256)
def in_pieces(steps: Schedule, elements: int) -> Schedule:
    """The same schedule in messages of about so many elements; both ends of each cut it alike.

    Args:
        steps: what one worker does.
        elements: of a message; 0 for those that the schedule has.
    """
    nothing = (0, 0)
    return tuple(
        Transfer(
            step.to if sent else None,
            sent or nothing,
            step.source if received else None,
            received or nothing,
            step.adds,
        )
        for step in steps
        for sent, received in itertools.zip_longest(
            _cut(step.sent, elements), _cut(step.received, elements)
        )
    )


def _cut(whole: Part, elements: int) -> list[Part]:
    first, last = whole
    count, parts = last - first, number_of_parts(last - first, elements)
    edges = [first + count * number // parts for number in range(parts + 1)]
    return list(itertools.pairwise(edges))


def touches(one: Transfer, before: Transfer) -> bool:
    """Whether a step has to wait for one before it: it sends what that one receives, or receives
    where it sends or receives."""
    return (
        _overlap(one.sent, before.received)
        or _overlap(one.received, before.sent)
        or _overlap(one.received, before.received)
    )


def _overlap(one: Part, other: Part) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def _start(world: World, buffer: torch.Tensor, steps: Schedule, purpose: str) -> Later:
    sent = [0] * world.size
    for step in steps:
        if step.to is not None:
            sent[step.to] += (step.sent[1] - step.sent[0]) * buffer.element_size()
    world.count(purpose, sent)
    steps = in_pieces(steps, world.pieces.get("dense", 0) // buffer.element_size())

    def run() -> None:
        began = time.perf_counter()
        _run(world, buffer, steps)
        world.traffic.end(purpose, sum(sent), began)

    later = Later(run, world.traffic.wait)
    if buffer.device.type == "cuda":
        later.run()  # on the device's stream, which goes on by itself
        return later
    return world.background.give(later)


def _run(world: World, buffer: torch.Tensor, steps: Schedule) -> None:
    """Do this worker's part of it, with a few messages under way at once."""
    most = max((_length(step.received) for step in steps if step.adds), default=0)
    scratch = buffer.new_empty(LANES, most)
    under_way: deque[_UnderWay] = deque()
    for number, step in enumerate(steps):
        while under_way and (
            len(under_way) == LANES or any(touches(step, one.step) for one in under_way)
        ):
            under_way.popleft().finish(buffer)
        place = scratch[number % LANES][: _length(step.received)]
        came = place if step.adds else buffer[slice(*step.received)]
        sent = buffer[slice(*step.sent)]
        message = world.transfer(sent, step.to, came, step.source)
        under_way.append(_UnderWay(step, message, came))
    for one in under_way:
        one.finish(buffer)


def _length(part: Part) -> int:
    return part[1] - part[0]


@dataclass(frozen=True)
class _UnderWay:
    """One step of a schedule.

    Args:
        step: which.
        message: that it sends and receives.
        came: where what it receives comes.
    """

    step: Transfer
    message: Transferring
    came: torch.Tensor

    def finish(self, buffer: torch.Tensor) -> None:
        """Wait for it, and add what came to the buffer if that is to be."""
        self.message.wait()
        if self.step.adds:
            buffer[slice(*self.step.received)] += self.came
