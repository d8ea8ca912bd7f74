"""Buckets of gradients that are encoded in blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from parallax.ops.resources import BucketEntry
from parallax.runtime.comm import World
from parallax.runtime.control import FLOATS, StepControl
from parallax.runtime.encoded import PURPOSE, EncodedBucket, keep
from parallax.strategy.encoders import BlockEncoder

# Blocks are encoded so many elements at a time, which stay in a processor's cache meanwhile.
CHUNK = 1 << 16
ALIGNMENT = 8


@dataclass
class _Message:
    """What one worker receives of one other, or of itself: plain numbers, then encoded blocks.

    Args:
        plain: numbers that are not encoded.
        blocks: encoded blocks.
        parts: of the blocks, with their dtypes and elements for each.
        dtype: of the plain numbers.
    """

    plain: int
    blocks: int
    parts: tuple[tuple[torch.dtype, int], ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        count = self.plain * self.dtype.itemsize
        count += self.blocks * sum(dtype.itemsize * n for dtype, n in self.parts)
        return count + -count % ALIGNMENT

    def views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The plain numbers and the fields of the blocks in a buffer of that many bytes."""
        end = self.plain * self.dtype.itemsize
        plain = buffer[:end].view(self.dtype)
        fields: dict[int, torch.Tensor] = {}
        # The largest first: each begins at a multiple of its elements' size.
        order = sorted(range(len(self.parts)), key=lambda part: -self.parts[part][0].itemsize)
        for part in order:
            dtype, count = self.parts[part]
            size = self.blocks * count * dtype.itemsize
            fields[part] = buffer[end : end + size].view(dtype).view(self.blocks, count)
            end += size
        return plain, [fields[part] for part in range(len(self.parts))]


class BlockBucket(EncodedBucket):
    """A bucket whose sums are made of decoded blocks, each by one worker.

    Each worker is sent its share of the blocks by all (all-to-all), decodes and adds them in the
    order of workers, and sends the sum, encoded again, to all. With e encoded bytes N workers send
    2 (N-1)/N e each. Both encodings keep a residual: of its gradients each worker, of the sums the
    one that made them (double error feedback, as in 1-bit SGD). All workers decode the same bytes.
    """

    def __init__(
        self,
        entries: Sequence[BucketEntry],
        encoder: BlockEncoder,
        world: World,
        control: StepControl,
    ) -> None:
        self.encoder = encoder
        super().__init__(entries, encoder, world, control)
        size, rank, block = world.size, world.rank, encoder.block
        blocks, plain = len(self.values) // block, len(self.plain)
        self._blocks = [blocks * worker // size for worker in range(size + 1)]
        self._plain = [plain * worker // size for worker in range(size + 1)]
        shares = [
            (self._plain[w + 1] - self._plain[w], self._blocks[w + 1] - self._blocks[w])
            for w in range(size)
        ]
        sent = [_Message(FLOATS + p, b, encoder.fields, self.dtype) for p, b in shares]
        summed = [_Message(p, b, encoder.fields, self.dtype) for p, b in shares]
        self._sent_sizes = [message.size for message in sent]
        self._summed_sizes = [message.size for message in summed]
        own, own_sum = sent[rank].size, summed[rank].size
        self._sent, self._sent_parts = self._buffers(sent)
        self._received, self._received_parts = self._buffers([sent[rank]] * size)
        self._sums = self._zeros(own_sum * size, torch.uint8)
        self._sum_parts = summed[rank].views(self._sums[:own_sum])
        self._gathered, self._gathered_parts = self._buffers(summed)
        self._own = own
        count = shares[rank][1] * block
        self._total = self._zeros(count)
        self.total_residual = self._zeros(count if encoder.feedback else 0)
        self._scratch = self._zeros(min(max(CHUNK, block), len(self.values)))

    def _buffers(
        self, messages: Sequence[_Message]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, list[torch.Tensor]]]]:
        """A buffer for messages one after the other, and the views of each."""
        buffer = self._zeros(sum(message.size for message in messages), torch.uint8)
        parts = buffer.split([message.size for message in messages])
        return buffer, [m.views(part) for m, part in zip(messages, parts, strict=True)]

    def _takes(self, entry: BucketEntry) -> bool:
        return self.encoder.takes(math.prod(entry.shape))

    def _room(self, count: int) -> int:
        return self.encoder.blocks(count) * self.encoder.block

    # -- A step -----------------------------------------------------------------------------

    def _start(self) -> None:
        for worker, (plain, fields) in enumerate(self._sent_parts):
            self.control.floats(plain[:FLOATS])
            plain[FLOATS:].copy_(self.plain[self._plain[worker] : self._plain[worker + 1]])
            self._encode(self._share(self.values, worker), fields)
        self.pending = self.world.all_to_all(
            self._received,
            self._sent,
            [self._own] * self.world.size,
            self._sent_sizes,
            PURPOSE,
            "dense",
        )

    def forward(self) -> None:
        """See :meth:`EncodedBucket.forward`."""
        self._wait()
        total, size = self._total, self.world.size
        if len(self.total_residual):
            total.copy_(self.total_residual)
        else:
            total.zero_()
        for _, fields in self._received_parts:
            self._decode(fields, total, torch.add)
        plain, fields = self._sum_parts
        torch.sum(torch.stack([p[FLOATS:] for p, _ in self._received_parts]), 0, out=plain)
        self._encode(total, fields)
        own = len(self._sums) // size
        self._sums.view(size, own)[1:].copy_(self._sums[:own])
        self.pending = self.world.all_to_all(
            self._gathered, self._sums, self._summed_sizes, [own] * size, PURPOSE, "dense"
        )

    def words(self) -> torch.Tensor:
        """See :meth:`EncodedBucket.words`."""
        return torch.stack([plain[:FLOATS] for plain, _ in self._received_parts]).sum(0)

    def finish(self) -> None:
        """See :meth:`EncodedBucket.finish`."""
        if len(self.residual):  # while the sums travel
            for worker, (_, fields) in enumerate(self._sent_parts):
                self._decode(fields, self._share(self.values, worker), torch.sub)
            self._decode(self._sum_parts[1], self._total, torch.sub)
        self._wait()
        encoded = self.result[: len(self.values)]
        others = self.result[len(self.values) :]
        for worker, (plain, fields) in enumerate(self._gathered_parts):
            others[self._plain[worker] : self._plain[worker + 1]].copy_(plain)
            self._decode(fields, self._share(encoded, worker))

    def commit(self) -> None:
        """See :meth:`EncodedBucket.commit`."""
        if len(self.residual):
            self.values, self.residual = keep(self.values, self.residual)
            self._total, self.total_residual = keep(self._total, self.total_residual)

    # -- What is kept -----------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """See :meth:`EncodedBucket.state`; ``sums`` are the residuals of the sums."""
        state = super().state()
        if not state:
            return state
        size, block = self.world.size, self.encoder.block
        counts = [(b - a) * block for a, b in pairwise(self._blocks)]
        whole = torch.empty_like(self.residual)
        own = [len(self.total_residual)] * size
        self.world.all_to_all(whole, self.total_residual.repeat(size), counts, own, "state").wait()
        for entry, part in self._parts(whole):
            state[entry.name]["sums"] = part.view(entry.shape).clone()
        return state

    def take(self, name: str, given: Mapping[str, torch.Tensor]) -> None:
        """See :meth:`EncodedBucket.take`."""
        super().take(name, given)
        if len(self.residual) and "sums" in given:
            whole = torch.zeros_like(self.residual)
            (part,) = (part for entry, part in self._parts(whole) if entry.name == name)
            part.copy_(given["sums"].reshape(-1))
            # It is zero outside of this gradient, where the share has other gradients.
            self.total_residual.add_(self._share(whole, self.world.rank))

    def forget(self) -> None:
        """See :meth:`EncodedBucket.forget`."""
        super().forget()
        self.total_residual.zero_()

    # -- Parts ------------------------------------------------------------------------------

    def _share(self, values: torch.Tensor, worker: int) -> torch.Tensor:
        """The part of all blocks that a worker sums."""
        first, last = self._blocks[worker : worker + 2]
        return values[first * self.encoder.block : last * self.encoder.block]

    def _chunks(
        self, values: torch.Tensor, fields: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        rows = values.view(-1, self.encoder.block)
        step = max(CHUNK // self.encoder.block, 1)
        return [
            (rows[first : first + step], [part[first : first + step] for part in fields])
            for first in range(0, len(rows), step)
        ]

    def _encode(self, values: torch.Tensor, fields: Sequence[torch.Tensor]) -> None:
        for rows, parts in self._chunks(values, fields):
            self.encoder.encode(rows, parts)

    def _decode(
        self, fields: Sequence[torch.Tensor], values: torch.Tensor, combine: Any = None
    ) -> None:
        """Decode to ``values``, or let ``combine`` put them together with what is there."""
        for rows, parts in self._chunks(values, fields):
            if combine is None:
                self.encoder.decode(parts, rows)
                continue
            decoded = self._scratch[: rows.numel()].view(rows.shape)
            self.encoder.decode(parts, decoded)
            combine(rows, decoded, out=rows)
