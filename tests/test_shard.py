"""Splitting datasets, sequences and streams over workers."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from errors_help import warnings_of_parallax
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from worlds import as_worker, on_each

from parallax.data import num_shards, shard, shard_id
from parallax.data.randomness import CommonRandom
from parallax.errors import ShardError

sizes = st.integers(0, 60)
worlds = st.integers(1, 7)


class Numbers(IterableDataset[int]):
    """A stream of a length that nobody knows beforehand."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        yield from range(self.size)


class Table:
    """As much of a Hugging Face ``Dataset`` as shard() and its users rely on."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: column[key] for name, column in self.columns.items()}

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        return [self[key] for key in keys]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def select(self, rows: Any) -> Table:
        return Table({name: [column[row] for row in rows] for name, column in self.columns.items()})

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Table:
        assert not contiguous
        return self.select(range(index, len(self), num_shards))

    def map(self, change: Any) -> Table:
        rows = [change(row) for row in self]
        return Table({name: [row[name] for row in rows] for name in rows[0]})


class TableStream(IterableDataset[dict[str, int]]):
    """As much of a Hugging Face ``IterableDataset``: files of rows, split by ``shard``."""

    def __init__(self, files: list[list[int]]) -> None:
        self.files = files
        self.epoch = 0

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> TableStream:
        return TableStream(self.files[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        files = self.files[self.epoch % len(self.files) :] + self.files[: self.epoch]
        return ({"x": row} for file in files for row in file)


def table(size: int) -> Table:
    return Table({"x": list(range(size)), "y": [f"row {row}" for row in range(size)]})


SIZED = {
    "list": lambda size: list(range(size)),
    "range": range,
    "tensor": torch.arange,
    "array": np.arange,
    "dataset": lambda size: TensorDataset(torch.arange(size)),
    "table": table,
}
STREAMS = {
    "stream": Numbers,
    "generator": lambda size: (number for number in range(size)),
    "iterator": lambda size: iter(range(size)),
    "table stream": lambda size: TableStream(
        [list(range(size // 3)), list(range(size // 3, size))]
    ),
}
KINDS = SIZED | STREAMS


def number(item: Any) -> int:
    if isinstance(item, dict):
        return int(item["x"])
    return int(item[0]) if isinstance(item, tuple) else int(item)


def numbers(data: Any) -> list[int]:
    return [number(item) for item in data]


@pytest.mark.parametrize("kind", KINDS)
@given(size=sizes, workers=worlds)
@settings(max_examples=40, deadline=None)
def test_parts_are_disjoint_complete_and_equally_large(kind: str, size: int, workers: int) -> None:
    def make() -> Any:
        return shard(KINDS[kind](size))

    if size < workers:
        with pytest.raises(ShardError):
            on_each(workers, make, numbers)
        return
    parts = on_each(workers, make, numbers)
    kept = size - size % workers
    assert parts == [list(range(worker, kept, workers)) for worker in range(workers)]
    assert sorted(item for part in parts for item in part) == list(range(kept))
    if kind in SIZED:
        assert on_each(workers, make, len) == [kept // workers] * workers


@pytest.mark.parametrize("kind", KINDS)
@given(size=sizes, workers=worlds)
@settings(max_examples=40, deadline=None)
def test_repeat_loses_nothing_and_repeats_the_first(kind: str, size: int, workers: int) -> None:
    if size < workers:
        return
    parts = on_each(workers, lambda: shard(KINDS[kind](size), tail="repeat"), numbers)
    assert len({len(part) for part in parts}) == 1
    dealt = [item for round_ in zip(*parts, strict=True) for item in round_]
    assert dealt == [*range(size), *range(-size % workers)]


@pytest.mark.parametrize("kind", KINDS)
def test_error_refuses_a_tail_and_nothing_else(kind: str) -> None:
    assert on_each(2, lambda: shard(KINDS[kind](4), tail="error"), numbers) == [[0, 2], [1, 3]]
    with pytest.raises(ShardError) as caught, as_worker(0, 3):
        numbers(shard(KINDS[kind](10), tail="error"))
    assert "has 10 items, which 3 workers cannot share equally: 1 left over" in str(caught.value)
    assert 'tail="drop" leaves the rest out' in caught.value.hint


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_is_said_once_by_one_worker(
    kind: str,
) -> None:

    def two_epochs(data: Any) -> None:
        numbers(data)
        if kind not in ("generator", "iterator"):
            numbers(data)

    with warnings_of_parallax() as said:
        on_each(4, lambda: shard(KINDS[kind](11)), two_epochs)
    assert said == [
        f"the {type(KINDS[kind](11)).__name__} has 11 items: the last 3 left out of each epoch, so"
        " that each of 4 workers gets 2 (tail='drop')."
    ]
    with warnings_of_parallax() as said:
        on_each(4, lambda: shard(KINDS[kind](11), tail="repeat"), numbers)
    assert "1 repeated in each epoch, so that each of 4 workers gets 3" in "".join(said)


@pytest.mark.parametrize("kind", KINDS)
def test_too_little_data_is_refused_with_the_numbers(kind: str) -> None:
    with pytest.raises(ShardError, match="has 3 items, fewer than the 4 workers: 1 would have"):
        on_each(4, lambda: shard(KINDS[kind](3), tail="repeat"), numbers)
    for workers in (1, 2):
        with pytest.raises(ShardError, match=r"^No batches: the \w+ has no items"):
            on_each(workers, lambda: shard(KINDS[kind](0)), numbers)
    assert ShardError.exit_code == 5


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_sees_what_it_would_see_without_shard(kind: str) -> None:
    data = shard(KINDS[kind](7))
    assert numbers(data) == list(range(7))


def test_the_worker_is_asked_when_data_is_read_not_when_it_is_split() -> None:
    data, stream = shard([0, 1, 2, 3]), shard(Numbers(4))
    assert len(data) == 4
    with as_worker(1, 2):
        assert (list(data), list(stream), len(data)) == ([1, 3], [1, 3], 2)
    with as_worker(0, 4):
        assert (list(data), list(stream)) == ([0], [0])


def test_hand_written_input_can_ask_for_its_part() -> None:
    assert (shard_id(), num_shards()) == (0, 1)
    with as_worker(2, 5):
        assert (shard_id(), num_shards()) == (2, 5)


def test_a_split_dataset_is_a_sequence() -> None:
    with as_worker(1, 3):
        data = shard(list("abcdefgh"))
        assert (data[0], data[1], data[-1], data[:]) == ("b", "e", "e", ["b", "e"])
        assert data.__getitems__([1, 0]) == ["e", "b"]
        for index in (2, -3):
            with pytest.raises(IndexError, match="out of range for this worker's 2 items"):
                data[index]
        assert pickle.loads(pickle.dumps(data))[0] == "b"
        batches = DataLoader(shard(torch.arange(12)), batch_size=2)
        assert [batch.tolist() for batch in batches] == [[1, 4], [7, 10]]


def test_a_split_table_keeps_its_methods() -> None:
    with as_worker(1, 2):
        data = shard(table(7))
        assert data.column_names == ["x", "y"]
        assert data["x"] == [1, 3, 5]
        assert data[-1] == {"x": 5, "y": "row 5"}
        assert data.map(lambda row: {"z": row["x"] * 10})["z"] == [10, 30, 50]
        batches = DataLoader(data, batch_size=3, collate_fn=numbers)
        assert list(batches) == [[1, 3, 5]]
        assert copy.copy(data)["x"] == pickle.loads(pickle.dumps(data))["x"] == [1, 3, 5]
        with pytest.raises(AttributeError, match="no_such_name"):
            data.no_such_name  # noqa: B018
    with as_worker(0, 3):
        assert data["x"] == [0, 3]


def test_a_stream_is_read_one_round_ahead_and_no_further() -> None:
    read: list[int] = []

    def source() -> Iterator[int]:
        for item in range(100):
            read.append(item)
            yield item

    with as_worker(1, 3):
        items = iter(shard(source()))
        assert next(items) == 1
        assert read == [0, 1, 2]
        assert next(items) == 4
        assert read == [0, 1, 2, 3, 4, 5]


def test_an_endless_stream_is_split() -> None:
    def source() -> Iterator[int]:
        item = 0
        while True:
            yield item
            item += 1

    def read(data: Any) -> list[int]:
        return [item for item, _ in zip(data, range(3), strict=False)]

    assert on_each(2, lambda: shard(source()), read) == [[0, 2, 4], [1, 3, 5]]


class Shuffled(IterableDataset[int]):
    """A stream in an order from the three global generators, as users write it."""

    def __iter__(self) -> Iterator[int]:
        items = torch.randperm(12).tolist()
        random.shuffle(items)
        for item in np.random.permutation(items):
            yield int(item) + 0 * random.randrange(5)


def test_a_stream_that_shuffles_is_the_same_on_all_workers_and_new_each_epoch() -> None:
    def two_epochs(data: Any) -> list[list[int]]:
        torch.manual_seed(shard_id())
        random.seed(shard_id())
        np.random.seed(shard_id())
        return [list(data), list(data)]

    parts = on_each(3, lambda: shard(Shuffled()), two_epochs)
    for epoch in range(2):
        assert sorted(item for part in parts for item in part[epoch]) == list(range(12))
    assert parts[0][0] != parts[0][1]
    assert parts == on_each(3, lambda: shard(Shuffled()), two_epochs)
    assert parts != on_each(3, lambda: shard(Shuffled()), two_epochs, seed=7)

    def second(data: Any) -> list[int]:
        data.set_epoch(1)
        return list(data)

    assert on_each(3, lambda: shard(Shuffled()), second) == [part[1] for part in parts]


def test_reading_a_stream_leaves_the_worker_its_own_random_numbers() -> None:
    def draw() -> tuple[float, ...]:
        # NumPy and Python draw normal numbers in pairs, of which one is kept for later.
        return torch.rand(()).item(), random.gauss(0, 1), np.random.random(), np.random.randn()

    with as_worker(0, 2):
        common = CommonRandom(5)
        with common:
            first = draw()
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        expected = [draw(), draw()]
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        found = [draw()]
        list(shard(Shuffled()))
        with common:
            second = draw()
        found.append(draw())
    assert found == expected
    with CommonRandom(5):
        assert draw() == first
        # All but the kept normal number of NumPy, the last.
        assert draw()[:-1] == second[:-1]


def test_set_epoch_reaches_the_stream() -> None:
    with as_worker(0, 2):
        data = shard(TableStream([[0, 1], [2, 3]]))
        data.set_epoch(1)
        assert numbers(data) == [2, 0]
