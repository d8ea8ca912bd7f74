"""Numbers of shards: asked for, searched, and changed while training goes on."""

from __future__ import annotations

import partitions
import pytest
import torch
from errors_help import raised
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from torch import nn

import parallax
from parallax.errors import ConfigError
from parallax.runtime.state.resharding import MEASURED, WARM
from parallax.strategy.data import Strategy, VariableStrategy
from parallax.strategy.partitions import PartitionSearch, fit, partitioned


def searched(least: int, most: int, seconds: dict[int, float]) -> PartitionSearch:
    search = PartitionSearch(least, most)
    while not search.done:
        search.tell(seconds[search.current])
    return search


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0, 10), st.floats(0, 1), st.floats(0.01, 10), st.integers(1, 40), st.integers(0, 400)
)
def test_the_search_finds_the_fastest_number(
    a: float, b: float, c: float, least: int, more: int
) -> None:
    """Of times that have the three terms; in 60 steps at most."""
    most = least + more
    seconds = {count: a / count + b * (count - 1) + c for count in range(least, most + 1)}
    search = searched(least, most, seconds)
    assert least <= search.current <= most
    assert seconds[search.current] <= 1.05 * min(seconds.values())
    assert len(search.measured) * (WARM + MEASURED) <= 60


def test_the_search_doubles_then_halves() -> None:
    seconds = {count: abs(count - 6) + 1.0 for count in range(1, 17)}
    search = PartitionSearch(1, 16)
    tried = []
    while not search.done:
        tried.append(search.current)
        search.tell(seconds[search.current])
    assert tried == [4, 8, 2]
    assert PartitionSearch(3, 3).done
    assert searched(1, 2, {1: 1.0, 2: 2.0}).current == 1


def test_terms_are_fitted_and_not_negative() -> None:
    assert fit({1: 6.0, 2: 4.5, 4: 5.25}) == pytest.approx((5.0, 1.0, 1.0))
    assert fit({1: 6.0, 2: 4.5}) is None
    a, b, c = fit({1: 1.0, 2: 5.0, 4: 9.0}) or (9.0, 9.0, 9.0)
    assert (a, b > 0) == (0.0, True)
    a, b, c = fit({1: 5.0, 2: 5.0, 4: 5.0}) or (9.0, 9.0, 9.0)
    assert (a, b, c) == pytest.approx((0.0, 0.0, 5.0), abs=1e-9)


def test_shards_are_spread_over_workers() -> None:
    rows = VariableStrategy("rows", partition="cyclic", owners=tuple(range(8)), why="sparse")
    both = {"t": rows, "d": VariableStrategy("allreduce")}
    found = partitioned(Strategy("", 8, both), {"t": 3, "d": 2}).variables
    assert found["t"].owners == (0, 2, 5)
    assert found["t"].why == "sparse, in 3 partitions"
    assert found["d"] == both["d"]


@pytest.mark.parametrize("least", [0, -1, True, 1.0, "2"])
def test_a_number_of_shards_is_positive(least: object) -> None:
    call = parallax.get_partitioner
    raised(lambda: call(least), ConfigError, "min_partitions must be a positive integer")  # type: ignore[arg-type]


def test_a_partitioner_marks_tables() -> None:
    partitioner = parallax.get_partitioner(2)
    table, weight = nn.Embedding(3, 2), nn.Parameter(torch.ones(3, 2))
    assert partitioner(table) is table
    assert partitioner(weight) is weight
    text = "takes a module or a parameter, found Tensor"
    raised(lambda: partitioner(torch.ones(2)), ConfigError, text)  # type: ignore[type-var]


def test_rows_are_dealt_anew(pool: Pool) -> None:
    for rows, old, new in [(11, (0, 1, 2, 3), (2,)), (10, (3, 1), (0, 2, 1)), (2, (0,), (1, 2, 3))]:
        assert pool.run(4, partitions.dealt, rows, old, new) == [True] * 4


def test_the_least_number_is_taken_without_a_search(pool: Pool) -> None:
    for found in pool.run(3, partitions.train, 2, False, 3):
        assert set(found["owners"]) == {(0, 1)}
        assert found["difference"] < 1e-10
        assert "in 2 partitions" in found["plan"]
    for found in pool.run(2, partitions.train, 5, False, 2):
        assert set(found["owners"]) == {(0, 1)}


def test_a_search_changes_shards_and_keeps_the_numbers(pool: Pool) -> None:
    steps = 4 * (WARM + MEASURED)
    chief, *others = pool.run(4, partitions.train, 1, True, steps)
    counts = [len(owners) for owners in chief["owners"]]
    # Two workers at first, then all, then one.
    assert list(dict.fromkeys(counts))[:2] == [2, 4]
    assert chief["difference"] < 1e-10
    (summary,) = [text for text in chief["said"] if "partitions after" in text]
    assert summary.startswith(f"{counts[-1]} partitions after ")
    for other in others:
        assert other["owners"] == chief["owners"]
        assert other["difference"] < 1e-10
        assert [text for text in other["said"] if "partitions after" in text] == []
