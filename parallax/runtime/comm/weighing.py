"""How much the batch of each worker counts in a mean.

By its rows, if all tensors of a batch have the same first size: then an item counts the same on
every worker. Which size to count by cannot be told from a batch whose tensors differ in it (values
and offsets of bags, sequences that lie time by time), and two of them may be equal by chance, on
one worker only. So it is agreed on once, for the first batches of all workers.

What all workers are given alike has no rows that count: weights of classes, a graph's adjacency, a
mask of causality. It is told by its values, in the first batches too.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch

from parallax.graph.analysis.sums import first_sizes
from parallax.runtime.comm.control import Step
from parallax.runtime.comm.texts import digest
from parallax.runtime.comm.world import World

_UNEQUAL = 0x5DEECE66D
"""Mixed into the hash of a step whose batch has no number of rows, while others are counted."""
_MOST_READ = 1 << 20
"""Of a tensor, how many elements are compared between workers; of a larger one, so many of it."""


class Weighing:
    """Decides what each batch of this worker counts."""

    def __init__(self, by_rows: bool = True) -> None:
        """
        Args:
            by_rows: a batch may count by its rows; else all that are not empty count alike.
        """
        self.by_rows = by_rows
        self.rows = 0
        """How many all workers' first batches have, if they count by them."""
        self.common: frozenset[str] = frozenset()
        """Parts of the batch that have the same values on all workers."""

    def agree(self, world: World, flat: Sequence[Any], parts: Sequence[str]) -> int:
        """Decide with all other workers, by the first batches; what a usual batch counts.

        Args:
            world: this worker and the others.
            flat: this worker's first batch.
            parts: of it, to which each item belongs.
        """
        own = msgspec.json.encode([*map(_described, flat, parts)]).decode()
        told = [
            msgspec.json.decode(text, type=list[_Told]) for text in world.texts("batch rows", own)
        ]
        self.common = _common_parts(told)
        sizes = [_sizes(tensors, self.common) for tensors in told]
        self.by_rows = self.by_rows and all(len(one) == 1 for one in sizes)
        self.rows = sum(map(sum, sizes)) if self.by_rows else 0
        return max(*sizes[0], 1) if self.by_rows else 1

    def step(
        self,
        plan: int,
        number: int,
        flat: Sequence[Any],
        common: Collection[int] = (),
        ids: Callable[[], Mapping[Any, Any]] = dict,
    ) -> Step:
        """A step on a batch, by the hash of what it runs, and its number.

        Where batches count by their rows and this one has no number of them, other workers notice
        it by the hash, unless theirs have none either.

        Args:
            plan: the hash.
            number: of the step.
            flat: the batch.
            common: places in it of what all workers have alike.
            ids: that are told with it.
        """
        rows = number_of_rows(without(flat, common))
        if self.by_rows and rows is None:
            plan ^= _UNEQUAL
        if rows is None:
            rows = 1
        return Step.of(plan, number, rows if self.by_rows else min(rows, 1), ids)


class _Told(msgspec.Struct, array_like=True):
    """What workers tell each other of an item of their first batches.

    Args:
        part: to which it belongs.
        rows: the first size of a tensor; None of all else.
        values: a hash of these.
        may_be_common: it has values by which a tensor is told from others.
    """

    part: str
    rows: int | None = None
    values: str = ""
    may_be_common: bool = False


def _described(item: Any, part: str) -> _Told:
    if not isinstance(item, torch.Tensor) or not item.dim():
        return _Told(part)
    rows = item.shape[0]
    if item.layout is not torch.strided or item.is_quantized or not item.numel():
        return _Told(part, rows)
    with torch.no_grad():
        flat = item.detach().resolve_conj().resolve_neg().reshape(-1)
        some = flat[:: -(-len(flat) // _MOST_READ)].cpu().contiguous()
    values = digest(some.view(torch.uint8).numpy().tobytes() + repr(tuple(item.shape)).encode())
    # Lengths, offsets and masks of padding may be alike by chance, as may weights of ones.
    is_told = item.dtype.is_floating_point or item.dim() > 1
    return _Told(part, rows, values, is_told and not bool((some == some[0]).all()))


def _common_parts(told: Sequence[Sequence[_Told]]) -> frozenset[str]:
    """What is alike in all workers' batches, and has not as many rows as what differs."""
    first, *others = [_by_part(tensors) for tensors in told]
    if all(one == first for one in others):  # all were given the same
        return frozenset()
    alike = {
        part: ones
        for part, ones in first.items()
        if all(one.get(part) == ones for one in others) and all(one.may_be_common for one in ones)
    }
    sizes = [_sizes(tensors, alike) for tensors in told]
    return frozenset(
        part
        for part, ones in alike.items()
        if any(one.rows not in own for own in sizes for one in ones)
    )


def _by_part(told: Sequence[_Told]) -> dict[str, list[_Told]]:
    found: dict[str, list[_Told]] = collections.defaultdict(list)
    for one in told:
        if one.rows is not None:
            found[one.part].append(one)
    return found


def _sizes(told: Sequence[_Told], without: Collection[str]) -> set[int]:
    """The first sizes of what is not of these parts."""
    return {one.rows for one in told if one.rows is not None and one.part not in without}


def without(flat: Sequence[Any], common: Collection[int]) -> Sequence[Any]:
    """A flat batch but for some of its places."""
    if not common:
        return flat
    return [item for place, item in enumerate(flat) if place not in common]


def number_of_rows(flat: Sequence[Any]) -> int | None:
    """Of a batch: the first size that all its tensors share; None if they share none."""
    sizes = first_sizes(flat)
    return sizes.pop() if len(sizes) == 1 else None
