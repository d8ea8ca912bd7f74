"""Objects that keep their runner, data and results beside the model."""

from __future__ import annotations

import pytest
import trainers
from pool import Pool


@pytest.mark.parametrize("workers", [1, 2])
def test_a_trainer_that_keeps_everything_in_itself(pool: Pool, workers: int) -> None:
    for found in pool.run(workers, trainers.compare):
        assert found["difference"] < 1e-10, found
        assert found["steps"] == trainers.STEPS
        assert found["data"], "the worker's own data were changed"
        # Neither the data, nor losses, nor what the runner itself holds.
        averages = [f"self.average.{name}" for name in ("0.bias", "0.weight", "2.bias", "2.weight")]
        others = ["model", "optimizer", "self.steps"]
        assert found["names"] == sorted([*averages, *others]), found
