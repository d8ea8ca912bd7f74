"""Splitting DataLoaders over workers: which batches each gets, and in which order."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from worlds import as_worker, on_each, worker_variables

from parallax.data import shard, shard_id
from parallax.errors import ShardError

sizes = st.integers(1, 70)
worlds = st.integers(1, 6)
batches = st.integers(1, 9)


def lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def joined(batches: Iterable[list[int]]) -> list[int]:
    return [item for batch in batches for item in batch]


def together(parts: list[list[list[int]]]) -> list[list[int]]:
    """The batches that all workers' k-th batches make, in the order of the workers."""
    return [joined(round_) for round_ in zip(*parts, strict=True)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(
    size=sizes,
    workers=worlds,
    batch=batches,
    drop_last=st.booleans(),
    explicit=st.booleans(),
    shuffle=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_local_batches_are_the_batch_of_one_device(
    size: int, workers: int, batch: int, drop_last: bool, explicit: bool, shuffle: bool
) -> None:
    """The k-th batches together are the k-th batch of ``workers * batch`` items, in two epochs."""

    def loader(batch: int) -> DataLoader[Any]:
        generator = seeded(3)
        if not explicit:
            return DataLoader(range(size), batch, shuffle, drop_last=drop_last, generator=generator)
        order = RandomSampler(range(size), generator=generator) if shuffle else range(size)
        return DataLoader(
            range(size),
            batch_sampler=BatchSampler(order, batch, drop_last),
            generator=generator,
        )

    def two_epochs(loader: Any) -> list[Any]:
        return [lists(loader), lists(loader), len(loader)]

    if size < workers * (batch if drop_last else 1):
        with pytest.raises(ShardError):
            on_each(workers, lambda: shard(loader(batch)), two_epochs)
        return
    found = on_each(workers, lambda: shard(loader(batch)), two_epochs)
    expected = two_epochs(loader(workers * batch))
    for epoch in range(2):
        parts = [part[epoch] for part in found]
        for sizes in zip(*([len(local) for local in part] for part in parts), strict=True):
            assert len(set(sizes)) == 1
        one_device = expected[epoch]
        left_out = len(one_device[-1]) % workers
        if left_out:
            one_device[-1] = one_device[-1][:-left_out]
        assert together(parts) == [whole for whole in one_device if whole]
        assert [part[2] for part in found] == [len(part) for part in parts]


@given(size=sizes, workers=worlds, batch=batches)
@settings(max_examples=80, deadline=None)
def test_repeat_fills_up_with_the_first_of_the_epoch(size: int, workers: int, batch: int) -> None:
    if size < workers:
        return

    def make() -> Any:
        return shard(DataLoader(range(size), batch, True, generator=seeded(1)), tail="repeat")

    order = joined(lists(DataLoader(range(size), size, True, generator=seeded(1))))
    found = joined(together(on_each(workers, make, lists)))
    assert found == order + order[: -size % workers]


class EveryOther(Sampler[int]):
    """A user's own sampler, drawn from the global generators of torch and Python."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = -1

    def __len__(self) -> int:
        return self.size // 2

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = (2 * torch.randperm(self.size // 2)).tolist()
        random.shuffle(order)
        return iter(order)


class Unsized(EveryOther):
    __len__ = None  # type: ignore[assignment]


SAMPLERS: dict[str, tuple[Any, set[int] | None]] = {
    "shuffle": (lambda data: DataLoader(data, 2, shuffle=True), set(range(24))),
    "generator": (
        lambda data: DataLoader(data, 2, shuffle=True, generator=seeded(4)),
        set(range(24)),
    ),
    "no batches": (
        lambda data: DataLoader(data, None, sampler=RandomSampler(data)),
        set(range(24)),
    ),
    "subset": (
        lambda data: DataLoader(data, 2, sampler=SubsetRandomSampler(range(6, 18))),
        set(range(6, 18)),
    ),
    "weighted": (
        lambda data: DataLoader(data, 2, sampler=WeightedRandomSampler([1.0] * 24, 12)),
        None,
    ),
    "weighted once": (
        lambda data: DataLoader(
            data, 2, sampler=WeightedRandomSampler([0.0] * 12 + [1.0] * 12, 12, replacement=False)
        ),
        set(range(12, 24)),
    ),
    "replacement": (
        lambda data: DataLoader(
            data, 2, sampler=RandomSampler(data, replacement=True, num_samples=12)
        ),
        None,
    ),
    "own": (lambda data: DataLoader(data, 2, sampler=EveryOther(24)), set(range(0, 24, 2))),
    "own, unsized": (lambda data: DataLoader(data, 2, sampler=Unsized(24)), set(range(0, 24, 2))),
    "own batches": (
        lambda data: DataLoader(data, batch_sampler=Buckets(EveryOther(24), 2, False)),
        set(range(0, 24, 2)),
    ),
}


class Buckets(BatchSampler):
    """A user's own batch sampler: only its batches can be dealt."""


def flat(loader: Any) -> list[int]:
    return [int(item) for batch in loader for item in torch.as_tensor(batch).reshape(-1)]


@pytest.mark.parametrize("case", SAMPLERS)
def test_every_random_sampler_is_split_and_drawn_anew_each_epoch(case: str) -> None:
    make, expected = SAMPLERS[case]

    def two_epochs(loader: Any) -> list[list[int]]:
        # Workers differ in their own random numbers, and must agree nevertheless.
        torch.manual_seed(shard_id())
        random.seed(shard_id())
        return [flat(loader), flat(loader)]

    parts = on_each(3, lambda: shard(make(torch.arange(24))), two_epochs)
    for epoch in range(2):
        items = [item for part in parts for item in part[epoch]]
        assert len({len(part[epoch]) for part in parts}) == 1
        if expected is None:
            # One draw of 12 that was dealt, not three draws that happen to be alike.
            assert len(items) == 12
            assert parts[0][epoch] != parts[1][epoch]
        else:
            assert sorted(items) == sorted(expected)
    assert parts[0][0] != parts[0][1]
    other = on_each(3, lambda: shard(make(torch.arange(24))), two_epochs, seed=11)
    assert (other == parts) == (case == "generator")


def test_own_sampler_is_told_the_epoch() -> None:
    with as_worker(0, 2):
        sampler = EveryOther(8)
        loader = shard(DataLoader(range(8), sampler=sampler))
        loader.set_epoch(5)
        assert sampler.epoch == 5


def test_set_epoch_goes_on_where_a_run_stopped() -> None:
    with as_worker(1, 2):
        loader = shard(DataLoader(range(20), 2, shuffle=True))
        epochs = [lists(loader) for _ in range(3)]
        assert epochs[0] != epochs[1] != epochs[2]
        again = shard(DataLoader(range(20), 2, shuffle=True))
        again.set_epoch(2)
        assert lists(again) == epochs[2]
        loader.set_epoch(0)
        assert lists(loader) == epochs[0]


def test_seed_is_the_launchers_then_the_loaders_then_a_fixed_one() -> None:
    def make(generator: torch.Generator | None) -> Any:
        # This sampler has no generator; the loader's says only which common seed is meant.
        return shard(DataLoader(range(30), 5, sampler=EveryOther(30), generator=generator))

    def first(generator: torch.Generator | None, seed: int | None = None) -> Any:
        return on_each(2, lambda: make(generator), lists, seed)

    assert first(None) == first(seeded(0))
    assert first(None) != first(seeded(1)) == first(seeded(1))
    assert first(None, 5) == first(seeded(1), 5) == first(seeded(5))


def test_whole_batches_of_an_own_batch_sampler_are_dealt_in_turn() -> None:
    buckets = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]

    def make(tail: Any = "drop") -> Any:
        return shard(DataLoader(range(9), batch_sampler=buckets), tail=tail)

    assert on_each(2, make, lists) == [[[0], [3, 4, 5]], [[1, 2], [6]]]
    assert on_each(2, lambda: make("repeat"), lists)[1] == [[1, 2], [6], [0]]
    assert on_each(2, make, len) == [2, 2]
    with pytest.raises(ShardError, match="The list has 5 batches, which 2 workers cannot share"):
        on_each(2, lambda: make("error"), lists)
    with pytest.raises(
        ShardError, match="The list has 5 batches, fewer than the 6 workers"
    ) as caught:
        on_each(6, make, lists)
    assert caught.value.hint == "use at most 5 workers, or smaller batches."


def test_an_endless_sampler_is_split() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(10))

    def read(loader: Any) -> list[list[int]]:
        return [batch.tolist() for batch in itertools.islice(loader, 3)]

    parts = on_each(2, lambda: shard(DataLoader(range(10), 2, sampler=Endless())), read)
    assert together(parts) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def collate(items: list[int]) -> list[int]:
    return items


def init(loader_process: int) -> None:
    pass


OPTIONS: dict[str, Any] = {
    "batch_size": 3,
    "num_workers": 2,
    "collate_fn": collate,
    "pin_memory": True,
    "drop_last": True,
    "timeout": 9.0,
    "worker_init_fn": init,
    "multiprocessing_context": "spawn",
    "generator": seeded(2),
    "prefetch_factor": 5,
    "persistent_workers": True,
    "in_order": False,
}


def test_every_option_is_kept() -> None:
    loader = DataLoader(range(9), **OPTIONS)
    with as_worker(0, 2):
        split = shard(loader)
    for name in OPTIONS:
        assert getattr(split, name) is getattr(loader, name), name
    assert split.dataset is loader.dataset
    assert isinstance(split, DataLoader)
    assert isinstance(loader.sampler, SequentialSampler)
    assert type(loader) is DataLoader


def test_a_subclass_keeps_its_ways() -> None:
    class Doubling(DataLoader[Any]):
        def __init__(self, size: int) -> None:
            super().__init__(range(size), batch_size=2)
            self.extra = "kept"

        def __iter__(self) -> Any:
            return (2 * batch for batch in super().__iter__())

    def read(loader: Any) -> Any:
        assert isinstance(loader, Doubling)
        assert loader.extra == "kept"
        return lists(loader)

    assert together(on_each(2, lambda: shard(Doubling(8)), read)) == [[0, 2, 4, 6], [8, 10, 12, 14]]


def test_tensors_come_in_the_users_structure() -> None:
    data = TensorDataset(torch.arange(8.0).reshape(4, 2), torch.arange(4))
    with as_worker(1, 2):
        ((rows, targets),) = shard(DataLoader(data, batch_size=2))
    assert rows.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert targets.tolist() == [2, 3]


def test_drop_last_that_leaves_nothing_is_refused() -> None:
    def make() -> Any:
        return shard(DataLoader(range(10), batch_size=8, drop_last=True))

    with pytest.raises(ShardError) as caught:
        on_each(2, make, lists)
    assert caught.value.problem == (
        "No batches: the range has 10 items, and drop_last=True leaves them out because one batch"
        " of 8 for each of 2 workers takes 16."
    )
    assert "at most 5, or drop_last=False" in caught.value.hint
    with pytest.raises(ShardError, match="one batch of 8 for each of 2 workers"):
        on_each(2, make, len)


PROGRAM = """
import torch
from torch.utils.data import DataLoader
from parallax.data import shard
loader = shard(DataLoader(range(12), 2, shuffle=True))
print([batch.tolist() for _ in range(2) for batch in loader])
"""


def test_unseeded_processes_agree_on_the_order() -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **worker_variables(rank, 2)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    parts = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    for epoch in (slice(0, 3), slice(3, 6)):
        assert sorted(joined(joined(part[epoch] for part in parts))) == list(range(12))
    assert parts[0][:3] != parts[0][3:]
