"""What a worker's batch counts in a mean is decided for all workers together."""

from __future__ import annotations

import itertools

import pytest
import weights
from cells import sampled
from pool import Pool

from parallax.strategy.builders import Encoded, StrategyBuilder


@pytest.mark.parametrize(
    ("name", "by_rows", "weigh"),
    [
        ("bags", False, True),
        ("bags", False, False),
        ("equal by chance", False, True),
        ("equal for once", False, True),
        ("equal on one", False, False),
        ("recurrent", True, True),
        ("LSTM", True, True),
        ("attention", True, True),
        ("rows", True, True),
        ("rows", False, False),
    ],
)
def test_all_workers_count_in_the_same_way(
    pool: Pool, name: str, by_rows: bool, weigh: bool
) -> None:
    for found in pool.run(2, weights.compare, name, by_rows, weigh):
        assert isinstance(found, float), found
        assert found < 1e-12


STRATEGIES = ["PS", "ZeRO", "Poseidon", "ProjectAdam", "Horovod", "auto", Encoded("bf16")]


@pytest.mark.parametrize(
    ("name", "strategy"),
    sampled(itertools.product(("recurrent", "LSTM", "attention"), STRATEGIES), 4),
    ids=lambda one: one if isinstance(one, str) else one.title,
)
def test_workers_may_make_gradients_in_another_order(
    pool: Pool, name: str, strategy: StrategyBuilder | str
) -> None:
    for found in pool.run(2, weights.compare, name, True, True, strategy, 0.05):
        assert isinstance(found, float), found
        assert found < 1e-12


@pytest.mark.parametrize(
    ("strategy", "world"),
    sampled(itertools.product(("PS", "ZeRO", "Poseidon"), (3, (0, 0, 1, 1))), 3),
    ids=str,
)
def test_several_workers_may_have_no_rows(
    pool: Pool, world: int | tuple[int, ...], strategy: str
) -> None:
    for found in pool.run(world, weights.compare, "recurrent", True, True, strategy, 0.05):
        assert isinstance(found, float), found
        assert found < 1e-12


@pytest.mark.parametrize("strategy", ["HYBRID", "PS", "ZeRO"])
def test_workers_may_go_backward_in_several_numbers_of_pieces(pool: Pool, strategy: str) -> None:
    for found in pool.run(2, weights.micro_batches, strategy):
        assert found < 1e-12


def test_batches_that_have_rows_on_one_worker_only_are_refused(pool: Pool) -> None:
    for found in pool.run(2, weights.compare, "equal on one", False, True):
        assert isinstance(found, str)
        assert found.startswith("DisagreementError")
        assert "have the same first size on some workers only" in found
        assert "Config(weigh_batches=False)" in found
