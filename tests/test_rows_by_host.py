"""Rows on several hosts: merged inside a host before they cross to another."""

from __future__ import annotations

import by_host
import equality
import pytest
import traffic
from by_host import FLAT, MIXED
from by_host import HOSTS as BY_HOST
from pool import HOSTS, Pool

CASES = [
    ("sparse", "adam", "none"),
    ("sparse", "sgd", "clip_norm"),
    ("several", "adagrad", "average"),
    ("lazy", "sparse_adam", "none"),
    ("several", "momentum", "clip_value"),
]


@pytest.mark.parametrize(
    ("option", "hosts"),
    [
        ("HYBRID", HOSTS[0]),
        pytest.param("HYBRID", HOSTS[1], marks=pytest.mark.long),
        pytest.param("AR", HOSTS[1], marks=pytest.mark.long),
        pytest.param("PS", HOSTS[0], marks=pytest.mark.long),
        pytest.param("PS", HOSTS[1], marks=pytest.mark.long),
        pytest.param("AR", HOSTS[0], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_hosts_give_the_numbers_of_one_device(
    pool: Pool, option: str, hosts: tuple[int, ...]
) -> None:
    for found in pool.run(hosts, by_host.compare, option, CASES, BY_HOST):
        assert all(difference <= 1e-10 for difference in found.values()), found


def test_hosts_of_different_sizes_give_the_numbers_of_one_device(pool: Pool) -> None:
    for found in pool.run(HOSTS[2], equality.compare, "HYBRID", CASES):
        assert all(difference <= 1e-10 for difference in found.values()), found


def test_one_level_and_two_give_the_same_numbers(pool: Pool) -> None:
    """Also if some tables of a step take one and some the other."""
    flat, hosts, mixed = (
        pool.run(HOSTS[0], by_host.losses, levels) for levels in (FLAT, BY_HOST, MIXED)
    )
    for one, other, third in zip(flat, hosts, mixed, strict=True):
        assert (one["levels"], other["levels"]) == (["flat"] * 3, ["hosts"] * 3)
        assert third["levels"] == ["flat", "hosts", "flat"]
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert third["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert one["losses"][-1] != pytest.approx(one["losses"][0], rel=1e-3)


@pytest.mark.parametrize("hosts", HOSTS[:2], ids=str)
def test_a_row_crosses_to_a_host_once(pool: Pool, hosts: tuple[int, ...]) -> None:
    """Rows that a host's workers need of another host: there and back, and their ids."""
    found = pool.run(hosts, by_host.rows_across, BY_HOST)
    remote = 0
    for step in range(traffic.STEPS):
        for host in set(hosts):
            mine = {
                i for w, item in enumerate(found) if hosts[w] == host for i in item["ids"][step]
            }
            remote += len([i for i in mine if hosts[i % len(hosts)] != host])
    count = remote / traffic.STEPS
    rows = sum(item["rows"] for item in found)
    assert rows == pytest.approx(count * 2 * 4 * traffic.WIDTH, rel=1e-6)
    assert sum(item["ids sent"] for item in found) == pytest.approx(count * 4, rel=1e-6)


def test_hosts_of_different_sizes_exchange_directly(pool: Pool) -> None:
    found = pool.run(HOSTS[2], traffic.across_hosts)
    assert sum(item["rows"] for item in found) > 0
