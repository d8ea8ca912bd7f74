"""Regions that a device records give the numbers of regions that are run; here on the CPU, with
what does the same there. On CUDA: ``test_cuda.py``."""

from __future__ import annotations

import pytest
import recorded_steps
from pool import Pool


@pytest.mark.parametrize(
    ("option", "optimizer", "size"),
    [
        ("HYBRID", "momentum", 1),
        ("HYBRID", "adam", 2),
        ("PS", "momentum", 2),
        ("AR", "rmsprop", 3),
        ("ZeRO", "adamw", 2),
    ],
)
def test_recorded_regions_give_the_same_numbers(
    pool: Pool, option: str, optimizer: str, size: int
) -> None:
    for found in pool.run(size, recorded_steps.compare, option, optimizer):
        assert found["difference"] < 1e-12
        ready, of, total = found["plan"].split()[1:4]
        assert (ready, of) == (total, "of"), found["plan"]


@pytest.mark.parametrize("size", [1, 2])
def test_shapes_that_come_often_are_recorded(pool: Pool, size: int) -> None:
    lengths = [4, 5, 6, 7, 5, 6, 7, *[5, 6, 7] * 4, 8, 6]
    for found in pool.run(size, recorded_steps.compare_lengths, lengths):
        assert found["difference"] < 1e-12
        ready, of, total = found["plan"].split()[1:4]
        assert (ready, of) == (total, "of"), found["plan"]
        assert int(total) >= 2
