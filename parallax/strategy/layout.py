"""Which part of a variable lives on which worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parallax.strategy.data import PartitionName, VariableStrategy


def cyclic_rows(rows: int, worker: int, workers: int) -> int:
    """How many of ``rows`` live on ``worker`` when row i lives on worker i mod N."""
    return (rows - worker + workers - 1) // workers


@dataclass(frozen=True)
class RowLayout:
    """Rows over workers: ``cyclic`` (row i on owner i mod n), ``block``, or ``whole``.

    What lies along ``axis`` are the rows; where it is not the first, they are columns, or slices.

    Args:
        partition: how they are dealt out.
        rows: how many there are.
        workers: of the run.
        owners: that have some.
        axis: of the rows.
        shards: in blocks, how many rows each owner has; evenly many if empty.
    """

    partition: PartitionName
    rows: int
    workers: int
    owners: tuple[int, ...]
    axis: int = 0
    shards: tuple[int, ...] = ()

    @classmethod
    def of(cls, strategy: VariableStrategy, rows: int, workers: int) -> RowLayout:
        """The layout that a strategy asks for."""
        return cls(
            strategy.partition,
            rows,
            workers,
            strategy.owners,
            strategy.axis,
            strategy.shards,
        )

    def range(self, worker: int) -> tuple[int, int]:
        """First and one-past-last row of ``worker``; only for consecutive rows."""
        if worker not in self.owners:
            return (0, 0)
        return self._range(self.owners.index(worker))

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Every worker's range."""
        # One look at each owner: of thousands, each of thousands would be looked up.
        places = {owner: self._range(place) for place, owner in enumerate(self.owners)}
        return tuple(places.get(worker, (0, 0)) for worker in range(self.workers))

    def _range(self, place: int) -> tuple[int, int]:
        """Rows of the owner at a place among owners."""
        if self.shards:
            first = sum(self.shards[:place])
            return first, first + self.shards[place]
        count = len(self.owners)
        return self.rows * place // count, self.rows * (place + 1) // count

    def local_rows(self, worker: int) -> int:
        """How many rows ``worker`` owns."""
        if self.partition == "cyclic":
            return len(range(self.rows)[self.dealt(worker)])
        first, last = self.range(worker)
        return last - first

    def rows_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view, of a whole or of a shard, whose first dimension are the rows."""
        return tensor.movedim(self.axis, 0)

    def shape_of(self, shape: Sequence[int], rows: int) -> tuple[int, ...]:
        """A shape with so many rows instead of its own."""
        return (*shape[: self.axis], rows, *shape[self.axis + 1 :])

    def dealt(self, worker: int) -> slice:
        """Which rows ``worker`` owns; only for rows that are dealt out (``cyclic``)."""
        if worker not in self.owners:
            return slice(0, 0)
        return slice(self.owners.index(worker), None, len(self.owners))

    def dealt_from(self, worker: int, first: int) -> slice:
        """The same among the rows from ``first`` on."""
        own = self.dealt(worker)
        if own.step is None:
            return own
        return slice((own.start - first) % own.step, None, own.step)

    def take(self, whole: torch.Tensor, worker: int) -> torch.Tensor:
        """A copy of the rows of ``worker``."""
        if whole.layout is not torch.strided:
            return self.take(whole.to_dense(), worker).to_sparse(1)
        if self.partition == "cyclic":
            return whole.detach()[self.dealt(worker)].clone()
        return self.view(whole, worker).clone(memory_format=torch.contiguous_format)

    def view(self, whole: torch.Tensor, worker: int) -> torch.Tensor:
        """The rows of ``worker`` as a view; only for consecutive rows."""
        first, last = self.range(worker)
        return whole.detach().narrow(self.axis, first, last - first)

    def place(self, whole: torch.Tensor, shard: torch.Tensor, worker: int) -> None:
        """Write the rows of ``worker`` to their places in ``whole``; in both, rows come first."""
        if self.partition == "cyclic":
            whole[self.dealt(worker)].copy_(shard)
        else:
            first, last = self.range(worker)
            whole[first:last].copy_(shard)

    def assemble(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole from every worker's rows, which come first in each shard."""
        whole = shards[0].new_empty((self.rows, *shards[0].shape[1:]))
        for worker, shard in enumerate(shards):
            self.place(whole, shard, worker)
        return whole.movedim(0, self.axis).contiguous()
