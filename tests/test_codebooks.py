"""Codebooks of averages over what all places of all workers' images are nearest to."""

from __future__ import annotations

import codebooks
import pytest
from cells import each_once
from pool import Pool

DIVISION = [(4, 4, 4), (6, 2, 3), (3, 5, 1), (5, 3, 2)]


@pytest.mark.parametrize(
    ("kind", "size", "strategy"),
    each_once(codebooks.KINDS, [(2, "HYBRID"), (3, "HYBRID"), (2, "PS")]),
)
def test_the_numbers_of_one_device(pool: Pool, kind: str, size: int, strategy: str) -> None:
    division = [counts[:size] for counts in DIVISION]
    for far, said in pool.run(size, codebooks.train, kind, division, strategy):
        assert far < 1e-12
        assert not said
