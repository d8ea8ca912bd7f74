"""What workers hold of a table: a quarter each, in the end and, if deferred, at every moment."""

from __future__ import annotations

import big_table
import pytest
from pool import Pool

WORKERS = 4
# What a worker that has trained a small table already holds (modules, generated code) is its base;
# beyond it, arenas of the allocator and blocks of the update. Documented in docs/performance.md.
CONSTANT = 128 << 20
SMALL = 1000
# The batch: looked-up rows and their gradients on both sides of the exchange.
ACTIVATIONS = 8 * big_table.BATCH * big_table.WIDTH * 4 * WORKERS


@pytest.mark.long
@pytest.mark.timeout(600)
def test_resident_memory_is_a_share_of_table_and_slots() -> None:
    pool = Pool()
    try:
        share = big_table.STATE_BYTES // WORKERS + ACTIVATIONS + CONSTANT
        pool.run(WORKERS, big_table.train, SMALL, False)
        for found in pool.run(WORKERS, big_table.train, big_table.ROWS, False):
            assert found["first"] - found["before"] <= share, found
            assert found["second"] - found["before"] <= share, found
    finally:
        pool.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_deferred_tables_never_take_more_than_their_share() -> None:
    pool = Pool()
    try:
        share = big_table.STATE_BYTES // WORKERS + ACTIVATIONS + CONSTANT
        pool.run(WORKERS, big_table.train, SMALL, True)
        for found in pool.run(WORKERS, big_table.train, big_table.ROWS, True):
            assert found["peak"] - found["before"] <= share, found
            assert found["peak"] - found["before"] < big_table.TABLE_BYTES, found
    finally:
        pool.close()


def test_a_sharded_table_leaves_the_users_model(pool: Pool) -> None:
    for found in pool.run(3, big_table.what_is_left, 1000):
        assert found["table"] == "meta"
        assert found["slots"] == ["meta", "meta"]
        assert found["shapes"] == [(1000, big_table.WIDTH)] * 3
        assert found["out"] == "cpu"
        assert found["rows"] in (333, 334)
