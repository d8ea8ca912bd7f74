"""Sums of rows that are divided by a sum over the batch are those over all workers' batches."""

from __future__ import annotations

import batch_statistics
import pytest
import summed_rows
from cells import each_once
from pool import Pool

DIVISION = [(4, 4, 4), (6, 2, 3), (3, 5, 1), (5, 3, 2)]
SETTINGS = [(2, "HYBRID"), (3, "HYBRID"), (2, "PS"), (3, "AR")]


@pytest.mark.parametrize(("name", "size", "strategy"), each_once(summed_rows.LOSSES, SETTINGS))
def test_the_numbers_of_one_device(pool: Pool, name: str, size: int, strategy: str) -> None:
    division = [counts[:size] for counts in DIVISION]
    loss = summed_rows.LOSSES[name]
    most = 1e-6 if name == "of labels" else 1e-12  # which has weights of single floats
    batch_statistics.assert_as_on_one_device(pool, size, loss, division, strategy, most)


def test_what_is_not_only_summed(pool: Pool) -> None:
    division = [counts[:2] for counts in DIVISION]
    for far, sent, said in pool.run(
        2, batch_statistics.train, summed_rows.twice, division, "HYBRID"
    ):
        assert far < 1e-12
        assert not sent  # but rows are
        assert not said
