"""Sums of vectors that travel as encoded blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World
from parallax.runtime.encoded.bucket import PURPOSE, keep
from parallax.strategy.encoders import BlockEncoder

# Blocks are encoded so many elements at a time, which stay in a processor's cache meanwhile.
CHUNK = 1 << 16
ALIGNMENT = 8


def encode(encoder: BlockEncoder, values: torch.Tensor, fields: Sequence[torch.Tensor]) -> None:
    """Encode blocks, flat, a few at a time."""
    for rows, parts in _chunks(encoder, values, fields):
        encoder.encode(rows, parts)


def decode(
    encoder: BlockEncoder,
    fields: Sequence[torch.Tensor],
    values: torch.Tensor,
    combine: Callable[..., Any] | None = None,
    scratch: torch.Tensor | None = None,
) -> None:
    """Decode blocks to ``values``, flat, a few at a time.

    Args:
        encoder: that encoded them.
        fields: what it made of them.
        values: for the result.
        combine: puts together what is there with what was decoded; None to overwrite it.
        scratch: for what was decoded, then: :data:`CHUNK` elements, or a larger block's.
    """
    for rows, parts in _chunks(encoder, values, fields):
        if combine is None or scratch is None:
            encoder.decode(parts, rows)
            continue
        decoded = scratch[: rows.numel()].view(rows.shape)
        encoder.decode(parts, decoded)
        combine(rows, decoded, out=rows)


def _chunks(
    encoder: BlockEncoder, values: torch.Tensor, fields: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    rows = values.view(-1, encoder.block)
    step = max(CHUNK // encoder.block, 1)
    return [
        (rows[first : first + step], [part[first : first + step] for part in fields])
        for first in range(0, len(rows), step)
    ]


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


def cut(count: int, ways: int) -> list[int]:
    """Bounds of even parts."""
    return [count * part // ways for part in range(ways + 1)]


class BlockSum:
    """Sums a vector of blocks, and some plain numbers, over the workers of a group.

    Each worker is sent its share of the blocks by all (all-to-all), decodes and adds them in the
    order of workers, and sends the sum, encoded again, to all. With e encoded bytes n workers send
    2 (n-1)/n e each. Both encodings keep a residual: of its vector each worker, of the sums the one
    that made them (double error feedback, as in 1-bit SGD). All workers decode the same bytes.
    """

    def __init__(
        self,
        encoder: BlockEncoder,
        blocks: int,
        plain: int,
        words: int,
        dtype: torch.dtype,
        world: World,
        group: str,
        later: str,
    ) -> None:
        """
        Args:
            encoder: of the blocks.
            blocks: of the vector.
            plain: numbers that are not encoded, which are dealt out to be summed as well.
            words: numbers that all workers sum for themselves.
            dtype: of the numbers, and of sums.
            world, group, later: the workers, and their group for the sums.
        """
        self.encoder = encoder
        self.world = world
        self._dtype = dtype
        self._words = words
        self._groups = group, later
        among = world.group(group)
        self.workers, self.place = len(among.ranks), among.place
        self.bounds, self._plain = cut(blocks, self.workers), cut(plain, self.workers)
        shares = [
            (self._plain[w + 1] - self._plain[w], self.bounds[w + 1] - self.bounds[w])
            for w in range(self.workers)
        ]
        sent = [_Message(words + p, b, encoder.fields, dtype) for p, b in shares]
        summed = [_Message(p, b, encoder.fields, dtype) for p, b in shares]
        self._sent_sizes = [message.size for message in sent]
        self._summed_sizes = [message.size for message in summed]
        self._own, own_sum = self._sent_sizes[self.place], self._summed_sizes[self.place]
        self._sent, self._sent_parts = self._buffers(sent)
        self._received, self._received_parts = self._buffers([sent[self.place]] * self.workers)
        self._sums = self._zeros(own_sum * self.workers, torch.uint8)
        self._sum_parts = summed[self.place].views(self._sums[:own_sum])
        self._gathered, self._gathered_parts = self._buffers(summed)
        size, own = blocks * encoder.block, shares[self.place][1] * encoder.block
        feedback = encoder.feedback
        self.values = self._zeros(size)
        """The vector, to be filled for :meth:`send`."""
        self.residual = self._zeros(size if feedback else 0)
        self._total = self._zeros(own)
        self.total_residual = self._zeros(own if feedback else 0)
        self._unit = 1.0
        self._scratch = self._zeros(min(max(CHUNK, encoder.block), size))

    def _zeros(self, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype or self._dtype, device=self.world.device)

    def _buffers(
        self, messages: Sequence[_Message]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, list[torch.Tensor]]]]:
        """A buffer for messages one after the other, and the views of each."""
        buffer = self._zeros(sum(message.size for message in messages), torch.uint8)
        parts = buffer.split([message.size for message in messages])
        return buffer, [m.views(part) for m, part in zip(messages, parts, strict=True)]

    def send(self, plain: torch.Tensor, words: torch.Tensor, unit: float = 1.0) -> Pending:
        """Encode ``values`` with their residual times ``unit``, and send each worker its share."""
        self._unit = unit
        if self.encoder.feedback:
            self.values.add_(self.residual, alpha=unit)
        for worker, (numbers, fields) in enumerate(self._sent_parts):
            numbers[: self._words].copy_(words)
            own = plain[self._plain[worker] : self._plain[worker + 1]]
            numbers[self._words :].copy_(own)
            encode(self.encoder, self.share(self.values, worker), fields)
        received = [self._own] * self.workers
        return self.world.all_to_all(
            self._received, self._sent, received, self._sent_sizes, PURPOSE, self._groups[0]
        )

    def forward(self) -> Pending:
        """Sum the shares that have come, and send the sums to all."""
        total = self._total
        if self.encoder.feedback:
            torch.mul(self.total_residual, self._unit, out=total)
        else:
            total.zero_()
        for _, fields in self._received_parts:
            decode(self.encoder, fields, total, torch.add, self._scratch)
        plain, fields = self._sum_parts
        numbers = torch.stack([numbers for numbers, _ in self._received_parts])
        torch.sum(numbers[:, self._words :], 0, out=plain)
        encode(self.encoder, total, fields)
        own = self._summed_sizes[self.place]
        self._sums.view(self.workers, own)[1:].copy_(self._sums[:own])
        sent = [own] * self.workers
        return self.world.all_to_all(
            self._gathered, self._sums, self._summed_sizes, sent, PURPOSE, self._groups[1]
        )

    def words(self) -> torch.Tensor:
        """The sum of all workers' words, when their shares have come."""
        words = torch.stack([numbers[: self._words] for numbers, _ in self._received_parts])
        return words.sum(0)

    def subtract(self) -> None:
        """Find out what encoding lost, while the sums travel."""
        if not self.encoder.feedback:
            return
        for worker, (_, fields) in enumerate(self._sent_parts):
            share = self.share(self.values, worker)
            decode(self.encoder, fields, share, torch.sub, self._scratch)
        decode(self.encoder, self._sum_parts[1], self._total, torch.sub, self._scratch)

    def receive(self, values: torch.Tensor, plain: torch.Tensor) -> None:
        """Decode the sums that have come."""
        for worker, (numbers, fields) in enumerate(self._gathered_parts):
            plain[self._plain[worker] : self._plain[worker + 1]].copy_(numbers)
            decode(self.encoder, fields, self.share(values, worker))

    def commit(self) -> None:
        """Keep what encoding lost."""
        if self.encoder.feedback:
            self.values, self.residual = keep(self.values, self.residual, self._unit)
            self._total, self.total_residual = keep(self._total, self.total_residual, self._unit)

    def forget(self) -> None:
        """Keep nothing."""
        self.residual.zero_()
        self.total_residual.zero_()

    def share(self, values: torch.Tensor, worker: int) -> torch.Tensor:
        """The part of all blocks that a worker sums."""
        first, last = self.bounds[worker : worker + 2]
        return values[first * self.encoder.block : last * self.encoder.block]
