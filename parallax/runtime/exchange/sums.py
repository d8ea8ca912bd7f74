"""Sums of all workers by our own schedules, run in the background."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallax.ops.reductions import Schedule, schedule
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
    steps = schedule(reduction, order, world.rank, len(buffer))
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
    """Do this worker's part of a sum."""
    most = max((step.received[1] - step.received[0] for step in steps), default=0)
    scratch = torch.empty(most, dtype=buffer.dtype, device=buffer.device)
    for step in steps:
        first, last = step.received
        came = scratch[: last - first] if step.adds else buffer[first:last]
        world.transfer(buffer[slice(*step.sent)], step.to, came, step.source)
        if step.adds:
            buffer[first:last] += came
