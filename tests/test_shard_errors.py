"""What shard() refuses, in words that name the way out (RELIABILITY.md rows 88 and 92)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
)

from parallax.data import shard
from parallax.errors import ConfigError, LaunchError, ShardError


class Stream(IterableDataset[int]):
    """A stream with the mark of Hugging Face's split_dataset_by_node."""

    def __init__(self, distributed: object = None) -> None:
        self._distributed = distributed

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Items(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return range(self.size)[index]


def split_twice() -> Any:
    return shard(shard([1, 2]))


def distributed() -> Any:
    return shard(DataLoader([1, 2], sampler=DistributedSampler([1, 2], 2, 0)))


REFUSED: dict[str, tuple[Any, str, str]] = {
    "twice": (split_twice, "shard() was called twice: the list is already split", "call shard()"),
    "twice, stream": (
        lambda: shard(shard(iter([1]))),
        "called twice: the list_iterator is already split over the workers.",
        "call shard() once, on the outermost object",
    ),
    "twice, loader": (
        lambda: shard(shard(DataLoader([1]))),
        "called twice: the DataLoader is already split",
        "the DataLoader if there is one",
    ),
    "loader of split": (
        lambda: shard(DataLoader(shard([1, 2]))),
        "called twice: the list inside this DataLoader is already split",
        "call shard() once",
    ),
    "loader of split stream": (
        lambda: shard(DataLoader(shard(Stream()))),
        "called twice: the Stream inside this DataLoader is already split",
        "call shard() once",
    ),
    "subset of split": (
        lambda: shard(Subset(shard([1, 2]), [0])),
        "called twice: the list inside this Subset is already split",
        "call shard() once",
    ),
    "concatenation of split": (
        lambda: shard(DataLoader(ConcatDataset([Items(3), shard(Items(3))]))),
        "called twice: the Items inside this DataLoader is already split",
        "call shard() once",
    ),
    "DistributedSampler": (
        distributed,
        "The DataLoader's DistributedSampler already splits the data over the workers.",
        "remove it (use shuffle=True instead of DistributedSampler(shuffle=True))",
    ),
    "DistributedSampler in batches": (
        lambda: shard(
            DataLoader(
                [1, 2],
                batch_sampler=BatchSampler(DistributedSampler([1, 2], 2, 0), 1, False),
            )
        ),
        "DistributedSampler already splits",
        "remove it",
    ),
    "split_dataset_by_node": (
        lambda: shard(Stream(distributed=object())),
        "This Stream is already split over the workers, by split_dataset_by_node.",
        "remove that call",
    ),
    "split_dataset_by_node in loader": (
        lambda: shard(DataLoader(Stream(distributed=object()))),
        "This Stream is already split",
        "remove that call",
    ),
    "number": (lambda: shard(3), "cannot split a int: it has neither", "pass a DataLoader"),
    "no length": (lambda: shard(NoLength()), "a NoLength: it has no __len__", "with __len__ and"),
    "text": (lambda: shard("abc"), "cannot split a str", "as a list"),
    "mapping": (lambda: shard({"a": 1}), "cannot split a dict", "list(data.items())"),
    "set": (lambda: shard({1, 2}), "cannot split a set", "sorted(data)"),
    "class": (lambda: shard(Stream), "cannot split the class Stream", "Stream(...)"),
    "scalar": (lambda: shard(torch.tensor(1.0)), "cannot split a Tensor", "split by rows"),
    "tensors": (
        lambda: shard((torch.zeros(3), torch.zeros(3))),
        "cannot split a tuple",
        "TensorDataset(*data)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused_with_a_way_out(case: str) -> None:
    make, problem, hint = REFUSED[case]
    with pytest.raises(ShardError) as caught:
        make()
    assert problem in caught.value.problem
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("tail", "hint"), [("Drop", 'did you mean "drop"?'), ("eror", '"error"?'), (None, "")]
)
def test_an_unknown_tail_is_refused(tail: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=r'tail must be "drop", "repeat" or "error"') as caught:
        shard([1], tail=tail)
    assert hint in caught.value.hint


def test_a_contradicting_environment_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = shard([1, 2, 3])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LaunchError, match="WORLD_SIZE is not set"):
        list(data)
