"""Variables cut along any axis, in even and uneven shards, among owners and in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import synchronizers
import torch
from pool import Pool

from parallax.strategy.layout import RowLayout

CASES = {2: [("dense", "momentum", "clip_norm")], 3: [("sparse", "adam", "clip_norm")]}
"""By number of workers; test_synchronizers_long.py has more."""
BLOCKS: dict[str, Any] = {"partition": "block", "owners": "all"}
WAYS: dict[str, dict[str, Any]] = {
    "owner by columns": {"synchronizer": "owner", **BLOCKS, "axis": 1},
    "owner in uneven rows": {"synchronizer": "owner", **BLOCKS, "shards": "uneven"},
    "scatter by uneven columns": {
        "synchronizer": "scatter",
        **BLOCKS,
        "axis": 1,
        "shards": "uneven",
    },
    "pieces of columns": {"synchronizer": "allreduce", "axis": 1, "pieces": 3},
    "uneven pieces of columns": {
        "synchronizer": "allreduce",
        "axis": 1,
        "pieces": 2,
        "shards": "uneven",
    },
}


@pytest.mark.parametrize("size", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_any_cut_gives_the_numbers_of_one_device(pool: Pool, way: str, size: int) -> None:
    for found in pool.run(size, synchronizers.compare, WAYS[way], CASES[size]):
        for case, (difference, chosen) in found.items():
            assert difference < 1e-10, case
            assert {"hidden.weight", "out.weight", "offset"} <= set(chosen), (case, chosen)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_layout_cuts_along_its_axis(axis: int) -> None:
    whole = torch.arange(4 * 5 * 6).view(4, 5, 6)
    size = whole.shape[axis]
    layout = RowLayout("block", size, 4, (3, 0, 2), axis, (1, size - 3, 2))
    shards = [layout.take(whole, worker) for worker in range(4)]
    assert [shard.shape[axis] for shard in shards] == [size - 3, 0, 2, 1]
    assert torch.equal(layout.assemble([layout.rows_first(shard) for shard in shards]), whole)
    assert torch.equal(torch.cat([shards[3], shards[0], shards[2]], axis), whole)
    assert layout.shape_of(shards[0].shape, size) == tuple(whole.shape)
