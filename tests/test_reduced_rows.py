"""Numbers that rows of the batch are reduced to are those of all workers' rows."""

from __future__ import annotations

import compared_training
import pytest
import reduced_rows
from cells import each_once
from pool import Pool

from parallax.graph.analysis.mixed_rows import may_compare_rows
from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover

DIVISION = [(4, 4, 4), (6, 2, 3), (3, 5, 3)]
SMALL = [(4, 4), (1, 7), (0, 5), (5, 2)]
NUMBERS = [
    "entropy of the mean",
    "spread of the batch",
    "relative to the mean",
    "weights of tasks",
    "losses without a gradient",
    "calibration",
]
"""Of which workers put numbers together, and no rows."""
SETTINGS = [(2, "HYBRID"), (3, "HYBRID"), (2, "PS"), (3, "AR")]


@pytest.mark.parametrize(("name", "size", "strategy"), each_once(reduced_rows.LOSSES, SETTINGS))
def test_the_numbers_of_one_device(pool: Pool, name: str, size: int, strategy: str) -> None:
    division = [counts[:size] for counts in DIVISION]
    for far, moved, _, said in pool.run(size, compared_training.train, name, division, strategy):
        assert far < 1e-12
        assert moved > 1e-4
        assert not said


@pytest.mark.parametrize("name", NUMBERS)
def test_sizes_that_are_equal_by_chance(pool: Pool, name: str) -> None:
    """Of a batch of one row, and one with as many rows as a vector has numbers."""
    division = [(5, 4, 6), (3, 1, 5), (1, 4, 3)]
    for far, _, _, said in pool.run(3, compared_training.train, name, division, "HYBRID"):
        assert far < 1e-12
        assert not said


@pytest.mark.parametrize("name", ["by group", "a share of the hardest"])
def test_batches_of_one_row_and_of_none(pool: Pool, name: str) -> None:
    for far, _, _, said in pool.run(2, compared_training.train, name, SMALL, "HYBRID"):
        assert far < 1e-12
        assert not said


@pytest.mark.parametrize("name", [name for name in reduced_rows.LOSSES if name not in NUMBERS])
def test_it_is_seen_in_the_graph_of_one_batch(name: str) -> None:
    _, training = compared_training.towers()
    step = training(reduced_rows.LOSSES[name])
    (batch,) = compared_training.batches([(4,)])[0]
    assert may_compare_rows(capture(step, discover(step), batch, {}))


def test_as_many_singular_values_as_rows(pool: Pool) -> None:
    """By chance, on every worker."""
    division = [(3, 2, 3), (4, 2, 2)]
    for far, _, _, said in pool.run(
        3, compared_training.train, "singular values", division, "HYBRID"
    ):
        assert far < 1e-12
        assert not said
