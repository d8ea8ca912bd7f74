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
