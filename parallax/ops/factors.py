"""What the synchronisers of factors ask of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from parallax.ops.resources import MessageSpec, effect

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
        multiplied: the gradient is handed on, else the factors of all workers.
    """

    name: str
    rows: int
    columns: int
    dtype: torch.dtype
    average: bool
    message: int
    owner: int | None = None
    multiplied: bool = True


@dataclass(frozen=True)
class FactorsSpec(MessageSpec):
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


BLOCK_BYTES = 1 << 19
"""Of a gradient that is multiplied block by block: with the state, it stays in the cache."""


@effect
def update_by_product(
    body: Callable[..., Sequence[torch.Tensor]],
    factors: tuple[torch.Tensor, torch.Tensor],
    shards: Sequence[torch.Tensor],
    others: Sequence[Any],
) -> list[torch.Tensor]:
    """Run an update whose gradient is U'V on blocks of its rows, each multiplied when it is needed.

    Args:
        body: the update of one block; changes its shards in place and returns new state.
        factors: U [K, rows] and V [K, columns].
        shards: state with as many rows.
        others: what every block sees whole (numbers).

    Returns:
        New state that the update made.
    """
    left, right = factors
    rows, columns = left.shape[1], right.shape[1]
    size = max(BLOCK_BYTES // max(columns * right.element_size(), 1), 1)
    scratch = right.new_empty((min(size, rows), columns))
    created: list[torch.Tensor] = []
    for first in range(0, rows, size):
        last = min(first + size, rows)
        block = torch.mm(left[:, first:last].t(), right, out=scratch[: last - first])
        made = body(block, *[shard[first:last] for shard in shards], *others)
        if not created:
            created = [new.new_empty((rows, *new.shape[1:])) for new in made]
        for whole, new in zip(created, made, strict=True):
            whole[first:last] = new
    return created
