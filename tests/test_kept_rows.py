"""State that steps make of rows of the batch is that of one device: queues of keys, banks of
features, moments of what was seen."""

from __future__ import annotations

import kept_rows
import pytest
from cells import each_once
from pool import Pool

DIVISION = [(4, 4, 4), (6, 2, 4), (3, 5, 4), (5, 3, 4)]
SETTINGS = [(2, "HYBRID"), (3, "HYBRID"), (2, "PS"), (3, "AR")]


@pytest.mark.parametrize(("name", "size", "strategy"), each_once(kept_rows.LOSSES, SETTINGS))
def test_the_state_of_one_device(pool: Pool, name: str, size: int, strategy: str) -> None:
    division = [counts[:size] for counts in DIVISION]
    for far, sent, said in pool.run(size, kept_rows.train, name, division, strategy):
        assert far < 1e-12
        assert sent
        assert not said


@pytest.mark.parametrize("name", kept_rows.OWN)
def test_what_is_a_workers_own_is_not_sent(pool: Pool, name: str) -> None:
    division = [(4, 4)] * 3
    for far, sent, said in pool.run(2, kept_rows.train, name, division, "HYBRID"):
        assert far < 1e-12
        assert not sent
        assert not said


@pytest.mark.parametrize("name", kept_rows.TOLD)
def test_what_stays_own_is_told(pool: Pool, name: str) -> None:
    for _, sent, said in pool.run(2, kept_rows.train, name, [(3, 4)], "HYBRID"):
        assert not sent
        (text,) = said
        assert "each worker takes those of its own batch alone" in text
        assert "how many rows a batch has is asked for as a number" in text
        assert "kept_rows.py" in text


@pytest.mark.parametrize("name", ["queue put together", "bank", "moments in buffers"])
def test_batches_of_one_row_and_of_none(pool: Pool, name: str) -> None:
    division = [(3, 4), (1, 5), (0, 6), (2, 0)]
    for far, _, said in pool.run(2, kept_rows.train, name, division, "HYBRID"):
        assert far < 1e-12
        assert not said
