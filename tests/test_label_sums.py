"""Sums for each label are those over all workers' batches; those for each row are not."""

from __future__ import annotations

import batch_statistics
import label_sums
import pytest
from cells import each_once
from pool import Pool

DIVISION = [(4, 4, 4), (6, 2, 5), (5, 7, 4), (7, 4, 2)]
SETTINGS = [(2, "HYBRID"), (3, "HYBRID"), (2, "PS"), (3, "AR")]


@pytest.mark.parametrize(("name", "size", "strategy"), each_once(label_sums.LOSSES, SETTINGS))
def test_the_numbers_of_one_device(pool: Pool, name: str, size: int, strategy: str) -> None:
    division = [counts[:size] for counts in DIVISION]
    loss = label_sums.LOSSES[name]
    batch_statistics.assert_as_on_one_device(pool, size, loss, division, strategy, 1e-12)


def test_labels_may_be_as_many_as_rows(pool: Pool) -> None:
    division, loss = [(3, 3), (4, 3), (3, 5)], label_sums.LOSSES["normalised"]
    batch_statistics.assert_as_on_one_device(pool, 2, loss, division, "HYBRID", 1e-12)


def test_labels_beyond_those_expected_count_as_on_one_device(pool: Pool) -> None:
    train, loss = batch_statistics.train, label_sums.more_labels
    ((far, _, _),) = pool.run(1, train, loss, [(4,), (6,), (9,)], "HYBRID")
    assert far < 1e-12
    for far, _, said in pool.run(2, train, loss, [(4, 4), (6, 2)], "HYBRID"):
        assert far < 1e-12
        assert not said


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_sums_for_each_row_stay_own(pool: Pool, rows: int) -> None:
    """Also where rows are as many as a layer is wide."""
    division = [(rows, rows), (rows, rows), (6, 2)]
    loss = label_sums.of_neighbours
    for _, sent, said in pool.run(2, batch_statistics.train, loss, division, "HYBRID"):
        assert not sent
        assert not said
