"""What a loss that is computed with numbers of the whole batch asks of the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from parallax.ops.specs import MessageSpec

Kind = Literal["sum", "mean", "variance", "deviation", "norm", "logsumexp", "largest", "smallest"]

VARIANCES: tuple[Kind, ...] = ("variance", "deviation")
MOST = 16
"""Statistics in a message. It has one length, as workers may have several numbers of them."""
MOST_COLUMNS = 2**16
"""Columns that a statistic may have one number for each of."""
KEYS = 2**52
"""Keys are whole numbers below it: they travel as float64."""


def told_of(kind: Kind, columns: int) -> int:
    """How many numbers are told of a statistic that has one for each column: of how many elements
    they are, and these; of variances, means too."""
    return 1 + columns * (2 if kind in VARIANCES else 1)


@dataclass(frozen=True)
class StatisticsSpec(MessageSpec):
    """Numbers of the batches of all workers in one, in one message.

    ``start(0, numbers)`` takes three of this worker's batch for each: of how many elements it is,
    the number, or of a variance and a deviation the mean; and of these the variance over all
    elements. The last two may be tensors, with a number for each column, and the first counts the
    elements of all columns. ``finish(0)`` gives for each that of all batches; then for each of how
    many elements that is, of all columns; and then for each, of variances and deviations, the mean.

    Args:
        length: how many numbers of columns the message has, on all workers.
        layout: which columns this worker tells of, and of what: a key.
        kinds: of each.
        columns: of each, how many it has; zero if it is one number.
        corrections: of variances and deviations, what is taken from the number of elements.
        keys: of each, by which it is found among those of other workers, whose Python may leave
            some out.
        lines: of each, where it is computed, if it is over all elements of the batch, so that the
            elements of a worker that leaves it out are missing; else nothing.
    """

    length: int = 0
    # Not in the text that workers compare: their steps may differ as their batches do.
    layout: int = field(default=-1, repr=False)
    kinds: tuple[Kind, ...] = field(default=(), repr=False)
    columns: tuple[int, ...] = field(default=(), repr=False)
    corrections: tuple[float, ...] = field(default=(), repr=False)
    keys: tuple[int, ...] = field(default=(), repr=False)
    lines: tuple[str, ...] = field(default=(), repr=False)

    def message(self, number: int) -> tuple[str, tuple[str, ...]]:
        return "words", self.names
