"""The examples give one device's numbers on any number of workers."""

from __future__ import annotations

import example_steps
import pytest
import torch
from pool import Pool

from parallax.config import RUN_OPTIONS

SHORT = {("lm", 4), ("resnet", 2), ("dlrm", 3), ("nmt", 2)}
WORLDS = [
    pytest.param(example, size, marks=[] if (example, size) in SHORT else [pytest.mark.long])
    for example in example_steps.EXAMPLES
    for size in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("example", "size"), WORLDS)
def test_example_equals_one_device(pool: Pool, example: str, size: int) -> None:
    for option in RUN_OPTIONS:
        for found in pool.run(size, example_steps.compare, example, option, torch.float32):
            assert found["parameters"] < 1e-5, (option, found)
            assert found["slots"] < 1e-5, (option, found)


@pytest.mark.long
@pytest.mark.parametrize("example", example_steps.EXAMPLES)
def test_example_equals_one_device_in_float64(pool: Pool, example: str) -> None:
    for seed in (5, 6):
        for option in RUN_OPTIONS:
            found = pool.run(4, example_steps.compare, example, option, torch.float64, seed)[0]
            assert max(found.values()) < 1e-10, (option, found)
