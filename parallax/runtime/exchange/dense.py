"""Dense gradients in buckets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from parallax.errors import UnsupportedError
from parallax.ops.specs import BucketEntry, BucketsSpec
from parallax.runtime.comm.background import Later
from parallax.runtime.comm.control import FLOATS, StepControl
from parallax.runtime.comm.host_sums import HostArea, HostSum
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World
from parallax.runtime.encoded.bucket import EncodedBucket
from parallax.runtime.encoded.pool import EncodedBuckets
from parallax.runtime.exchange.sums import scatter_by, sum_by


class _Bucket:
    """A flat buffer that travels at once: for several gradients, or for a piece of one."""

    def __init__(self, entry: BucketEntry, has_words: bool = True) -> None:
        """
        Args:
            entry: one of its gradients.
            has_words: whether the control words follow them.
        """
        # Half types are summed in float32's precision.
        self.dtype = torch.float32 if entry.dtype.itemsize < 4 else entry.dtype
        self.average = entry.average
        self.by_host = entry.by_host
        self.reduction = entry.reduction
        self.order = entry.order
        self.has_words = has_words
        self.entries: list[int] = []
        self.filled = 0
        self.turn = 0
        """When it starts among the phase's messages, where they take turns."""
        self.pending: Pending | Later | None = None
        self.sum: HostSum | None = None
        """How the workers of this host sum it, if they share memory."""
        self.segments: list[int] = []
        self.parts: list[tuple[int, int]] = []
        """Where the segments are, if they go round a ring to their owners."""
        self.buffer = torch.empty(0)
        self.received = torch.empty(0)
        self.result = torch.empty(0)
        self.part = torch.empty(0)

    @property
    def is_full(self) -> bool:
        """Whether all its gradients are there, and it has not been started."""
        return self.filled == len(self.entries)


Places = list[tuple[int, int, int]]
"""Where a gradient is in its bucket, its first element there, and how many; by worker, if owned."""


class Buckets:
    """The runtime of one :class:`BucketsSpec`: AllReduce, or a push to the owners.

    Bytes sent per worker and step for b bytes of gradients on N workers: 2(N-1)b/N with AllReduce;
    (N-1)b/N on average to owners (the pull back of new values costs as much again).
    Gradients are summed in the dtype of the parameter, and at least in float32's precision for
    half types. Nothing is handed on before every bucket arrived and all workers agree.
    """

    def __init__(
        self,
        spec: BucketsSpec,
        world: World,
        control: StepControl,
        encoded: EncodedBuckets,
        position: int = 0,
    ) -> None:
        """
        Args:
            spec: the gradients.
            world, control: the workers, and the words that travel along.
            encoded: makes the buckets of gradients that are encoded.
            position: of the spec among those of its graph.
        """
        self.spec = spec
        self._position = position
        self.world = world
        self.control = control
        self._buckets: list[_Bucket] = []
        self._encoded: list[EncodedBucket] = []
        self._full: list[EncodedBucket] = []
        """Encoded buckets under way, in the order in which they started."""
        self._encoded_places: dict[int, tuple[EncodedBucket, int]] = {}
        """By gradient that is in one, the encoded bucket and its number there."""
        self._places: list[list[tuple[_Bucket, Places]]] = []
        """By gradient, where its pieces are."""
        self._storages: dict[int, torch.Tensor] = {}
        """Of gradients in pieces, the memory that these share."""
        self._areas: dict[int, HostArea] = {}
        """Of gradients in pieces that the host's workers sum, the same."""
        self._own: dict[int, torch.Tensor] = {}
        """By gradient, a sum that nobody else reads."""
        self._lay_out_encoded(encoded)
        self._lay_out()

    # -- Layout -----------------------------------------------------------------------------

    def _lay_out_encoded(self, encoded: EncodedBuckets) -> None:
        by_number: dict[int, dict[str, int]] = {}
        for index, entry in enumerate(self.spec.entries):
            if entry.encoder != "none":
                by_number.setdefault(entry.bucket, {})[entry.name] = index
        for indices in by_number.values():
            bucket = encoded.get(
                self.spec.phase, [self.spec.entries[index] for index in indices.values()]
            )
            self._encoded.append(bucket)
            for number, entry in enumerate(bucket.entries):
                self._encoded_places[indices[entry.name]] = (bucket, number)

    def _lay_out(self) -> None:
        by_number: dict[int, _Bucket] = {}
        for index, entry in enumerate(self.spec.entries):
            if index in self._encoded_places:
                self._places.append([])
                continue
            if entry.pieces > 1:
                self._lay_out_pieces(index, entry)
                continue
            bucket = by_number.get(entry.bucket)
            if bucket is None:
                bucket = by_number[entry.bucket] = _Bucket(entry)
                bucket.turn = self._turn(entry)
                self._buckets.append(bucket)
            bucket.entries.append(index)
            self._places.append([(bucket, [])])
        for bucket in by_number.values():
            if self.spec.owners:
                self._lay_out_for_owners(bucket)
            else:
                self._lay_out_whole(bucket)

    def _turn(self, entry: BucketEntry) -> int:
        return self.spec.turns[entry.bucket] if self.spec.turns else 0

    def _lay_out_pieces(self, index: int, entry: BucketEntry) -> None:
        """Pieces follow one another in memory, so that the gradient is whole when all arrived."""
        width = math.prod(entry.rows_first[1:])
        buckets = [_Bucket(entry, piece == entry.pieces - 1) for piece in range(entry.pieces)]
        size, dtype = entry.rows_first[0] * width + FLOATS, buckets[0].dtype
        area = self._area(buckets[0], size)
        if area is None:
            storage = torch.zeros(size, dtype=dtype, device=self.world.device)
            self._storages[index] = storage
        else:
            storage = area.own
            self._areas[index] = area
        for piece, bucket in enumerate(buckets):
            bucket.turn = self._turn(entry) + piece
            first, last = (row * width for row in entry.rows(piece))
            last += FLOATS * bucket.has_words
            bucket.entries.append(index)
            bucket.buffer = storage[first:last]
            bucket.segments = [len(bucket.buffer)]
            if area is not None:
                bucket.sum = HostSum(area, piece, first, last, crosses=bucket.by_host)
        self._places.append(
            [
                (bucket, [(0, 0, len(bucket.buffer) - FLOATS * bucket.has_words)])
                for bucket in buckets
            ]
        )
        self._buckets += buckets

    def _area(self, bucket: _Bucket, elements: int) -> HostArea | None:
        """Memory for a bucket that the host's workers can sum in what they share."""
        sums = self.world.host_sums
        if sums is None or bucket.reduction != "auto":
            return None
        if not bucket.by_host and sums.links.size < self.world.size:
            return None
        # Not by the order in which they are made: workers may have made others before.
        name = f"{self._position} {self.spec} {bucket.entries}"
        return HostArea(sums.links, name, elements, bucket.dtype)

    def _lay_out_whole(self, bucket: _Bucket) -> None:
        offset = 0
        for index in bucket.entries:
            count = math.prod(self.spec.entries[index].shape)
            self._places[index][0][1].append((offset, 0, count))
            offset += count
        size = offset + FLOATS
        parts = len(self.world.group("host").ranks) if bucket.by_host else 1
        size += -size % parts
        bucket.segments = [size]
        area = self._area(bucket, size)
        if area is not None:
            bucket.sum = HostSum(area, 0, 0, size, crosses=bucket.by_host)
            bucket.buffer = bucket.sum.buffer
            return
        bucket.buffer = torch.zeros(size, dtype=bucket.dtype, device=self.world.device)
        if bucket.reduction == "broadcast":
            bucket.received = torch.zeros(
                size * self.world.size, dtype=bucket.dtype, device=self.world.device
            )
        if bucket.by_host:
            bucket.received = torch.zeros_like(bucket.buffer)
            bucket.part = torch.zeros_like(bucket.buffer[: size // parts])

    def _lay_out_for_owners(self, bucket: _Bucket) -> None:
        offset, segments = 0, []
        for worker in range(self.world.size):
            start = offset
            for index in bucket.entries:
                entry = self.spec.entries[index]
                first, last = self.spec.owners[index][worker]
                width = math.prod(entry.rows_first[1:])
                count = (last - first) * width
                self._places[index][0][1].append((offset, first * width, count))
                offset += count
            offset += FLOATS
            segments.append(offset - start)
        bucket.segments = segments
        bucket.buffer = torch.zeros(offset, dtype=bucket.dtype, device=self.world.device)
        if bucket.reduction == "ring":
            bucket.parts = list(itertools.pairwise(itertools.accumulate(segments, initial=0)))
            return
        own = segments[self.world.rank]
        bucket.received = torch.zeros(
            own * self.world.size, dtype=bucket.dtype, device=self.world.device
        )

    # -- A step -------------------------------------------------------------------------------

    def put(self, index: int, gradient: torch.Tensor, piece: int = 0) -> None:
        """See :func:`parallax.ops.resources.put_gradient`."""
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"The gradient of {self.spec.entries[index].name!r} mixes sparse and dense parts.",
                hint="use sparse=False for this embedding.",
            )
        self._advance_early()
        axis = self.spec.entries[index].axis
        moved = gradient.movedim(axis, 0) if axis else gradient
        if index in self._encoded_places:
            flat = moved.reshape(-1)
            encoded, number = self._encoded_places[index]
            if encoded.put(number, flat):
                turn = self._turn(self.spec.entries[index])
                self._start_in_turn(turn, lambda: self._start_encoded(encoded))
            return
        bucket, places = self._places[index][piece]
        if bucket.filled == 0 and bucket.has_words:
            self._control_words(bucket)
        if len(places) == 1 and places[0][2] == gradient.numel():
            offset, _, count = places[0]
            # In one pass, also where it does not lie in order.
            out = bucket.buffer[offset : offset + count].view(moved.shape)
            self.control.put(moved, out, bucket.average)
        else:
            flat = moved.reshape(-1)
            for offset, start, count in places:
                out = bucket.buffer[offset : offset + count]
                self.control.put(flat[start : start + count], out, bucket.average)
        bucket.filled += 1
        if bucket.is_full:
            self._start_in_turn(bucket.turn, lambda: self._start(bucket))

    def _start_in_turn(self, turn: int, start: Callable[[], None]) -> None:
        """Start a message that is full: at once, or when those before it have started."""
        if self.spec.turns:
            self.control.turns.take(self.spec.phase, turn, start)
        else:
            start()

    def _start_encoded(self, encoded: EncodedBucket) -> None:
        encoded.start()
        self._full.append(encoded)

    def _advance_early(self) -> None:
        """Go on with encoded buckets that need not be waited for, one after the other."""
        for encoded in self._full:
            if not encoded.advance_early():
                return

    def _control_words(self, bucket: _Bucket) -> None:
        """Write them to the end of every segment."""
        end = 0
        for segment in bucket.segments:
            end += segment
            self.control.floats(bucket.buffer[end - FLOATS : end])

    def _start(self, bucket: _Bucket) -> None:
        bucket.filled = 0
        if bucket.sum is not None:
            assert self.world.host_sums is not None
            self.world.host_sums.start(bucket.sum)
            return
        if bucket.by_host:
            self._start_by_host(bucket)
            return
        if not self.spec.owners:
            bucket.pending = self._sum(bucket)
            return
        if bucket.parts:
            bucket.pending = scatter_by(
                self.world, bucket.buffer, bucket.parts, bucket.order, "dense: push"
            )
            return
        own = bucket.segments[self.world.rank]
        bucket.pending = self.world.all_to_all(
            bucket.received,
            bucket.buffer,
            [own] * self.world.size,
            bucket.segments,
            "dense: push",
            "dense",
            most=max(bucket.segments) * (self.world.size - 1) * bucket.buffer.element_size(),
        )

    def _sum(self, bucket: _Bucket) -> Pending | Later:
        """Start to sum a bucket on all workers."""
        world, buffer = self.world, bucket.buffer
        if bucket.reduction == "auto":
            return world.all_reduce(buffer, "dense: sum")
        if bucket.reduction == "broadcast":
            return world.all_gather(bucket.received, buffer, "dense: broadcast", "dense")
        return sum_by(world, buffer, bucket.reduction, bucket.order, "dense: sum")

    def _start_by_host(self, bucket: _Bucket) -> None:
        """Every worker of a host sums its part of the bucket, and then with its rail."""
        parts = len(self.world.group("host").ranks)
        even = [len(bucket.buffer) // parts] * parts
        self.world.all_to_all(
            bucket.received, bucket.buffer, even, even, "dense: sum", "host dense"
        ).wait()
        torch.sum(bucket.received.view(parts, -1), 0, out=bucket.part)
        bucket.pending = self.world.all_reduce(bucket.part, "dense: sum", "rail dense")

    def _finish_by_host(self, bucket: _Bucket) -> None:
        """Bring the parts together inside the host."""
        parts = len(self.world.group("host").ranks)
        even = [len(bucket.part)] * parts
        bucket.received.view(parts, -1).copy_(bucket.part)
        self.world.all_to_all(
            bucket.buffer, bucket.received, even, even, "dense: sum", "host dense"
        ).wait()

    def wait(
        self, changed: Sequence[int] = (), late: Sequence[int] = ()
    ) -> list[torch.Tensor | None]:
        """See :func:`parallax.ops.resources.wait_gradients`."""
        left = {id(bucket) for bucket in self._of(late)}
        buckets = [bucket for bucket in self._buckets if id(bucket) not in left]
        self._arrive(buckets)
        # In the order in which they started, as early ones.
        for message in range(1, max((e.messages for e in self._full), default=1)):
            for encoded in self._full:
                encoded.advance(message)
        self._full.clear()
        for encoded in self._encoded:
            encoded.finish()
        words = [bucket.result[-FLOATS:] for bucket in buckets if bucket.has_words]
        for sums in (*words, *(encoded.words() for encoded in self._encoded)):
            self.control.check_floats(sums)
        for encoded in self._encoded:
            encoded.commit()
        correction = self.control.correction
        self._correct([*buckets, *self._encoded], correction)
        return [
            None if index in late else self._gradient(index, index in changed, correction)
            for index in range(len(self.spec.entries))
        ]

    def wait_late(self, entries: Sequence[int], changed: Sequence[int]) -> list[torch.Tensor]:
        """See :func:`parallax.ops.resources.wait_late`."""
        buckets = self._of(entries)
        self._arrive(buckets)
        # The control words are those of the present step: these sums are of the one before.
        totals = [
            self.control.agreed(bucket.result[-FLOATS:]) for bucket in buckets if bucket.has_words
        ]
        correction = self.control.correction_for(totals[0])
        self._correct(buckets, correction)
        return [self._gradient(index, index in changed, correction) for index in entries]

    def _of(self, entries: Sequence[int]) -> list[_Bucket]:
        """The buckets that gradients are in."""
        found = {id(bucket): bucket for index in entries for bucket, _ in self._places[index]}
        return list(found.values())

    def _arrive(self, buckets: Sequence[_Bucket]) -> None:
        """Wait for the sums of buckets."""
        if self.world.host_sums is not None:
            self.world.host_sums.wait([b.sum for b in buckets if b.sum is not None])
        for bucket in buckets:
            if bucket.sum is not None:
                continue
            assert bucket.pending is not None
            bucket.pending.wait()
            bucket.pending = None
            if bucket.by_host:
                self._finish_by_host(bucket)
        for bucket in buckets:
            if bucket.parts:
                bucket.result = bucket.buffer[slice(*bucket.parts[self.world.rank])]
            elif self.spec.owners:
                own = bucket.segments[self.world.rank]
                bucket.result = bucket.received.view(self.world.size, own).sum(0)
            elif bucket.reduction == "broadcast":
                torch.sum(bucket.received.view(self.world.size, -1), 0, out=bucket.buffer)
                bucket.result = bucket.buffer
            else:
                bucket.result = bucket.buffer if bucket.sum is None else bucket.sum.result

    @staticmethod
    def _correct(buckets: Sequence[_Bucket | EncodedBucket], correction: float) -> None:
        """Weigh means over uneven batches; what others read is weighed where it is handed on."""
        for bucket in buckets:
            others_read = isinstance(bucket, _Bucket) and bucket.sum is not None
            if bucket.average and correction != 1.0 and not others_read:
                bucket.result.mul_(correction)

    def _gradient(self, index: int, changed: bool, correction: float) -> torch.Tensor:
        entry = self.spec.entries[index]
        if index in self._encoded_places:
            encoded, number = self._encoded_places[index]
            return _as(encoded.gradient(number), entry.dtype)
        bucket, places = self._places[index][0]
        result = self._storages.get(index, bucket.result)
        if index in self._areas:
            result = self._areas[index].sums
        if self.spec.owners:
            first, last = self.spec.owners[index][self.world.rank]
            base = places[self.world.rank][0]
            base -= sum(bucket.segments[: self.world.rank])
            shape = (last - first, *entry.rows_first[1:])
        else:
            base, shape = places[0][0], entry.rows_first
        gradient = result[base : base + math.prod(shape)].view(shape)
        if bucket.sum is not None:
            gradient = self._for_us(index, gradient, changed, correction)
        return _as(gradient.movedim(0, entry.axis) if entry.axis else gradient, entry.dtype)

    def _for_us(
        self, index: int, gradient: torch.Tensor, changed: bool, correction: float
    ) -> torch.Tensor:
        """Of a sum that others read too: itself, or one of our own, if it is to change."""
        correction = correction if self.spec.entries[index].average else 1.0
        if correction == 1.0 and not changed:
            return gradient
        if index not in self._own:
            self._own[index] = torch.empty_like(gradient)
        return torch.mul(gradient, correction, out=self._own[index])


def _as(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return gradient if gradient.dtype is dtype else gradient.to(dtype)
