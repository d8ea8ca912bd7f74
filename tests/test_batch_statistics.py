"""Numbers of the whole batch that a loss is computed with are those of all workers' batches."""

from __future__ import annotations

import batch_statistics
import pytest
from cells import each_once
from pool import Pool

DIVISION = [(4, 4, 4), (6, 2, 3), (3, 5, 1), (5, 3, 2), (2, 7, 4)]
ROUNDING = 1e-12
BYTES = 512
"""Of a message."""
ROUNDS = {
    "by hand": 2,
    "masked": 2,
    "without gradient": 2,
    "kept anew": 2,
    "of three rounds": 3,
    "correlation": 2,
    "centred": 2,
    "centred by a part": 2,
    "correlation of rows": 4,
    "spread of columns": 2,
    "standardised": 2,
    "concordance": 4,
    "by hand, less one": 2,
}
"""Messages of a step, where there are several."""
COLUMNS = {
    "kept of two views": 8 * (1 + 4),
    "columns": 8 * (1 + 5 + 9),
    "columns on two lines": 8 * (1 + 5 + 9),
    "extremes of columns": 8 * (1 + 5 + 4),
    "weights of columns": 8 * (1 + 4 + 4),
    "shares of columns": 8 * (1 + 4),
    "spread of columns": 8 * (2 + 7 + 4 + 4),
    "overlap of columns": 8 * (1 + 4 + 4),
    "codebook": 8 * (1 + 4 + 13),
    "columns cut off": 8 * (1 + 4),
    "means of columns": 8 * (1 + 4 + 4),
    "weights by counts": 8 * (1 + 4),
}
"""Bytes of columns that they have."""
SETTINGS = [(2, "HYBRID"), (3, "HYBRID"), (2, "PS"), (3, "AR")]


@pytest.mark.parametrize(
    ("name", "size", "strategy"),
    each_once((*batch_statistics.ALIKE, *batch_statistics.LEAVES_OUT), SETTINGS),
)
def test_the_numbers_of_one_device(pool: Pool, name: str, size: int, strategy: str) -> None:
    division = [counts[:size] for counts in DIVISION]
    for far, sent, said in pool.run(size, batch_statistics.train, name, division, strategy):
        assert far < ROUNDING
        assert not said
        sizes = BYTES * ROUNDS.get(name, 1) + COLUMNS.get(name, 0)
        assert sent == sizes * len(division) * (size - 1)


@pytest.mark.parametrize("name", batch_statistics.OTHER_ROUNDS)
def test_messages_start_in_one_order(pool: Pool, name: str) -> None:
    """Of a worker that has nothing for a later one, too."""
    division = [counts[:2] for counts in DIVISION]
    for far, _, _ in pool.run(2, batch_statistics.train, name, division, "HYBRID"):
        assert far < ROUNDING


@pytest.mark.parametrize("name", batch_statistics.LEFT)
def test_what_stays_each_workers_own_is_told(pool: Pool, name: str) -> None:
    division = [counts[:2] for counts in DIVISION]
    first, second = pool.run(2, batch_statistics.train, name, division, "HYBRID")
    assert first[0] > 1e-4
    assert any("batch_statistics.py" in text for text in (*first[2], *second[2]))


@pytest.mark.parametrize("name", batch_statistics.WITHOUT)
def test_what_is_none_sends_nothing(pool: Pool, name: str) -> None:
    division = [counts[:2] for counts in DIVISION]
    for far, sent, said in pool.run(2, batch_statistics.train, name, division, "HYBRID"):
        assert sent == 0
        assert far < ROUNDING or name in ("size", "logged")
        assert not any("of each worker's own batch" in text for text in said)
