"""Every synchroniser, on one to four workers, with optimizers and what comes between."""

from __future__ import annotations

from typing import Any

import pytest
import synchronizers
from pool import Pool

BLOCKS: dict[str, Any] = {"partition": "block", "owners": "all"}
WAYS: dict[str, dict[str, Any]] = {
    "factors": {"synchronizer": "factors"},
    "factor_push": {"synchronizer": "factor_push", "owners": "one"},
    "scatter": {"synchronizer": "scatter", **BLOCKS},
    "scatter by columns": {"synchronizer": "scatter", **BLOCKS, "axis": 1, "shards": "uneven"},
    "owner by columns": {"synchronizer": "owner", **BLOCKS, "axis": 1, "shards": "uneven"},
    "pieces": {"synchronizer": "allreduce", "axis": 1, "pieces": 2, "shards": "uneven"},
    "broadcast": {"synchronizer": "broadcast"},
    "ring": {"synchronizer": "allreduce", "reduction": "ring"},
    "tree": {"synchronizer": "allreduce", "reduction": "tree"},
    "halving": {"synchronizer": "allreduce", "reduction": "halving"},
}
CASES = [
    (model, optimizer, between)
    for model in ("dense", "sparse", "tied")
    for optimizer in ("momentum", "adam", "rmsprop", "asgd")
    for between in ("clip_norm", "average")
]


# The long checks have each way at one size, the exhaustive ones at all.
CELLS = [
    pytest.param(
        way,
        size,
        marks=pytest.mark.long if size == 3 + place % 2 else pytest.mark.exhaustive,
    )
    for place, way in enumerate(WAYS)
    for size in (1, 2, 3, 4)
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("way", "size"), CELLS)
def test_every_synchronizer_gives_the_numbers_of_one_device(
    pool: Pool, way: str, size: int
) -> None:
    # Every optimizer and what is between take turns over the ways.
    turn = list(WAYS).index(way)
    cases = [case for place, case in enumerate(CASES) if (place // 2 + place + turn) % 2]
    for found in pool.run(size, synchronizers.compare, WAYS[way], cases):
        for case, (difference, chosen) in found.items():
            assert difference < 1e-10, case
            assert chosen
