"""Sums of all workers, and values for all, by our own schedules, run in the background."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallax.ops.reductions import Part, Schedule, gathering, scattering, schedule
from parallax.runtime.comm.background import Later
from parallax.runtime.comm.world import World


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


def _start(world: World, buffer: torch.Tensor, steps: Schedule, purpose: str) -> Later:
    sent = [0] * world.size
    for step in steps:
        if step.to is not None:
            sent[step.to] += (step.sent[1] - step.sent[0]) * buffer.element_size()
    world.count(purpose, sent)
    later = Later(lambda: _run(world, buffer, steps), world.traffic.wait)
    if buffer.device.type == "cuda":
        later.run()  # on the device's stream, which goes on by itself
        return later
    return world.background.give(later)


def _run(world: World, buffer: torch.Tensor, steps: Schedule) -> None:
    """Do this worker's part of it."""
    added = (step.received[1] - step.received[0] for step in steps if step.adds)
    most = max(added, default=0)
    scratch = torch.empty(most, dtype=buffer.dtype, device=buffer.device)
    for step in steps:
        first, last = step.received
        came = scratch[: last - first] if step.adds else buffer[first:last]
        world.transfer(buffer[slice(*step.sent)], step.to, came, step.source)
        if step.adds:
            buffer[first:last] += came
