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

_WORD = 64
"""Bits of the numbers that are sorted."""

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
    """Sort keys; equal ones stay as they came.

    Args:
        keys: numbers from 0 to ``bound`` - 1: [given].
        bound: see above.
    """
    given = len(keys)
    if keys.device.type == "cpu" and bound.bit_length() + given.bit_length() < _WORD:
        return _packed(keys, given.bit_length())
    ascending, order = keys.long().sort(stable=True)
    first = torch.ones(given, dtype=torch.bool, device=keys.device)
    torch.ne(ascending[1:], ascending[:-1], out=first[1:])
    starts = first.nonzero().view(-1)
    return Grouped(ascending.index_select(0, starts), order, starts)


def _packed(keys: torch.Tensor, bits: int) -> Grouped:
    """Sort numbers that hold a key and, in so many lowest bits, where it was given.

    numpy sorts plain numbers by vector instructions: an eighth of what a stable sort takes that
    compares keys and moves positions along.
    """
    packed = keys.numpy().astype(np.int64)
    packed <<= bits
    packed |= np.arange(len(packed))
    packed.sort()
    order = packed & ((1 << bits) - 1)
    packed >>= bits
    first = np.ones(len(packed), dtype=np.bool_)
    np.not_equal(packed[1:], packed[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    return Grouped(
        torch.from_numpy(packed[starts]), torch.from_numpy(order), torch.from_numpy(starts)
    )


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


def numbered(sizes: torch.Tensor, total: int) -> torch.Tensor:
    """By item, the number of its part, where parts of these sizes follow one another: [total]."""
    return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes, output_size=total)


def starts_of(sizes: torch.Tensor) -> torch.Tensor:
    """Where each of these parts begins if they follow one another."""
    return sizes.cumsum(0) - sizes


@dataclass(frozen=True)
class _Made:
    key: Any
    of: Sequence[torch.Tensor]
    tensor: torch.Tensor


class Memo:
    """Tensors as they were made last: nearly every step wants the same ones again."""

    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}

    def get(
        self,
        name: str,
        key: Any,
        make: Callable[[], torch.Tensor],
        of: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """What ``make`` gives for ``key`` and for the numbers in ``of``; nobody may change them."""
        known = self._made.get(name)
        if known is not None and known.key == key and all(map(_same, known.of, of)):
            return known.tensor
        made = make()
        self._made[name] = _Made(key, of, made)
        return made


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # A look at numbers on another device would wait for it.
    return one is other or (one.device.type == "cpu" and torch.equal(one, other))
