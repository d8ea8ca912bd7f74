"""Buckets of gradients that are encoded in blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from parallax.ops.specs import BucketEntry
from parallax.runtime.comm.control import FLOATS, StepControl
from parallax.runtime.comm.world import World
from parallax.runtime.encoded.block_sums import BlockSum, cut
from parallax.runtime.encoded.bucket import LATER, PURPOSE, EncodedBucket
from parallax.strategy.encoders import BlockEncoder


class BlockBucket(EncodedBucket):
    """A bucket that is summed block by block, by all workers alike."""

    messages = 2
    groups = ("dense", LATER)
    """Of the workers that sum a part of the bucket: for gradients, and for sums."""

    def __init__(
        self,
        entries: Sequence[BucketEntry],
        encoder: BlockEncoder,
        world: World,
        control: StepControl,
    ) -> None:
        self.encoder = encoder
        super().__init__(entries, encoder, world, control)
        ways = 1 + max(part for _, part in self._places_of_workers())
        self.blocks = cut(self.size // encoder.block, ways)
        self.numbers = cut(len(self.plain), ways)
        """Bounds of the parts: of all blocks, and of the numbers that are not encoded."""
        _, part = self._places_of_workers()[world.rank]
        blocks, numbers = (b[part + 1] - b[part] for b in (self.blocks, self.numbers))
        self.sum = BlockSum(encoder, blocks, numbers, FLOATS, self.dtype, world, *self.groups)
        self.values = self.sum.values
        self._unused = self._room_left(self._part(part))
        self._unused_share = self._room_left(self._share(self.sum.place, part))
        """Elements of no gradient, among those of this worker's part and of its share."""

    def _places_of_workers(self) -> list[tuple[int, int]]:
        """By worker, its number among those that sum the same part, and the number of the part."""
        return [(worker, 0) for worker in range(self.world.size)]

    def _takes(self, entry: BucketEntry) -> bool:
        return self.encoder.takes(math.prod(entry.shape))

    def _room(self, count: int) -> int:
        return self.encoder.blocks(count) * self.encoder.block

    def _room_left(self, span: slice) -> list[slice]:
        """Elements of no gradient, by their place in a part of the bucket."""
        found = []
        for entry, values in self.parts(torch.empty(self.size, device="meta")):
            first = values.storage_offset() + len(values)
            last = values.storage_offset() + self._room(math.prod(entry.shape))
            first, last = max(first, span.start), min(last, span.stop)
            if first < last:
                found.append(slice(first - span.start, last - span.start))
        return found

    # -- A step -----------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        if number:
            self.pending = self.sum.forward()
            return
        words = self.zeros(FLOATS)
        self.control.floats(words)
        self.pending = self.sum.send(self.plain, words, self.unit)

    def words(self) -> torch.Tensor:
        """See :meth:`EncodedBucket.words`."""
        return self.sum.words()

    def finish(self) -> None:
        """See :meth:`EncodedBucket.finish`."""
        self.sum.subtract()
        self._wait()
        self.sum.receive(self.result[: self.size], self.result[self.size :])

    def commit(self) -> None:
        """See :meth:`EncodedBucket.commit`."""
        self.sum.commit()
        self.values = self.sum.values
        self._clear()

    def _clear(self) -> None:
        """What is of no gradient is always sent as zero."""
        for residual, unused in (
            (self.sum.residual, self._unused),
            (self.sum.total_residual, self._unused_share),
        ):
            for span in unused if self.feedback else ():
                residual[span].zero_()

    # -- What is kept -----------------------------------------------------------------------

    def _part(self, part: int) -> slice:
        """Where a part of the bucket is among all its encoded elements."""
        first, last = (bound * self.encoder.block for bound in self.blocks[part : part + 2])
        return slice(first, last)

    def _share(self, among: int, part: int) -> slice:
        """Where the share of a part is that one worker sums."""
        shares = cut(self.blocks[part + 1] - self.blocks[part], self.sum.workers)
        first, last = (
            (self.blocks[part] + bound) * self.encoder.block for bound in shares[among : among + 2]
        )
        return slice(first, last)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """See :meth:`EncodedBucket.state`; ``sums`` are the residuals of the sums."""
        if not self.feedback:
            return {}
        places = self._places_of_workers()
        residuals = self.zeros(self.sum.workers * self.size).view(self.sum.workers, self.size)
        parts = [self._part(part) for _, part in places]
        gathered = self._gather(self.sum.residual, [span.stop - span.start for span in parts])
        for (among, _), span, own in zip(places, parts, gathered, strict=True):
            residuals[among, span] = own
        sums = self.zeros(self.size)
        shares = [self._share(*place) for place in places]
        gathered = self._gather(self.sum.total_residual, [s.stop - s.start for s in shares])
        for span, own in zip(shares, gathered, strict=True):
            sums[span] = own
        return {
            entry.name: {
                "residuals": part.reshape(len(part), *entry.shape).clone(),
                "sums": own.view(entry.shape).clone(),
            }
            for (entry, part), (_, own) in zip(self.parts(residuals), self.parts(sums), strict=True)
        }

    def _gather(self, own: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """All workers' tensors, of these lengths."""
        received = self.zeros(sum(counts))
        sent = own.repeat(self.world.size)
        even = [len(own)] * self.world.size
        self.world.all_to_all(received, sent, counts, even, "state").wait()
        parts: tuple[torch.Tensor, ...] = received.split(list(counts))
        return parts

    def take(self, name: str, given: Mapping[str, torch.Tensor]) -> None:
        """See :meth:`EncodedBucket.take`."""
        if not self.feedback:
            return
        among, part = self._places_of_workers()[self.world.rank]
        if "residuals" in given:
            own = given["residuals"][among :: self.sum.workers].sum(0)
            self.sum.residual.add_(self.spread(name, own)[self._part(part)])
        if "sums" in given:
            whole = self.spread(name, given["sums"])
            self.sum.total_residual.add_(whole[self._share(among, part)])

    def forget(self) -> None:
        """See :meth:`EncodedBucket.forget`."""
        self.sum.forget()


class HostBucket(BlockBucket):
    """A bucket that is summed inside each host first, and encoded between hosts only.

    Each worker sums one part of the bucket over its host, as it is, then over the workers with the
    same place on all hosts, encoded; then the host's workers give each other their parts. With b
    bytes, e when encoded, H hosts and k workers on each, a worker sends 2 (k-1)/k b inside its host
    and 2 (H-1)/H e/k to others. Residuals are those of a host's sums.
    """

    messages = 4
    groups = ("rail dense", "rail dense")
    early = False

    def __init__(
        self,
        entries: Sequence[BucketEntry],
        encoder: BlockEncoder,
        world: World,
        control: StepControl,
    ) -> None:
        super().__init__(entries, encoder, world, control)
        self.values = self.zeros(self.size)
        ways, place = len(world.group("host").ranks), world.group("host").place
        spans = [self._part(part) for part in range(ways)]
        numbers = [slice(*self.numbers[part : part + 2]) for part in range(ways)]
        sizes = [s.stop - s.start + n.stop - n.start for s, n in zip(spans, numbers, strict=True)]
        self._spans = list(zip(spans, numbers, strict=True))
        self._inside = [size + FLOATS for size in sizes]
        self._sent = self.zeros(sum(self._inside))
        self._received = self.zeros(self._inside[place] * ways)
        self._own = self.zeros(sizes[place] * ways)
        self._gathered = self.zeros(sum(sizes))
        self._sizes = sizes

    def _places_of_workers(self) -> list[tuple[int, int]]:
        found = {
            worker: (host, place)
            for host, workers in enumerate(self.world.members)
            for place, worker in enumerate(workers)
        }
        return [found[worker] for worker in range(self.world.size)]

    # -- A step -----------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        if number == 0:
            self._scatter()
        elif number == 1:
            numbers, words = self._reduced()
            self.pending = self.sum.send(numbers, words, self.unit)
        elif number == 2:
            self.pending = self.sum.forward()
        else:
            self._collect()

    def _scatter(self) -> None:
        """Give each worker of this host its part: words, numbers, values."""
        for (span, numbers), out in zip(self._spans, self._sent.split(self._inside), strict=True):
            rest = FLOATS + numbers.stop - numbers.start
            self.control.floats(out[:FLOATS])
            out[FLOATS:rest].copy_(self.plain[numbers])
            out[rest:].copy_(self.values[span])
        ways = len(self._spans)
        own = [len(self._received) // ways] * ways
        self.pending = self.world.all_to_all(
            self._received, self._sent, own, self._inside, PURPOSE, "host dense"
        )

    def _reduced(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum this worker's part over its host; its numbers, and the words."""
        summed = self._received.view(len(self._spans), -1).sum(0)
        rest = len(summed) - len(self.sum.values)
        self.sum.values.copy_(summed[rest:])
        return summed[FLOATS:rest], summed[:FLOATS]

    def _collect(self) -> None:
        """Give this worker's part of the sums to its host."""
        ways = len(self._spans)
        own = self._own[: len(self._own) // ways]
        size = len(self.sum.values)
        self.sum.receive(own[:size], own[size:])
        self._own.view(ways, -1)[1:].copy_(own)
        self.pending = self.world.all_to_all(
            self._gathered, self._own, self._sizes, [len(own)] * ways, PURPOSE, "host dense"
        )

    def finish(self) -> None:
        """See :meth:`EncodedBucket.finish`."""
        self.sum.subtract()
        self._wait()
        values, plain = self.result[: self.size], self.result[self.size :]
        for (span, numbers), part in zip(
            self._spans, self._gathered.split(self._sizes), strict=True
        ):
            size = span.stop - span.start
            values[span].copy_(part[:size])
            plain[numbers].copy_(part[size:])

    def commit(self) -> None:
        """See :meth:`EncodedBucket.commit`."""
        self.sum.commit()
        self._clear()
