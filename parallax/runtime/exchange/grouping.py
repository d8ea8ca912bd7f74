"""Equal keys together: what turns sums over ids into a few operations on all of them.

Sorted by their keys, the rows that belong together lie together, and are summed by one operation
for bags, whose bags are the distinct keys. A sum over a bag's ids and its gradient, which sums
over a row's bags, are so the same operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_DIGIT = 16
"""Bits of a digit that keys are sorted by."""

_IN_BAGS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What torch's operation for bags can sum."""


@dataclass(frozen=True)
class Grouped:
    """Keys by their values."""

    keys: torch.Tensor
    """The distinct ones, ascending: [distinct]."""
    order: torch.Tensor
    """Where they were given, equal ones together and as they came: [given]."""
    starts: torch.Tensor
    """By distinct key, where its part of ``order`` begins: [distinct]."""

    def first(self) -> torch.Tensor:
        """By distinct key, where it was given first: [distinct]."""
        return self.order.index_select(0, self.starts)

    def positions(self) -> torch.Tensor:
        """By key as it was given, where it is among the distinct ones: [given]."""
        given = len(self.order)
        changes = torch.zeros(given, dtype=torch.int64, device=self.order.device)
        changes[self.starts[1:]] = 1
        return torch.empty_like(self.order).scatter_(0, self.order, changes.cumsum(0))

    def sums(self, rows: torch.Tensor, row_of: torch.Tensor | None = None) -> torch.Tensor:
        """By distinct key, the sum of its rows: [distinct, ...].

        Args:
            rows: one for each key that was given.
            row_of: by key given, its row; in their order if absent.
        """
        order = self.order if row_of is None else row_of.index_select(0, self.order)
        return sum_rows(rows, order, self.starts)


def group(keys: torch.Tensor, bound: int) -> Grouped:
    """Sort keys.

    Args:
        keys: numbers from 0 to ``bound`` - 1: [given].
        bound: see above.
    """
    given = len(keys)
    ascending, order = _sorted(keys.long(), bound)
    first = torch.ones(given, dtype=torch.bool, device=keys.device)
    torch.ne(ascending[1:], ascending[:-1], out=first[1:])
    starts = first.nonzero().view(-1)
    return Grouped(ascending.index_select(0, starts), order, starts)


def _sorted(keys: torch.Tensor, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ascending, and where each was; equal ones stay as they came."""
    if keys.device.type != "cpu":
        found = keys.sort(stable=True)
        return found.values, found.indices
    # numpy sorts numbers of 16 bits by counting: a digit at a time, lowest first, that takes a
    # third to an eighth of what comparing them does.
    values = keys.numpy()
    order = np.argsort(values.astype(np.uint16), kind="stable")
    for shift in range(_DIGIT, bound.bit_length(), _DIGIT):
        digits = (values >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    places = torch.from_numpy(order)
    return keys.index_select(0, places), places


def sum_rows(rows: torch.Tensor, indices: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Sums of chosen rows: [bags, ...]; that of no rows is zero.

    Args:
        rows: [any, ...].
        indices: which of them are summed, bag by bag.
        starts: by bag, where its indices begin.
    """
    shape = (len(starts), *rows.shape[1:])
    if not len(indices) or not len(starts):
        return rows.new_zeros(shape)
    flat = rows.detach().reshape(len(rows), -1)
    if rows.dtype in _IN_BAGS:
        summed: torch.Tensor = torch.nn.functional.embedding_bag(indices, flat, starts, mode="sum")
        return summed.view(shape)
    ends = torch.cat([starts[1:], starts.new_tensor([len(indices)])])
    bags = torch.arange(len(starts), device=starts.device).repeat_interleave(ends - starts)
    return (
        flat.new_zeros((len(starts), flat.shape[1]))
        .index_add_(0, bags, flat.index_select(0, indices))
        .view(shape)
    )


def spread(values: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Each value as often as its count says: [sum of counts]."""
    return torch.tensor(values, dtype=torch.int64, device=device).repeat_interleave(
        torch.tensor(counts, dtype=torch.int64, device=device), output_size=sum(counts)
    )


def starts_of(sizes: torch.Tensor) -> torch.Tensor:
    """Where each of these parts begins if they follow one another."""
    return sizes.cumsum(0) - sizes


class Memo:
    """Tensors as they were made last: nearly every step wants the same ones again."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, torch.Tensor]] = {}

    def get(self, name: str, key: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``make`` gives for ``key``; nobody may change it."""
        known = self._made.get(name)
        if known is not None and known[0] == key:
            return known[1]
        made = make()
        self._made[name] = (key, made)
        return made
