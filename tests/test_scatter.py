"""Scattered variables: sharded state, gathered where it is read."""

from __future__ import annotations

from typing import Any

import pytest
import synchronizers
from pool import Pool

SCATTER: dict[str, Any] = {"synchronizer": "scatter", "partition": "block", "owners": "all"}
CASES = {
    2: [("dense", "momentum", "clip_norm"), ("tied", "nesterov", "clip_value")],
    3: [("dense", "adam", "clip_norm"), ("sparse", "adamw", "average")],
}
"""By number of workers; test_synchronizers_long.py has more."""


@pytest.mark.parametrize("size", CASES)
def test_scattered_variables_give_the_numbers_of_one_device(pool: Pool, size: int) -> None:
    for found in pool.run(size, synchronizers.compare, SCATTER, CASES[size]):
        for case, (difference, chosen) in found.items():
            assert difference < 1e-10, case
            assert {"hidden.weight", "hidden.bias", "offset"} <= set(chosen), (case, chosen)


@pytest.mark.parametrize("mean", [True, False])
def test_batches_may_be_uneven_or_empty(pool: Pool, mean: bool) -> None:
    for found in pool.run(3, synchronizers.uneven, SCATTER, mean):
        assert found["chosen"] == ["scatter"] * 3
        assert found["difference"] < 1e-10


def test_every_worker_holds_and_sends_its_share(pool: Pool) -> None:
    found = pool.run(4, synchronizers.counted, SCATTER)
    elements = 300 * 400 + 400 + 400 * 200 + 200
    for one in found:
        assert one["chosen"] == ["scatter"] * 4
        assert one["sent"] == pytest.approx(one["formula"], rel=0.02)
        assert one["formula"] == pytest.approx(2 * 3 / 4 * 4 * elements)
        assert one["held"] == pytest.approx(2 * elements / 4, rel=0.01)  # values and momentum


def test_variables_with_one_update_are_sharded_alike(pool: Pool) -> None:
    for found in pool.run(2, synchronizers.joined, SCATTER):
        assert found["chosen"] == ["scatter"] * 2
        assert found["difference"] < 1e-10
        assert found["alone"] == ["allreduce"] * 2
