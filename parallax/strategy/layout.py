"""Which rows of a variable live on which worker."""

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
    """Rows over workers: ``cyclic`` (row i on owner i mod n), ``block``, or ``whole``."""

    partition: PartitionName
    rows: int
    workers: int
    owners: tuple[int, ...]

    @classmethod
    def of(cls, strategy: VariableStrategy, rows: int, workers: int) -> RowLayout:
        """The layout that a strategy asks for."""
        return cls(strategy.partition, rows, workers, strategy.owners)

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
        count = len(self.owners)
        return self.rows * place // count, self.rows * (place + 1) // count

    def local_rows(self, worker: int) -> int:
        """How many rows ``worker`` owns."""
        if self.partition == "cyclic":
            return cyclic_rows(self.rows, worker, self.workers)
        first, last = self.range(worker)
        return last - first

    def take(self, whole: torch.Tensor, worker: int) -> torch.Tensor:
        """A copy of the rows of ``worker``."""
        if self.partition == "cyclic":
            return whole.detach()[worker :: self.workers].clone()
        return self.view(whole, worker).clone()

    def view(self, whole: torch.Tensor, worker: int) -> torch.Tensor:
        """The rows of ``worker`` as a view; only for consecutive rows."""
        first, last = self.range(worker)
        return whole.detach()[first:last]

    def place(self, whole: torch.Tensor, shard: torch.Tensor, worker: int) -> None:
        """Write the rows of ``worker`` to their places in ``whole``."""
        if self.partition == "cyclic":
            whole[worker :: self.workers].copy_(shard)
        else:
            first, last = self.range(worker)
            whole[first:last].copy_(shard)

    def assemble(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole from every worker's rows."""
        whole = shards[0].new_empty((self.rows, *shards[0].shape[1:]))
        for worker, shard in enumerate(shards):
            self.place(whole, shard, worker)
        return whole
