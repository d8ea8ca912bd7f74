"""DataLoaders whose own processes load the data, over datasets and over streams."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from worlds import as_worker, on_each

from parallax.data import shard
from parallax.errors import ShardError


class Files(IterableDataset[int]):
    """A stream that gives each loader process its own files, as torch's manual advises."""

    def __init__(self, *files: range, shuffle: bool = False) -> None:
        self.files = files
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[int]:
        process = get_worker_info()
        mine = self.files if process is None else self.files[process.id :: process.num_workers]
        for file in mine:
            yield from (
                torch.tensor(file)[torch.randperm(len(file))].tolist() if self.shuffle else file
            )


def lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def items(parts: Any) -> list[int]:
    return sorted(item for part in parts for batch in part for item in batch)


def sizes(part: list[list[int]]) -> list[int]:
    return [len(batch) for batch in part]


def test_a_stream_is_split_over_workers() -> None:
    def make() -> Any:
        return shard(DataLoader(Files(range(11)), batch_size=2))

    assert on_each(2, make, lists) == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_is_split_over_workers_and_loader_processes(persistent: bool) -> None:
    files = [range(9), range(10, 15), range(20, 28)]

    def make() -> Any:
        return shard(
            DataLoader(
                Files(*files, shuffle=True),
                batch_size=2,
                num_workers=2,
                persistent_workers=persistent,
            )
        )

    def epochs(loader: Any) -> list[list[list[int]]]:
        torch.seed()
        found = [lists(loader), lists(loader)]
        loader.set_epoch(0)
        return [*found, lists(loader)]

    parts = on_each(2, make, epochs)
    for epoch in range(3):
        found = items(part[epoch] for part in parts)
        # Process 0 has 9 + 8 items, process 1 has 5: one of each does not go round.
        assert len(found) == len(set(found)) == 20
        assert set(found) < {item for file in files for item in file}
        assert sizes(parts[0][epoch]) == sizes(parts[1][epoch])
    assert parts[0][0] != parts[0][1]
    assert parts[0][0] == parts[0][2]


def test_tails_of_loader_processes(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "log")

    def make(tail: Any) -> Any:
        stream = Files(range(5), range(10, 11))
        return shard(DataLoader(stream, batch_size=2, num_workers=2), tail=tail)

    logging.getLogger("parallax").addHandler(handler)
    try:
        assert on_each(2, lambda: make("drop"), lists) == [[[0, 2]], [[1, 3]]]
    finally:
        logging.getLogger("parallax").removeHandler(handler)
        handler.close()
    told = (tmp_path / "log").read_text()
    assert "the Files has 5 items in one process of the DataLoader: the last 1 left out" in told
    assert "the Files has 1 item in one process of the DataLoader: the last 1 left out" in told
    assert told.count("left out") == 2
    assert on_each(2, lambda: make("repeat"), lists) == [[[0, 2], [10], [4]], [[1, 3], [10], [0]]]
    with pytest.raises(ShardError, match="which 2 workers cannot share equally: 1 left over"):
        on_each(2, lambda: make("error"), lists)


def test_streams_of_loader_processes_may_be_empty_but_not_all() -> None:
    def make(*files: range, drop_last: bool = False) -> Any:
        stream = Files(*files)
        return shard(DataLoader(stream, batch_size=2, num_workers=2, drop_last=drop_last))

    assert on_each(2, lambda: make(range(4)), lists) == [[[0, 2]], [[1, 3]]]
    for nothing, wanted, hint in (
        (lambda: make(), "one", "use fewer num_workers or more data"),
        (
            lambda: make(range(2), drop_last=True),
            "a batch of 2",
            "use a smaller batch size, drop_last=False, fewer num_workers or more data",
        ),
    ):
        with pytest.raises(ShardError) as caught:
            on_each(2, nothing, lists)
        assert (
            f"No batches: the Files has too few items for {wanted} on each of the 2 workers from "
            "any process of the DataLoader" in caught.value.problem
        )
        assert hint in caught.value.hint


def test_a_stream_that_is_too_short_for_full_batches_says_what_to_do() -> None:
    def make() -> Any:
        return shard(DataLoader(Files(range(3)), batch_size=2, drop_last=True))

    with pytest.raises(ShardError) as caught:
        on_each(2, make, lists)
    assert (
        "the Files has too few items for a batch of 2 on each of the 2 workers, and drop_last=True "
        "leaves out what is less" in caught.value.problem
    )
    assert caught.value.hint == "use a smaller batch size, drop_last=False or more data."


class Noise(Dataset[torch.Tensor]):
    """Items with a random augmentation from each of the generators that a process has."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()), random.random(), np.random.random()])


class Mark:
    """A worker_init_fn that leaves a file, so that its call can be seen from outside."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, loader_process: int) -> None:
        (self.directory / str(loader_process)).touch()


@pytest.mark.parametrize("generator", [None, 3])
def test_loader_processes_of_different_workers_draw_different_noise(
    generator: int | None, tmp_path: Path
) -> None:
    def make() -> Any:
        return shard(
            DataLoader(
                Noise(),
                batch_size=2,
                num_workers=2,
                worker_init_fn=Mark(tmp_path),
                generator=None if generator is None else torch.Generator().manual_seed(generator),
            )
        )

    def read(loader: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return torch.cat(list(loader))

    first, second = on_each(2, make, read)
    assert first[:, 0].tolist() == [0, 1, 4, 5]
    assert second[:, 0].tolist() == [2, 3, 6, 7]
    assert not torch.isclose(first[:, 1:], second[:, 1:]).any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    (again, _) = on_each(2, make, read)
    assert torch.equal(first, again)


def test_persistent_processes_shuffle_anew() -> None:
    def make() -> Any:
        return shard(
            DataLoader(
                range(16), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True
            )
        )

    parts = on_each(2, make, lambda loader: [lists(loader), lists(loader)])
    for epoch in range(2):
        assert items(part[epoch] for part in parts) == list(range(16))
    assert parts[0][0] != parts[0][1]


def test_one_worker_draws_as_without_shard() -> None:
    def read(split: bool) -> torch.Tensor:
        torch.manual_seed(1)
        loader: Any = DataLoader(Noise(), batch_size=2, shuffle=True, num_workers=1)
        return torch.cat(list(shard(loader) if split else loader))

    with as_worker(0, 1):
        assert torch.equal(read(True), read(False))
