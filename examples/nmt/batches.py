"""Batches of pairs of about one length, without more padding than the longest of them needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from examples.nmt.model import lengths, trimmed

POOL = 64
"""Batches of all workers whose pairs are sorted by length."""


class ByLength(Sampler[int]):
    """A new random order each epoch, in which pairs of similar length follow each other.

    All pairs are shuffled and cut into pools; those of a pool are sorted by length and leave it
    batch after batch, in a random order again. Random numbers are torch's, so every worker that
    starts with one seed draws the same order.

    Args:
        source, target: [pairs, longest] ids, filled with ``PADDING``.
        batch: pairs of a step, of all workers.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor, batch: int) -> None:
        self._lengths = lengths(source) + lengths(target)
        self._batch = batch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self))
        batches: list[torch.Tensor] = []
        rest: list[torch.Tensor] = []
        for pool in order.split(POOL * self._batch):
            by_length = pool[self._lengths[pool].argsort(stable=True)]
            for batch in by_length.split(self._batch):
                (batches if len(batch) == self._batch else rest).append(batch)
        for place in torch.randperm(len(batches)).tolist():
            yield from batches[place].tolist()
        for batch in rest:  # last, so that all others begin where a batch begins
            yield from batch.tolist()


def collate(pairs: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of pairs, as a ``DataLoader`` wants it."""
    sources, targets = zip(*pairs, strict=True)
    return trimmed(torch.stack(sources)), trimmed(torch.stack(targets))
