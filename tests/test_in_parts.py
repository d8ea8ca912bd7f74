"""Large exchanges travel in parts, with the same numbers."""

from __future__ import annotations

import in_parts
import pytest
import torch
from by_host import HOSTS as BY_HOST
from hypothesis import given
from hypothesis import strategies as st
from pool import HOSTS, Pool
from test_reductions import WAYS as IN_ROUNDS
from test_synchronizers_long import WAYS

from parallax.cluster.network import MOST_PARTS, Level, number_of_parts
from parallax.runtime.comm.parts import share_of


@pytest.mark.parametrize(
    ("size", "piece", "parts"),
    [(1e9, 0, 1), (0, 100, 1), (149, 100, 1), (151, 100, 2), (1000, 100, 10)],
)
def test_parts_are_about_as_large_as_a_piece(size: float, piece: int, parts: int) -> None:
    assert number_of_parts(size, piece) == parts
    assert number_of_parts(1e12, 1) == MOST_PARTS


@given(st.integers(0, 50), st.integers(1, 9))
def test_all_of_a_share_travels_once(count: int, parts: int) -> None:
    share = torch.arange(count)
    pieces = [share_of(share, part, parts) for part in range(parts)]
    assert torch.equal(torch.cat(pieces), share)
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_an_exchange_in_parts_brings_the_same(pool: Pool, size: int, parts: int) -> None:
    for same, messages in pool.run(size, in_parts.exchanged, parts):
        assert same
        assert messages == parts


CASES = [
    ("sparse", "sgd", "none"),
    ("several", "momentum", "average"),
    ("lazy", "adagrad", "none"),
    ("dense", "adam", "clip_norm"),
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("option", ["HYBRID", "PS", "AR"])
@pytest.mark.parametrize("late", [False, True])
def test_numbers_are_those_of_one_device(pool: Pool, option: str, size: int, late: bool) -> None:
    for differences, most in pool.run(size, in_parts.equal, option, CASES, late):
        assert max(differences.values()) <= 1e-10
        assert most > 1


@pytest.mark.parametrize("way", ["factors", "factor_push", "owner by columns", "scatter"])
def test_every_synchronizer_that_exchanges_cuts(pool: Pool, way: str) -> None:
    cases = [("dense", "momentum", "clip_norm")]
    for found, most in pool.run(3, in_parts.equal_by, WAYS[way], cases):
        assert all(difference < 1e-10 for difference, _ in found.values())
        assert most > 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", ["ring", "tree", "halving", "scatter", "owner", "one owner"])
def test_messages_between_two_are_cut(pool: Pool, way: str, size: int) -> None:
    cases = [("dense", "momentum", "clip_norm")]
    for found, most in pool.run(size, in_parts.equal_by, IN_ROUNDS[way], cases):
        assert all(difference < 1e-10 for difference, _ in found.values())
        assert most > 1


@pytest.mark.parametrize("kind", ["whole", "dealt", "rows"])
def test_bags_travel_in_parts(pool: Pool, kind: str) -> None:
    for difference, most in pool.run(3, in_parts.bags, kind):
        assert difference <= 1e-10
        assert most > 1


def test_rows_travel_in_parts_between_hosts(pool: Pool) -> None:
    for differences, most in pool.run(HOSTS[0], in_parts.by_levels, BY_HOST):
        assert max(differences.values()) <= 1e-10
        assert most > 1


def test_parts_are_for_links_that_are_as_fast_so(pool: Pool) -> None:
    found = pool.run(2, in_parts.measured, 0.0)
    (network, pieces, most), other = found
    assert other == found[0]
    assert most == MOST_PARTS
    assert network.whole.piece == pieces["rows"] == pieces["dense"] == 1000
    assert network.whole.at_once is not None
    for network, pieces, most in pool.run(2, in_parts.measured, 1e9):
        assert (network.whole.piece, network.whole.at_once) == (0, None)
        assert pieces == {"dense": 0}
        assert most == MOST_PARTS, "they were tried"


def test_an_exchange_without_parts_has_a_speed_of_its_own() -> None:
    level = Level(4, 100.0, 1.0, piece=1000, at_once=50.0)
    assert [level.rate(size) for size in (0, 1000, 1499, 1501)] == [50.0, 50.0, 50.0, 100.0]
    assert level.exchange(1000) == 21.0
    assert level.exchange(2000) == 21.0
    assert Level(4, 100.0, 1.0).exchange(1000) == 11.0
