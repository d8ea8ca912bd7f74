"""All row-reading operations are recognised, and give one device's numbers."""

from __future__ import annotations

import lookup_kinds
import pytest
from pool import Pool

from parallax.config import RUN_OPTIONS


@pytest.mark.parametrize("option", RUN_OPTIONS)
@pytest.mark.parametrize("kind", lookup_kinds.KINDS)
def test_lookup_equals_one_device(pool: Pool, kind: str, option: str) -> None:
    for found in pool.run(3, lookup_kinds.compare, kind, option):
        assert found["difference"] < 1e-10
        # Maxima remember ids, and rows that choose rows need two exchanges: both are dense.
        if kind in ("max", "rows_of_rows"):
            assert not found["sparse"]
        else:
            assert found["sparse"], found["reason"]


@pytest.mark.parametrize("lazy", ["adagrad", "sparse_adam"])
@pytest.mark.parametrize("kind", ["sum-lazy", "mean-lazy"])
def test_slots_of_sparse_gradients_are_sharded(pool: Pool, kind: str, lazy: str) -> None:
    for option in ("HYBRID", "PS"):
        for found in pool.run(3, lookup_kinds.compare, kind, option, lazy):
            assert found["obstacle"] == ""
            assert found["synchronizer"] in ("rows", "bags")
            assert max(found["difference"], found["slots"]) < 1e-10, (option, found)


def test_the_plan_says_why_a_table_is_dense(pool: Pool) -> None:
    found = pool.run(2, lookup_kinds.compare, "rows_of_rows", "HYBRID")[0]
    assert found["reason"] == "ids of one lookup depend on the rows of another"
