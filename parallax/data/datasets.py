"""Datasets and streams of which each worker sees its own part.

Who this worker is, is asked when the data is read, not when it is wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from parallax.data.division import Division, Tail, known_length, source_name
from parallax.data.identity import common_seed, worker_identity
from parallax.data.randomness import CommonRandom, derived_seed
from parallax.errors import ShardError

__all__ = ["ShardedDataset", "ShardedStream", "ShardedTable", "refuse_split_stream", "tell_epoch"]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class _Place:
    """One worker's part of a dataset: ``length`` of its ``total`` items."""

    worker: int
    workers: int
    total: int
    length: int

    def position(self, index: int) -> int:
        """Where the worker's item is in the whole dataset."""
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} is out of range for this worker's {self.length} items")
        # The remainder is for tail="repeat", where the last round goes on at the first item.
        return (self.worker + index % self.length * self.workers) % self.total


class ShardedDataset(Dataset[T_co]):
    """This worker's items of a dataset with a length: worker i of N has items i, i+N, i+2N, ...

    Dealt in turn rather than cut in pieces, so that the k-th batches of all workers together are
    the k-th batch of one device, and so that data sorted by class is mixed on each worker.

    Args:
        source: anything with ``__len__`` and ``__getitem__`` by number.
        tail: as for ``shard()``.
    """

    def __init__(self, source: Any, tail: Tail) -> None:
        self.source = source
        self._division = Division(source_name(source), tail)
        self._told = False

    def _place(self) -> _Place:
        worker, workers = worker_identity()
        total = len(self.source)
        self._division.check(total, workers)
        if not self._told:
            self._told = True
            if worker == 0:
                self._division.tell(total, workers)
        return _Place(worker, workers, total, self._division.length(total, workers))

    def __len__(self) -> int:
        return self._place().length

    def __getitem__(self, index: Any) -> Any:
        place = self._place()
        if isinstance(index, slice):
            numbers = range(*index.indices(place.length))
            return [self.source[place.position(number)] for number in numbers]
        return self.source[place.position(index)]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Several items at once, as DataLoader asks for them, in one call if the source can."""
        place = self._place()
        positions = [place.position(index) for index in indices]
        if callable(getattr(self.source, "__getitems__", None)):
            return self.source.__getitems__(positions)
        return [self.source[position] for position in positions]

    def __iter__(self) -> Iterator[T_co]:
        place = self._place()
        for index in range(place.length):
            yield self.source[place.position(index)]


class ShardedTable(ShardedDataset[T_co]):
    """This worker's rows of a Hugging Face ``Dataset``, with all that such a dataset can do.

    ``map``, ``set_format``, column names and the rest are those of the worker's own rows, which are
    picked at the first use.
    """

    def __init__(self, source: Any, tail: Tail) -> None:
        super().__init__(source, tail)
        self._picked: tuple[_Place, Any] | None = None

    def _rows(self) -> Any:
        place = self._place()
        if self._picked is None or self._picked[0] != place:
            rows = self.source
            if place.workers > 1:
                rows = rows.select([place.position(index) for index in range(place.length)])
            self._picked = (place, rows)
        return self._picked[1]

    def __getitem__(self, index: Any) -> Any:
        return self._rows()[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        rows = self._rows()
        if callable(getattr(rows, "__getitems__", None)):
            return rows.__getitems__(list(indices))
        return [rows[index] for index in indices]

    def __iter__(self) -> Iterator[T_co]:
        return iter(self._rows())

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look for names of this kind before the object has its own.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._rows(), name)


class ShardedStream(IterableDataset[T_co]):
    """This worker's items of a stream: item i of every round of N, where N is how many workers.

    Every worker reads the whole stream, which must be the same on each: what it draws from the
    global random generators is (see ``CommonRandom``). In a DataLoader's processes each process's
    stream is split, after whatever the source makes of ``get_worker_info()``.

    Args:
        source: anything that can be iterated, once for each epoch.
        tail: as for ``shard()``.
        loader_seed: initial seed of the DataLoader's generator, if there is one.
        read_ahead: how many of this worker's items are read at once; no more than are waited for
            anyway, so the batch size where there is one.
    """

    def __init__(
        self,
        source: Iterable[T_co],
        tail: Tail,
        loader_seed: int | None = None,
        read_ahead: int = 1,
    ) -> None:
        self.source = source
        self.epoch = 0
        self._division = Division(source_name(source), tail)
        self._loader_seed = loader_seed
        self._read_ahead = read_ahead

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass that of ``epoch``; without calls, passes count from 0.

        Args:
            epoch: its number, also told to the source if that has a ``set_epoch``.
        """
        self.epoch = epoch
        tell_epoch(self.source, epoch)

    def __len__(self) -> int:
        _, workers = worker_identity()
        total = len(self.source)  # type: ignore[arg-type]
        self._division.check(total, workers)
        return self._division.length(total, workers)

    def __iter__(self) -> Iterator[T_co]:
        epoch = self.epoch
        self.epoch += 1
        return self._epoch(epoch)

    def _epoch(self, epoch: int) -> Iterator[T_co]:
        worker, workers = worker_identity()
        process = get_worker_info()
        if workers == 1:
            yield from self._all(partial=process is not None)
            return
        total = known_length(self.source)
        if process is None and total is not None:
            # A tail that is not wanted is refused before the epoch rather than after it.
            self._division.check(total, workers)
        part = 0 if process is None else process.id
        common = CommonRandom(derived_seed(common_seed(self._loader_seed), epoch, part))
        with common:
            items = iter(self.source)
        yield from self._division.stream_of(
            items,
            worker,
            workers,
            common,
            rounds=self._read_ahead,
            partial=process is not None,
            tell=worker == 0 and epoch == 0,
        )

    def _all(self, *, partial: bool) -> Iterator[T_co]:
        """Everything, for the only worker."""
        empty = True
        for item in self.source:
            empty = False
            yield item
        if empty and not partial:
            self._division.check(0, 1)


def tell_epoch(source: object, epoch: int) -> None:
    """Passes the number of the epoch on to a user's sampler or dataset that wants to know it."""
    if callable(getattr(source, "set_epoch", None)):
        source.set_epoch(epoch)  # type: ignore[attr-defined]


def refuse_split_stream(source: object) -> None:
    """Refuses a Hugging Face stream that ``split_dataset_by_node`` has already split.

    Raises:
        ShardError: it was.
    """
    if getattr(source, "_distributed", None) is not None:
        raise ShardError(
            f"This {type(source).__name__} is already split over the workers, by"
            " split_dataset_by_node.",
            hint="remove that call: shard() splits the data itself.",
        )
