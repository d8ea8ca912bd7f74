"""What the synchronisers of factors ask of the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from parallax.ops.resources import OwnSpec

COUNTS, WORDS = -1, -2
"""Messages besides those of factors: how many rows follow, with the control words; and these
words once more, of phases in which nothing else carries them."""


@dataclass(frozen=True)
class FactorEntry:
    """One gradient U'V [rows, columns], of factors U [K, rows] and V [K, columns].

    Args:
        name: the variable.
        rows, columns: of its gradient.
        dtype: of the gradient and its factors.
        average: mean over workers, else sum.
        message: that its factors travel in.
        owner: the worker that they are sent to; None if to all.
    """

    name: str
    rows: int
    columns: int
    dtype: torch.dtype
    average: bool
    message: int
    owner: int | None = None


@dataclass(frozen=True)
class FactorsSpec(OwnSpec):
    """Gradients of one phase that travel as factors, ordered by message.

    ``alone``: nothing else of the phase carries the control words at its end.
    """

    entries: tuple[FactorEntry, ...]
    alone: bool

    carries_words: ClassVar[bool] = True

    def message(self, number: int) -> tuple[str, tuple[str, ...]]:
        if number < 0:
            return "words", ()
        return "factors", tuple(e.name for e in self.entries if e.message == number)
