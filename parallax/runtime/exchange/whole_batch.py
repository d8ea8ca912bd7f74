"""Rows of the batches of all workers in one, where a step compares them with each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from parallax.errors import DisagreementError
from parallax.ops.whole_batch import GatheredRows, WholeBatchSpec
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World

GROUP = "whole batch"
"""The process group of their messages: they may start before or after others, as graphs do."""
_ALIGNED = 16
"""What a worker sends is a multiple of so many bytes, so that all parts of it can be read."""


class WholeBatch:
    """The runtime of one :class:`WholeBatchSpec`: (N-1) · 16 bytes sent per worker and step, and
    (N-1) times the bytes of what is gathered."""

    def __init__(self, spec: WholeBatchSpec, world: World) -> None:
        self.spec = spec
        self._world = world
        world.open_group(GROUP)
        self._told = torch.zeros(2, dtype=torch.int64, device=world.device)
        self._counts = self._told.new_zeros(world.size, 2)
        self._counting: Pending | None = None
        self._rows: list[int] = []
        """By worker, how many its batch has."""
        self._under_way: dict[int, tuple[Pending, torch.Tensor]] = {}

    def start(self, number: int, given: int | Sequence[torch.Tensor]) -> None:
        """Send how many rows this worker has, or these."""
        if isinstance(given, int):
            self._tell(given)
            return
        self._wait_for_counts()
        message = self.spec.messages[number - 1]
        rows = self._rows[self._world.rank]
        sent = self._told.new_empty(_size(message, rows), dtype=torch.uint8)
        for (start, end), one, kind in zip(_parts(message, rows), given, message, strict=True):
            sent[start:end] = _by_row(one.detach(), kind, rows).view(torch.uint8)
        sizes = [_size(message, count) for count in self._rows]
        received = sent.new_empty(sum(sizes))
        workers = self._world.size
        pending = self._world.all_to_all(
            *(received, sent.repeat(workers), sizes, [len(sent)] * workers),
            *("rows of all batches", GROUP),
            most=max(sizes) * (workers - 1),
        )
        self._under_way[number] = pending, received

    def _tell(self, rows: int) -> None:
        for pending, _ in self._under_way.values():  # of a step that failed
            pending.wait()
        self._under_way.clear()
        self._wait_for_counts()
        self._told.copy_(torch.tensor([rows, self.spec.layout]))
        self._rows = []
        self._counting = self._world.all_gather(self._counts, self._told, "batch rows", GROUP)

    def _wait_for_counts(self) -> None:
        if self._counting is None:
            return
        self._counting.wait()
        self._counting = None
        self._rows, layouts = (list(one) for one in zip(*self._counts.tolist(), strict=True))
        differing = [worker for worker, one in enumerate(layouts) if one != self.spec.layout]
        if differing:
            raise DisagreementError(
                f"Worker {self._world.rank} and worker {differing[0]} are not running the same "
                "step: its Python decides whether rows of the batch are compared with each other "
                f"or kept, or which{self._where()}. Nothing was updated.",
                hint="compare and keep rows in all steps alike, whatever the batch: choose with "
                "torch.where, or multiply what is left out by zero.",
            )

    def _where(self) -> str:
        return f" ({self.spec.line})" if self.spec.line else ""

    def finish(self, number: int) -> int | list[torch.Tensor]:
        """Wait for those of all workers."""
        if number == 0:
            self._wait_for_counts()
            return sum(self._rows)
        pending, received = self._under_way.pop(number)
        pending.wait()
        message = self.spec.messages[number - 1]
        sizes = [_size(message, count) for count in self._rows]
        firsts = itertools.accumulate(sizes, initial=0)
        by_tensor: list[list[torch.Tensor]] = [[] for _ in message]
        for first, rows in zip(firsts, self._rows, strict=False):
            for found, kind, (start, end) in zip(
                by_tensor, message, _parts(message, rows), strict=True
            ):
                found.append(received[first + start : first + end].view(kind.dtype))
        count = sum(self._rows)
        return [
            _in_place(torch.cat(found), kind, count)
            for found, kind in zip(by_tensor, message, strict=True)
        ]

    def own(
        self, whole: torch.Tensor, dim: int, outer: int, inner: int, scaled: bool
    ) -> torch.Tensor:
        """See :func:`parallax.ops.resources.own_part`."""
        rank = self._world.rank
        count, first, rows = sum(self._rows), sum(self._rows[:rank]), self._rows[rank]
        by_place = whole.unflatten(dim, (outer, count, inner))
        own: torch.Tensor = by_place.narrow(dim + 1, first, rows).flatten(dim, dim + 2)
        return own * (count / max(rows, 1)) if scaled else own


def _size(message: Sequence[GatheredRows], rows: int) -> int:
    """How many bytes a worker with so many rows sends."""
    return math.ceil(rows * sum(one.row_bytes for one in message) / _ALIGNED) * _ALIGNED


def _parts(message: Sequence[GatheredRows], rows: int) -> Iterator[tuple[int, int]]:
    """Of each tensor, where it lies in what such a worker sends."""
    ends = itertools.accumulate((rows * one.row_bytes for one in message), initial=0)
    return itertools.pairwise(ends)


def _by_row(tensor: torch.Tensor, kind: GatheredRows, rows: int) -> torch.Tensor:
    """The elements of a tensor, row by row of the batch."""
    by_place: torch.Tensor = tensor.unflatten(kind.dim, (kind.outer, rows, kind.inner))
    return by_place.movedim(kind.dim + 1, 0).contiguous().view(-1)


def _in_place(elements: torch.Tensor, kind: GatheredRows, rows: int) -> torch.Tensor:
    """A tensor with these elements, which lie row by row."""
    before, after = kind.shape[: kind.dim], kind.shape[kind.dim + 1 :]
    by_row = elements.view(rows, *before, kind.outer, kind.inner, *after)
    # As the captured graph has it: views that follow may need it so.
    return by_row.movedim(0, kind.dim + 1).flatten(kind.dim, kind.dim + 2).contiguous()
