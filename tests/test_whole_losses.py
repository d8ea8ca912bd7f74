"""Losses of covariances, norms and logarithms of sums are those of all workers' batches in one."""

from __future__ import annotations

import batch_statistics
import pytest
import whole_losses
from cells import each_once
from pool import Pool

DIVISION = [(4, 4, 4), (6, 2, 3), (3, 5, 3), (5, 3, 2)]
SETTINGS = [(2, "HYBRID"), (3, "HYBRID"), (2, "PS"), (3, "AR")]


@pytest.mark.parametrize(("name", "size", "strategy"), each_once(whole_losses.LOSSES, SETTINGS))
def test_the_numbers_of_one_device(pool: Pool, name: str, size: int, strategy: str) -> None:
    division = [counts[:size] for counts in DIVISION]
    loss = whole_losses.LOSSES[name]
    batch_statistics.assert_as_on_one_device(pool, size, loss, division, strategy, 1e-10)


GATHERED = {**whole_losses.GATHERED, **batch_statistics.GATHERED}


@pytest.mark.parametrize(("name", "size", "strategy"), each_once(GATHERED, SETTINGS))
def test_what_cannot_be_put_together(pool: Pool, name: str, size: int, strategy: str) -> None:
    division = [counts[:size] for counts in DIVISION]
    loss = whole_losses.GATHERED.get(name, name)
    for far, _, said in pool.run(size, batch_statistics.train, loss, division, strategy):
        assert far < 1e-10
        assert not said


def test_a_batch_of_one_row_and_one_of_none(pool: Pool) -> None:
    division = [(4, 4), (3, 1), (0, 5), (1, 6)]
    for name in ("by einsum", "invariance", "correlation", "by columns"):
        loss = whole_losses.LOSSES[name]
        batch_statistics.assert_as_on_one_device(pool, 2, loss, division, "HYBRID", 1e-10)


def test_rows_in_an_order_are_the_same(pool: Pool) -> None:
    division = [counts[:2] for counts in DIVISION]
    loss = whole_losses.ordered
    for far, sent, said in pool.run(2, batch_statistics.train, loss, division, "HYBRID"):
        assert far < 1e-12
        assert not sent
        assert not said
