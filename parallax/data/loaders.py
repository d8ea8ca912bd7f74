"""DataLoaders of which each worker draws its own batches.

The user's loader is copied, and only the road from the order of the items to the batches changes:
the copy's sampler reads the user's own and keeps this worker's part. All else stays as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from parallax.data.datasets import ShardedStream, refuse_split_stream, tell_epoch
from parallax.data.division import Division, Tail, known_length, source_name
from parallax.data.identity import common_seed, worker_identity
from parallax.data.randomness import CommonRandom, OwnRandomInit, derived_seed
from parallax.errors import ShardError

__all__ = ["ShardedLoader", "ShardedSampler", "shard_loader"]

T_co = TypeVar("T_co", covariant=True)


class ShardedSampler(Sampler[Any]):
    """This worker's part of the order that another sampler draws.

    The order is drawn with random numbers that all workers have in common, new ones each epoch. A
    generator that the sampler was given is used as it stands, so the order is the one that a single
    device would draw. One worker alone draws exactly as without this class.

    Args:
        source: the user's sampler, or batch sampler.
        division: how its indices, or batches, are dealt.
        loader_seed: initial seed of the DataLoader's generator, if it has one.
    """

    def __init__(
        self, source: Iterable[Any], division: Division, loader_seed: int | None = None
    ) -> None:
        self.source = source
        self.epoch = 0
        self._division = division
        self._loader_seed = loader_seed
        self._told = False

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass that of ``epoch``; without calls, passes count from 0.

        Args:
            epoch: its number, also told to the user's sampler if that has a ``set_epoch``.
        """
        self.epoch = epoch
        tell_epoch(self.source, epoch)

    def __len__(self) -> int:
        _, workers = worker_identity()
        total = len(self.source)  # type: ignore[arg-type]
        self._division.check(total, workers)
        return total if workers == 1 else self._division.length(total, workers)

    def __iter__(self) -> Iterator[Any]:
        worker, workers = worker_identity()
        epoch = self.epoch
        self.epoch += 1
        self._settle(worker, workers)
        if workers == 1:
            total = 0
            for index in self.source:
                total += 1
                yield index
            self._division.check(total, workers)
            return
        common = CommonRandom(derived_seed(common_seed(self._loader_seed), epoch))
        with common:
            order = iter(self.source)
        yield from self._division.blocks_of(order, worker, workers, common)

    def _settle(self, worker: int, workers: int) -> None:
        """Says at the start of the epoch, not at its end, what is wrong or left out."""
        total = known_length(self.source)
        if total is None:
            return
        self._division.check(total, workers)
        if worker == 0 and not self._told:
            self._told = True
            self._division.tell(total, workers)


class ShardedLoader(DataLoader[T_co]):
    """A DataLoader that gives this worker's batches; made by ``shard()`` only."""

    # What deals the data out: it counts the epochs.
    _dealer: ShardedSampler | ShardedStream[Any]

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass that of ``epoch``, for going on after a restart.

        Without calls, passes count from 0 and each has an order of its own. An order that comes
        from a generator of the user's does not depend on the number, nor does that of one worker
        alone, which draws as without ``shard()``.

        Args:
            epoch: its number, also told to the user's sampler or dataset if they want to know.
        """
        moved = epoch != self._dealer.epoch
        self._dealer.set_epoch(epoch)
        if moved and isinstance(self._dealer, ShardedStream):
            # Persistent loader processes hold copies that count for themselves; start new ones.
            self._iterator = None

    def __iter__(self) -> Any:
        if isinstance(self._dealer, ShardedStream):
            return self._stream_batches(self._dealer)
        own_init = self.worker_init_fn
        if self.num_workers:
            # Only while the processes start, so that the loader shows the user's own function.
            self.worker_init_fn = OwnRandomInit(own_init)
        try:
            return super().__iter__()
        finally:
            self.worker_init_fn = own_init

    def _stream_batches(self, stream: ShardedStream[Any]) -> Iterator[Any]:
        batches = super().__iter__()
        if self.num_workers:
            # The processes have copies: this one, from which the next are made, counts here.
            stream.epoch += 1
        return _AtLeastOne(batches, self)


class _AtLeastOne(Iterator[Any]):
    """Batches of a stream, which cannot tell beforehand that there will be none."""

    def __init__(self, batches: Iterator[Any], loader: ShardedLoader[Any]) -> None:
        self._batches = batches
        self._loader = loader
        self._empty = True

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._empty:
                raise
            raise self._error() from None
        self._empty = False
        return batch

    def _error(self) -> ShardError:
        loader, stream = self._loader, self._loader._dealer
        _, workers = worker_identity()
        wanted, where, remedies = "one", "", ["more data"]
        if loader.num_workers:
            where = " from any process of the DataLoader"
            remedies.insert(0, "fewer num_workers")
        if loader.drop_last:
            wanted = f"a batch of {loader.batch_size}"
            where += ", and drop_last=True leaves out what is less"
            remedies[:0] = ["a smaller batch size", "drop_last=False"]
        *others, last = remedies
        return ShardError(
            f"No batches: {source_name(stream.source)} has too few items for {wanted} on each of"
            f" the {workers} workers{where}.",
            hint=f"use {', '.join(others)} or {last}.",
        )


def shard_loader(loader: DataLoader[T_co], tail: Tail) -> ShardedLoader[T_co]:
    """A copy of ``loader`` that gives this worker's part of its batches.

    Raises:
        ShardError: the loader's sampler or dataset already splits the data.
    """
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", 0))
    for sampler in samplers:
        _refuse_split_sampler(sampler)
    # A copy keeps the options that a subclass or a later torch adds. It is changed below its
    # __setattr__, which forbids new samplers to users.
    sharded: Any = copy.copy(loader)
    sharded.__class__ = _sharded_class(type(loader))
    seed = None if loader.generator is None else loader.generator.initial_seed()
    changed: dict[str, Any] = {"_iterator": None}
    if isinstance(loader.dataset, IterableDataset):
        refuse_split_stream(loader.dataset)
        stream: ShardedStream[Any]
        stream = ShardedStream(loader.dataset, tail, seed, read_ahead=loader.batch_size or 1)
        changed["dataset"] = changed["_dealer"] = stream
    else:
        changed.update(_samplers(loader, tail, seed))
    vars(sharded).update(changed)
    return sharded  # type: ignore[no-any-return]


def _samplers(loader: DataLoader[Any], tail: Tail, seed: int | None) -> dict[str, Any]:
    what = source_name(loader.dataset)
    batches = loader.batch_sampler
    if batches is None:
        dealer = ShardedSampler(loader.sampler, Division(what, tail), seed)
        return {"sampler": dealer, "_dealer": dealer}
    if type(batches) is BatchSampler:
        # Items are dealt, not whole batches: then the last batches are of one size, too.
        size, drop_last = batches.batch_size, batches.drop_last
        division = Division(what, tail, block=size, drop_last=drop_last)
        dealer = ShardedSampler(batches.sampler, division, seed)
        own: Any = BatchSampler(dealer, size, drop_last)
        return {"sampler": dealer, "batch_sampler": own, "_dealer": dealer}
    name = source_name(batches)
    dealer = ShardedSampler(batches, Division(name, tail, unit="batches"), seed)
    return {"batch_sampler": dealer, "_dealer": dealer}


def _sharded_class(kind: type[DataLoader[Any]]) -> type[ShardedLoader[Any]]:
    if kind is DataLoader:
        return ShardedLoader
    # A subclass of the user's keeps its own ways: ours come before them, torch's after.
    return type(f"Sharded{kind.__name__}", (ShardedLoader, kind), {})


def _refuse_split_sampler(sampler: object) -> None:
    """Refuses DistributedSampler and its kin, which all have these two attributes."""
    if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
        raise ShardError(
            f"The DataLoader's {type(sampler).__name__} already splits the data over the workers.",
            hint=f"remove it (use shuffle=True instead of DistributedSampler(shuffle=True)) and"
            f" pass the loader to shard(), which splits its order; or keep the"
            f" {type(sampler).__name__} and do not call shard().",
        )
