"""Values of variables that other workers have: gathered, or sent by their owners.

They go to all at once, or round a ring, where one message at a time is on each link.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from parallax.ops.reductions import Part
from parallax.ops.specs import PullSpec
from parallax.ops.values import GatherSpec
from parallax.runtime.comm.background import Later
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World
from parallax.runtime.exchange.sums import gather_by

Ranges = tuple[tuple[int, int], ...]
"""By worker, the first and one-past-last row that it has of a variable."""

ALONE_BYTES = 1 << 20
"""Of a variable that goes round a ring by itself, in its own memory; smaller ones go together."""


def _in_order(ranges: Ranges, axis: int) -> bool:
    """Whether the parts of all workers, one after the other, lie as the variable in memory."""
    ends = [0, *(last for first, last in ranges if last > first)]
    starts = [first for first, last in ranges if last > first]
    return axis == 0 and starts == ends[:-1]


class _Everyones:
    """A buffer with the parts of all workers, one after the other."""

    def __init__(self, world: World, counts: Sequence[int], like: torch.Tensor) -> None:
        """
        Args:
            counts: by worker, the elements of its part.
            like: has their dtype and device.
        """
        self._world = world
        self._counts = list(counts)
        self.parts: list[Part] = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
        self.all = like.new_empty(sum(counts))
        # Kept: new memory would cost as much as a copy.
        self._repeated = torch.empty(0)

    def send(
        self, own: Sequence[torch.Tensor], ring: tuple[int, ...] | None, purpose: str, group: str
    ) -> Pending | Later:
        """Start to send this worker's part to all, and to get theirs.

        Args:
            own: flat pieces of its part.
            ring: the order of the workers in a ring; None to send to all at once.
            purpose, group: see :meth:`World.all_to_all`.
        """
        world = self._world
        if ring is not None:
            _put_together(own, self.all[slice(*self.parts[world.rank])])
            return gather_by(world, self.all, self.parts, ring, purpose)
        mine = self._counts[world.rank]
        if len(self._repeated) == 0:
            self._repeated = self.all.new_empty(world.size * mine)
        first, *others = self._repeated.view(world.size, mine)
        _put_together(own, first)
        for other in others:
            other.copy_(first)
        counts = [mine] * world.size
        most = max(self._counts) * (world.size - 1) * self.all.element_size()
        return world.all_to_all(
            self.all, self._repeated, self._counts, counts, purpose, group, most=most
        )


def _put_together(pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    if pieces:
        torch.cat(list(pieces), out=out)


class ValueGather:
    """The runtime of one :class:`GatherSpec`: (N-1)/N b sent per worker and step, on average.

    A message follows when the one before has arrived, since that one is wanted first.
    """

    def __init__(self, spec: GatherSpec, world: World) -> None:
        self.spec = spec
        self.world = world
        self._pending: dict[int, Pending | Later] = {}
        self._buffers: dict[int, _Everyones] = {}
        """By message, what it brings."""
        self._wholes: dict[int, torch.Tensor] = {}
        """Of variables whose parts do not lie in their messages as they do in memory."""
        self._ready = [self._lies_as_it_comes(place) for place in range(len(spec.names))]
        """By variable, whether they do."""

    def start(self, number: int, shards: Sequence[torch.Tensor]) -> None:
        """Send this worker's rows of the variables of a message to all others."""
        spec, places = self.spec, self.spec.of_message(number)
        pairs = zip(shards, places, strict=True)
        own = [shard.detach().movedim(spec.axes[p], 0).reshape(-1) for shard, p in pairs]
        if number not in self._buffers:
            counts = [
                sum(self._count(place, worker) for place in places)
                for worker in range(self.world.size)
            ]
            self._buffers[number] = _Everyones(self.world, counts, own[0])
        self._pending[number] = self._buffers[number].send(
            own, spec.rings[number], "dense: gather", "dense"
        )

    def _count(self, place: int, worker: int) -> int:
        """Elements that a worker has of a variable."""
        first, last = self.spec.ranges[place][worker]
        shape = self.spec.shapes[place]
        return (last - first) * (math.prod(shape) // shape[self.spec.axes[place]])

    def finish(self, number: int) -> list[torch.Tensor]:
        """The whole variables of a message; valid until they are gathered again."""
        self._pending.pop(number).wait()
        spec, received = self.spec, self._buffers[number]
        places = spec.of_message(number)
        if len(places) == 1 and self._ready[places[0]]:
            return [received.all.view(spec.shapes[places[0]])]
        offset = 0
        for worker in range(self.world.size):
            for place in places:
                count = self._count(place, worker)
                first, last = spec.ranges[place][worker]
                part = received.all[offset : offset + count]
                offset += count
                whole = self._whole(place).movedim(spec.axes[place], 0)
                whole[first:last].copy_(part.view(last - first, *whole.shape[1:]))
        return [self._whole(place) for place in places]

    def _lies_as_it_comes(self, place: int) -> bool:
        spec = self.spec
        usual = torch.empty(spec.shapes[place], device="meta").stride()
        return spec.strides[place] == usual and _in_order(spec.ranges[place], spec.axes[place])

    def _whole(self, place: int) -> torch.Tensor:
        if place not in self._wholes:
            spec = self.spec
            self._wholes[place] = torch.empty_strided(
                spec.shapes[place],
                spec.strides[place],
                dtype=spec.dtypes[place],
                device=self.world.device,
            )
        return self._wholes[place]


class ValuePull:
    """The runtime of one :class:`PullSpec`: owners send new values to all, (N-1)b/N each."""

    def __init__(self, spec: PullSpec, world: World) -> None:
        self.spec = spec
        self.world = world
        self._buffers: dict[torch.dtype, _Everyones] = {}
        """By type, of what goes together."""

    def run(self, values: Sequence[torch.Tensor]) -> None:
        """See :func:`parallax.ops.resources.pull_values`."""
        spec = self.spec
        alone = dict.fromkeys(i for i, value in enumerate(values) if self._goes_alone(i, value))
        pending = [self._send_alone(values[index], spec.owners[index]) for index in alone]
        together: dict[torch.dtype, list[int]] = {}
        for index, dtype in enumerate(spec.dtypes):
            if index not in alone:
                together.setdefault(dtype, []).append(index)
        for dtype, own in together.items():
            rows_first = [values[i].detach().movedim(spec.axes[i], 0) for i in own]
            self._run(dtype, rows_first, [spec.owners[i] for i in own])
        for one in pending:
            one.wait()

    def _goes_alone(self, index: int, value: torch.Tensor) -> bool:
        large = value.numel() * value.element_size() >= ALONE_BYTES
        in_order = _in_order(self.spec.owners[index], self.spec.axes[index])
        return self.spec.ring is not None and large and in_order and value.is_contiguous()

    def _send_alone(self, value: torch.Tensor, ranges: Ranges) -> Later:
        """Nothing is copied: each part arrives where it belongs."""
        assert self.spec.ring is not None
        width = math.prod(value.shape[1:])
        parts = [(first * width, last * width) for first, last in ranges]
        return gather_by(self.world, value.detach().view(-1), parts, self.spec.ring, "dense: pull")

    def _run(self, dtype: torch.dtype, values: list[torch.Tensor], owners: list[Ranges]) -> None:
        size, rank = self.world.size, self.world.rank
        sizes = [
            [
                (ranges[w][1] - ranges[w][0]) * math.prod(value.shape[1:])
                for value, ranges in zip(values, owners, strict=True)
            ]
            for w in range(size)
        ]
        own = [v[slice(*r[rank])].reshape(-1) for v, r in zip(values, owners, strict=True)]
        if dtype not in self._buffers:
            self._buffers[dtype] = _Everyones(self.world, [sum(row) for row in sizes], values[0])
        received = self._buffers[dtype]
        received.send(own, self.spec.ring, "dense: pull", "rows").wait()
        pieces = iter(received.all.split([count for row in sizes for count in row]))
        for worker in range(size):
            for value, ranges in zip(values, owners, strict=True):
                part = next(pieces)
                first, last = ranges[worker]
                if worker != rank and last > first:
                    value[first:last].copy_(part.view(last - first, *value.shape[1:]))
