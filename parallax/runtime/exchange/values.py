"""Values of variables that other workers have: gathered, or sent by their owners."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from parallax.ops.specs import PullSpec
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


class ValuePull:
    """The runtime of one :class:`PullSpec`: owners send new values to all, (N-1)b/N each."""

    def __init__(self, spec: PullSpec, world: World) -> None:
        self.spec = spec
        self.world = world
        self._kept: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        """By type, what is sent and what is received: new memory would cost as much as a copy."""

    def run(self, values: Sequence[torch.Tensor]) -> None:
        """See :func:`parallax.ops.resources.pull_values`."""
        for dtype in dict.fromkeys(self.spec.dtypes):
            own = [i for i, kind in enumerate(self.spec.dtypes) if kind is dtype]
            rows_first = [values[i].detach().movedim(self.spec.axes[i], 0) for i in own]
            self._run(rows_first, [self.spec.owners[i] for i in own])

    def _run(self, values: list[torch.Tensor], owners: list[tuple[tuple[int, int], ...]]) -> None:
        size, rank = self.world.size, self.world.rank
        sizes = [
            [
                (ranges[w][1] - ranges[w][0]) * math.prod(value.shape[1:])
                for value, ranges in zip(values, owners, strict=True)
            ]
            for w in range(size)
        ]
        mine = torch.cat(
            [v[r[rank][0] : r[rank][1]].reshape(-1) for v, r in zip(values, owners, strict=True)]
        )
        totals = [sum(row) for row in sizes]
        if mine.dtype not in self._kept:
            self._kept[mine.dtype] = mine.new_empty(size * len(mine)), mine.new_empty(sum(totals))
        sent, received = self._kept[mine.dtype]
        sent.view(size, -1).copy_(mine)
        self.world.all_to_all(received, sent, totals, [len(mine)] * size, "dense: pull").wait()
        parts = iter(received.split([count for row in sizes for count in row]))
        for worker in range(size):
            for value, ranges in zip(values, owners, strict=True):
                part = next(parts)
                first, last = ranges[worker]
                if worker != rank and last > first:
                    value[first:last].copy_(part.view(last - first, *value.shape[1:]))
