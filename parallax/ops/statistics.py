"""What a loss that is computed with numbers of the whole batch asks of the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from parallax.ops.specs import MessageSpec

Kind = Literal["sum", "mean", "variance", "deviation", "largest", "smallest"]

MOST = 16
"""Statistics in a message. It has one length, as workers may have several numbers of them."""
KEYS = 2**52
"""Keys are whole numbers below it: they travel as float64."""


@dataclass(frozen=True)
class StatisticsSpec(MessageSpec):
    """Numbers of the batches of all workers in one, in one message.

    ``start(0, numbers)`` takes three numbers of this worker's batch for each: of how many elements
    it is, the number, or of a variance and a deviation the mean; and of these the variance over all
    elements. ``finish(0)`` gives for each that of all batches.

    Args:
        kinds: of each.
        corrections: of variances and deviations, what is taken from the number of elements.
        keys: of each, by which it is found among those of other workers, whose Python may leave
            some out.
        lines: of each, where it is computed, if it is over all elements of the batch, so that the
            elements of a worker that leaves it out are missing; else nothing.
    """

    # Not in the text that workers compare: their steps may differ as their batches do.
    kinds: tuple[Kind, ...] = field(default=(), repr=False)
    corrections: tuple[float, ...] = field(default=(), repr=False)
    keys: tuple[int, ...] = field(default=(), repr=False)
    lines: tuple[str, ...] = field(default=(), repr=False)

    def message(self, number: int) -> tuple[str, tuple[str, ...]]:
        return "words", self.names
