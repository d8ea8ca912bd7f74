"""Sums by key, however large the keys are and whatever is summed."""

from __future__ import annotations

import pytest
import torch

from parallax.runtime.exchange.grouping import Memo, group, numbered, spread, sum_rows

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.int64]


@pytest.mark.parametrize("bound", [7, 10**6, 2**62])  # the last cannot be sorted with places
@pytest.mark.parametrize("count", [0, 1, 50])
def test_keys_are_grouped_as_unique_does(bound: int, count: int) -> None:
    keys = torch.randint(bound, (count,))
    found = group(keys, bound)
    distinct, positions = torch.unique(keys, return_inverse=True)
    assert torch.equal(found.keys, distinct)
    assert torch.equal(found.positions(), positions)
    assert torch.equal(keys[found.first()], distinct)
    for place, start in enumerate(found.starts.tolist()):
        end = found.starts[place + 1] if place + 1 < len(distinct) else count
        own = found.order[start:end]
        assert (keys[own] == distinct[place]).all()
        assert torch.equal(own, own.sort().values)  # equal keys as they came


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_rows_are_summed_by_key(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    keys = torch.tensor([4, 0, 4, 9, 0, 4])
    rows = (torch.arange(6 * torch.Size(shape).numel()) - 9).view(6, *shape).to(dtype)
    expected = torch.stack([rows[keys == key].sum(0) for key in (0, 4, 9)])
    assert torch.equal(group(keys, 10).sums(rows), expected.to(dtype))


def test_rows_of_several_keys_and_empty_bags() -> None:
    rows = torch.eye(3, dtype=torch.float64)
    row_of = torch.tensor([2, 0, 2, 1])
    found = group(torch.tensor([1, 0, 1, 0]), 2).sums(rows, row_of)
    assert found.tolist() == [[1, 1, 0], [0, 0, 2]]
    sums = sum_rows(rows, torch.tensor([1, 2]), torch.tensor([0, 0, 2]))
    assert sums.tolist() == [[0, 0, 0], [0, 1, 1], [0, 0, 0]]
    assert sum_rows(rows, row_of[:0], torch.tensor([0, 0])).tolist() == [[0, 0, 0]] * 2
    with pytest.raises((RuntimeError, IndexError)):
        sum_rows(rows, torch.tensor([3]), torch.tensor([0]))


def test_values_are_repeated_and_what_was_made_is_kept() -> None:
    device = torch.device("cpu")
    assert spread([5, 6, 7], [2, 0, 1], device).tolist() == [5, 5, 7]
    memo, made = Memo(), []

    def make() -> torch.Tensor:
        made.append(torch.zeros(1))
        return made[-1]

    assert memo.get("a", [1], make) is memo.get("a", [1], make)
    assert memo.get("a", [2], make) is not memo.get("b", [2], make)
    assert len(made) == 3
    sizes = torch.tensor([2, 0, 1])
    kept = memo.get("c", [1], make, [sizes])
    assert memo.get("c", [1], make, [sizes.clone()]) is kept
    assert memo.get("c", [1], make, [sizes + 1]) is not kept
    assert memo.get("c", [1], make, [sizes[:2]]) is not kept
    assert numbered(sizes, 3).tolist() == [0, 0, 2]
