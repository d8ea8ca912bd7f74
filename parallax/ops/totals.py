"""What a loss that divides by numbers of the batch asks of the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallax.ops.specs import MessageSpec

MOST = 32
"""Totals in a message. It has one length, as workers' steps may have several numbers of them: for
each piece of a batch that is larger on some, say."""


@dataclass(frozen=True)
class TotalsSpec(MessageSpec):
    """Sums over the batch that are wanted over the batches of all workers, in one message.

    ``start(0, numbers, factors)`` takes this worker's, of no dimension, and for each what
    multiplies that which is divided by it: a number or a tensor of one element. ``finish(0)`` gives
    for each that of all workers; then for each what this worker's batch counts in a mean; and then
    for each what the batches of all workers count together.

    Args:
        means: of each, whether it is a mean over the batch, not a sum.
    """

    # Not in the text that workers compare: pieces of a batch, and so terms, differ as batches do.
    means: tuple[bool, ...] = field(default=(), repr=False)

    def message(self, number: int) -> tuple[str, tuple[str, ...]]:
        return "words", self.names
