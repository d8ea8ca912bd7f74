"""How much the batch of each worker counts in a mean.

By its rows, if all tensors of a batch have the same first size: then an item counts the same on
every worker. Which size to count by cannot be told from a batch whose tensors differ in it (values
and offsets of bags, sequences that lie time by time), and two of them may be equal by chance, on
one worker only. So it is agreed on once, for the first batches of all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parallax.graph.analysis.sums import first_sizes
from parallax.runtime.comm.control import Step
from parallax.runtime.comm.world import World

_UNEQUAL = 0x5DEECE66D
"""Mixed into the hash of a step whose batch has no number of rows, while others are counted."""


class Weighing:
    """Decides what each batch of this worker counts."""

    def __init__(self, by_rows: bool = True) -> None:
        """
        Args:
            by_rows: a batch may count by its rows; else all that are not empty count alike.
        """
        self.by_rows = by_rows

    def agree(self, world: World, flat: Sequence[Any]) -> int:
        """Decide with all other workers, by the first batches; what a usual batch counts.

        Args:
            world: this worker and the others.
            flat: this worker's first batch.
        """
        told = world.texts("batch rows", str(number_of_rows(flat)))
        self.by_rows = self.by_rows and "None" not in told
        return max(int(told[0]), 1) if self.by_rows else 1

    def step(
        self,
        plan: int,
        number: int,
        flat: Sequence[Any],
        ids: Callable[[], Mapping[Any, Any]] = dict,
    ) -> Step:
        """A step on a batch, by the hash of what it runs, and its number.

        Where batches count by their rows and this one has no number of them, other workers notice
        it by the hash, unless theirs have none either.
        """
        rows = number_of_rows(flat)
        if self.by_rows and rows is None:
            plan ^= _UNEQUAL
        if rows is None:
            rows = 1
        return Step.of(plan, number, rows if self.by_rows else min(rows, 1), ids)


def number_of_rows(flat: Sequence[Any]) -> int | None:
    """Of a batch: the first size that all its tensors share; None if they share none."""
    sizes = first_sizes(flat)
    return sizes.pop() if len(sizes) == 1 else None
