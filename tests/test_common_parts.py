"""What all workers are given alike with their batches has no rows, nor numbers of a batch."""

from __future__ import annotations

import common_parts
import pytest
from pool import Pool

DIVISION = [(4, 4, 4), (6, 2, 3), (3, 5, 1), (1, 3, 2), (7, 5, 4)]
"""Of which some have as many rows as there are classes, or times."""


@pytest.mark.parametrize("name", common_parts.COMMON)
def test_common_parts_stay_as_they_are(pool: Pool, name: str) -> None:
    for far, by_rows, common, said in pool.run(3, common_parts.train, name, DIVISION):
        assert far < 1e-12
        assert by_rows
        assert len(common) == 1
        assert not said


@pytest.mark.parametrize("name", common_parts.FIRST)
def test_what_is_common_is_told_by_the_first_batches(pool: Pool, name: str) -> None:
    _, rows, common = common_parts.FIRST[name]
    for found in pool.run(2, common_parts.agreed, name):
        assert found == (rows or 1, rows is not None, common)


@pytest.mark.parametrize("name", common_parts.OWN)
def test_what_is_alike_by_chance_is_not_common(pool: Pool, name: str) -> None:
    for far, by_rows, common, _ in pool.run(3, common_parts.train, name, DIVISION):
        assert far < 1e-12
        assert by_rows
        assert not common
