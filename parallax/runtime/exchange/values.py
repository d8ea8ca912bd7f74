"""Scattered variables: gathered from the workers that have their rows, while the model computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from parallax.ops.values import GatherSpec
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World


class ValueGather:
    """The runtime of one :class:`GatherSpec`: (N-1)/N b sent per worker and step, on average.

    A message follows when the one before has arrived, since that one is wanted first.
    """

    def __init__(self, spec: GatherSpec, world: World) -> None:
        self.spec = spec
        self.world = world
        self._wholes: dict[int, torch.Tensor] = {}
        self._pending: dict[int, Pending] = {}
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By message, what is sent and what is received: new memory costs as much as a copy."""

    def start(self, number: int, shards: Sequence[torch.Tensor]) -> None:
        """Send this worker's rows of the variables of a message to all others."""
        world, places = self.world, self.spec.of_message(number)
        pairs = zip(shards, places, strict=True)
        own = [shard.detach().movedim(self.spec.axes[p], 0).reshape(-1) for shard, p in pairs]
        mine = own[0] if len(own) == 1 else torch.cat(own)
        counts = [
            sum(self._count(place, worker) for place in places) for worker in range(world.size)
        ]
        if number not in self._buffers:
            sent = mine.new_empty(world.size * len(mine))
            self._buffers[number] = sent, mine.new_empty(sum(counts))
        sent, received = self._buffers[number]
        sent.view(world.size, len(mine)).copy_(mine)
        self._pending[number] = world.all_to_all(
            received, sent, counts, [len(mine)] * world.size, "dense: gather", "dense"
        )

    def _count(self, place: int, worker: int) -> int:
        """Elements that a worker has of a variable."""
        first, last = self.spec.ranges[place][worker]
        shape = self.spec.shapes[place]
        return (last - first) * (math.prod(shape) // shape[self.spec.axes[place]])

    def finish(self, number: int) -> list[torch.Tensor]:
        """The whole variables of a message; valid until they are gathered again."""
        self._pending.pop(number).wait()
        _, received = self._buffers[number]
        places = self.spec.of_message(number)
        offset = 0
        for worker in range(self.world.size):
            for place in places:
                count = self._count(place, worker)
                first, last = self.spec.ranges[place][worker]
                part = received[offset : offset + count]
                offset += count
                whole = self._whole(place).movedim(self.spec.axes[place], 0)
                whole[first:last].copy_(part.view(last - first, *whole.shape[1:]))
        return [self._whole(place) for place in places]

    def _whole(self, place: int) -> torch.Tensor:
        if place not in self._wholes:
            spec = self.spec
            self._wholes[place] = torch.empty(
                spec.shapes[place], dtype=spec.dtypes[place], device=self.world.device
            )
        return self._wholes[place]
