"""``shard()``: the data of one device becomes the data of one worker of many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar, overload

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from parallax.data.datasets import (
    ShardedDataset,
    ShardedStream,
    ShardedTable,
    refuse_split_stream,
)
from parallax.data.division import Tail, checked_tail, source_name
from parallax.data.identity import note_size
from parallax.data.loaders import ShardedLoader, shard_loader
from parallax.errors import ShardError

__all__ = ["shard"]

T = TypeVar("T")


@overload
def shard(data: DataLoader[T], *, tail: Tail = "drop") -> ShardedLoader[T]: ...
@overload
def shard(  # type: ignore[overload-overlap]  # an IterableDataset is also a Dataset
    data: IterableDataset[T] | Iterator[T], *, tail: Tail = "drop"
) -> ShardedStream[T]: ...
@overload
def shard(data: Dataset[T] | Sequence[T], *, tail: Tail = "drop") -> ShardedDataset[T]: ...
@overload
def shard(data: Any, *, tail: Tail = "drop") -> Any: ...
def shard(data: Any, *, tail: Tail = "drop") -> Any:
    """Splits data over the workers: each gets its own part, all parts are equally large.

    The parts are disjoint and, but for the tail, complete. Which part is whose is settled when the
    data is read, without communication; with one worker the data stays as it is.

    Args:
        data: what gives one device its data.

            - A ``DataLoader``: each worker draws ``batch_size`` items for each batch, so the
              workers' k-th batches together are the k-th batch of one device with ``batch_size``
              times the number of workers. Samplers, shuffling and all options are kept; a custom
              ``batch_sampler`` has its batches dealt in turn. Every epoch has a new order, the same
              for all workers.
            - A dataset or sequence with a length, a tensor (by rows), a Hugging Face ``Dataset``:
              worker i of N gets items i, i+N, i+2N, ...
            - An ``IterableDataset``, a generator or another iterable, a Hugging Face stream: the
              same, by reading all of it on every worker. It must give the same items in the same
              order on each; ``num_shards()`` and ``shard_id()`` are for input that reads only its
              own part.
        tail: what becomes of the last items when they do not go round. ``"drop"`` leaves out fewer
            items than there are workers and says how many; ``"repeat"`` fills up with the first
            items of the epoch, which then count twice; ``"error"`` refuses. A DataLoader with
            ``drop_last=True`` leaves out the whole last batch of all workers instead.

    Returns:
        An object of the same use: a ``DataLoader`` for a ``DataLoader``, a map-style ``Dataset``
        for data with a length, else an ``IterableDataset``. Loaders and streams have
        ``set_epoch``, which only a run that goes on after a restart needs.

    Raises:
        ShardError: the data is already split, or is not of a kind that can be split. When the data
            is read: it is empty, has fewer items than there are workers, or does not go round
            although ``tail="error"``.
        ConfigError: ``tail`` is none of these.
    """
    tail = checked_tail(tail)
    _refuse_sharded(data)
    note_size(data)
    if isinstance(data, DataLoader):
        return shard_loader(data, tail)
    _refuse_unfit(data)
    if isinstance(data, IterableDataset):
        refuse_split_stream(data)
        return ShardedStream(data, tail)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        if callable(getattr(data, "shard", None)) and callable(getattr(data, "select", None)):
            return ShardedTable(data, tail)
        return ShardedDataset(data, tail)
    if isinstance(data, Iterable):
        refuse_split_stream(data)
        return ShardedStream(data, tail)
    lacking = "no __len__" if hasattr(data, "__getitem__") else "neither __getitem__ nor __iter__"
    raise ShardError(
        f"shard() cannot split {_named(data)}: it has {lacking}.",
        hint="pass a DataLoader, a dataset with __len__ and __getitem__, an IterableDataset or"
        " another iterable.",
    )


def _named(data: object) -> str:
    return f"the class {data.__name__}" if isinstance(data, type) else f"a {type(data).__name__}"


def _refuse_sharded(data: object) -> None:
    """Refuses what shard() returned, also below a Subset, a ConcatDataset or a DataLoader."""
    outer = data
    waiting = [data]
    while waiting:
        data = waiting.pop()
        if isinstance(data, ShardedLoader | ShardedDataset | ShardedStream):
            split = (
                "the DataLoader" if isinstance(data, ShardedLoader) else source_name(data.source)
            )
            inside = "" if data is outer else f" inside this {type(outer).__name__}"
            raise ShardError(
                f"shard() was called twice: {split}{inside} is already split over the workers.",
                hint="call shard() once, on the outermost object: the DataLoader if there is one.",
            )
        if isinstance(data, DataLoader | Dataset):
            waiting.append(getattr(data, "dataset", None))
            waiting.extend(_parts(getattr(data, "datasets", None)))


def _parts(datasets: object) -> Sequence[object]:
    return datasets if isinstance(datasets, list | tuple) else ()


def _refuse_unfit(data: object) -> None:
    """Refuses what has a length or can be iterated, but not in the sense of a dataset."""
    hint = ""
    if isinstance(data, type):
        hint = f"pass an instance, such as {data.__name__}(...)."
    elif isinstance(data, str | bytes | bytearray):
        hint = "pass the lines or records that it holds, or names, as a list."
    elif isinstance(data, Mapping):
        hint = "pass one of its values, or its items as a list: list(data.items())."
    elif isinstance(data, Set):
        hint = "the order of a set differs between workers; pass sorted(data)."
    elif isinstance(data, Tensor) and data.dim() == 0:
        hint = "a tensor is split by rows, and one without dimensions has none."
    elif isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        hint = "to split the tensors' rows together, pass torch.utils.data.TensorDataset(*data)."
    if hint:
        raise ShardError(f"shard() cannot split {_named(data)}.", hint=hint)
