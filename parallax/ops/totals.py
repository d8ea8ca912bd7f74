"""What a loss that divides by numbers of the batch asks of the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallax.ops.specs import MessageSpec

MOST = 32
"""Totals in a message. It has one length, as workers' steps may have several numbers of them: for
each piece of a batch that is larger on some, say."""
MOST_TERMS = 64
"""Terms in a message."""
PLACES = 2**12
NUMBERS = 2**15
PARTS = 2**5
LINES = 2**21
"""A key is ``((line * PARTS + part) * NUMBERS + number) * PLACES + place``: a hash of the line that
computes something; one of the parts of the batch, and one of the numbers, by which it counts, 0 for
none; and which it is of those that are alike. They travel as float64, which is exact up to 2^53."""


@dataclass(frozen=True)
class TermKey:
    """What multiplies terms of a line, in a message.

    Args:
        key: of the line, of what is counted, and of the total.
        total: which one the terms are divided by.
        line: the key of the line alone.
    """

    key: int
    total: int
    line: int


@dataclass(frozen=True)
class TotalsSpec(MessageSpec):
    """Sums over the batch that are wanted over the batches of all workers, in one message.

    ``start(0, numbers, factors)`` takes this worker's, of no dimension, and what multiplies the
    terms that are divided by them: for each of ``terms``, a number or a tensor of one element.
    ``finish(0)`` gives for each total that of all workers; then for each what this worker's batch
    counts in a mean; and then for each what the batches of all workers count together.

    Args:
        means: of each, whether it is a mean over the batch, not a sum.
        keys: of each, by which it is found among those of other workers, whose Python may leave
            terms out: equal for what the same lines compute in the same order.
        lines: of each, where a loss is divided by it, for messages.
        terms: what has a factor.
        others: keys of the lines of other numbers that losses are made of.
    """

    # Not in the text that workers compare: pieces of a batch, and so terms, differ as batches do.
    means: tuple[bool, ...] = field(default=(), repr=False)
    keys: tuple[int, ...] = field(default=(), repr=False)
    lines: tuple[str, ...] = field(default=(), repr=False)
    terms: tuple[TermKey, ...] = field(default=(), repr=False)
    others: tuple[int, ...] = field(default=(), repr=False)

    def message(self, number: int) -> tuple[str, tuple[str, ...]]:
        return "words", self.names
