"""Updates of dense variables that the step which follows finishes."""

from __future__ import annotations

import itertools

import late
import pytest
from by_host import FLAT
from by_host import HOSTS as BY_HOST
from cells import sampled
from equality import STEPS
from pool import HOSTS, Pool

SPARSE = [
    ("sparse", "sgd", "none"),
    ("several", "momentum", "average"),
    ("lazy", "adagrad", "none"),
    ("sparse", "adam", "clip_value"),
    ("several", "adamw", "none"),
]


@pytest.mark.parametrize(
    ("case", "option", "size"),
    sampled(itertools.product(SPARSE, ("HYBRID", "AR"), (2, 3)), 3),
    ids=str,
)
def test_numbers_are_those_of_one_device(
    pool: Pool, case: tuple[str, str, str], option: str, size: int
) -> None:
    for differences, found in pool.run(size, late.cases, option, [case]):
        assert max(differences.values()) <= 1e-10
        assert found >= STEPS - 3


EXAMPLES = [
    ("dlrm", "HYBRID", STEPS - 2),
    ("nmt", "AR", STEPS - 2),
    ("resnet", "AR", 0),
    ("vgg", "AR", 0),
]


@pytest.mark.parametrize(
    ("name", "option", "least", "size"),
    sampled(((*example, size) for example in EXAMPLES for size in (2, 4)), 3),
)
def test_examples(pool: Pool, name: str, option: str, least: int, size: int) -> None:
    for difference, found in pool.run(size, late.example, name, option):
        assert difference <= 1e-10
        assert found >= least


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("levels", [FLAT, BY_HOST])
def test_on_several_hosts(pool: Pool, levels: str, hosts: tuple[int, ...]) -> None:
    if levels == BY_HOST and hosts == HOSTS[2]:
        pytest.skip("two levels are for hosts with equally many workers")
    for difference, found in pool.run(hosts, late.by_levels, levels, ("sparse", "sgd", "none")):
        assert difference <= 1e-10
        assert found >= STEPS - 3


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "nesterov"])
@pytest.mark.parametrize("size", [2, 3])
def test_without_tables_the_last_bucket_is_not_late(pool: Pool, optimizer: str, size: int) -> None:
    for difference, found in pool.run(size, late.dense, ("dense", optimizer, "none")):
        assert difference <= 1e-10
        assert found >= STEPS - 3
    # Clipped together, all wait for the last one.
    for difference, found in pool.run(size, late.dense, ("dense", optimizer, "clip_norm")):
        assert difference <= 1e-10
        assert found == 0


def test_norms_over_shards_are_not_late(pool: Pool) -> None:
    found = pool.run(2, late.cases, "PS", [("sparse", "sgd", "clip_norm")])
    assert [count for _, count in found] == [0, 0]
    assert all(max(differences.values()) <= 1e-10 for differences, _ in found)


def test_state_between_steps_is_complete(pool: Pool) -> None:
    for states, behind in pool.run(2, late.looked_at, ("several", "momentum", "none")):
        assert max(states) <= 1e-10
        assert behind == [True] * (STEPS // 2 - 1)


def test_a_loop_that_is_left(pool: Pool) -> None:
    for difference, found in pool.run(3, late.left_early, ("several", "momentum", "none")):
        assert difference <= 1e-10
        assert 2 <= found <= 5


def test_a_state_that_is_loaded_counts(pool: Pool) -> None:
    assert max(pool.run(2, late.loaded, ("sparse", "sgd", "none"))) <= 1e-10


@pytest.mark.parametrize("place", [1, 5, STEPS - 1])
def test_a_bad_id_leaves_the_step_before_complete(pool: Pool, place: int) -> None:
    for difference, found, errors in pool.run(2, late.bad_id, place):
        assert difference <= 1e-10
        assert found >= STEPS - 5
        assert len(errors) == 1
        assert "Nothing was updated in this step." in errors[0]


@pytest.mark.parametrize("size", [2, 3])
def test_uneven_batches_of_other_sizes(pool: Pool, size: int) -> None:
    for difference, found in pool.run(size, late.uneven):
        assert difference <= 1e-10
        assert found >= 3


def test_a_compiled_step(pool: Pool) -> None:
    for difference, found, plan in pool.run(2, late.compiled, ("several", "momentum", "none")):
        assert difference <= 1e-10
        assert found >= STEPS - 3
        assert "compiled: " in plan
