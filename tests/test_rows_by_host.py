"""Rows on several hosts: merged inside a host before they cross to another."""

from __future__ import annotations

import equality
import pytest
import traffic
from pool import HOSTS, Pool

CASES = [
    ("sparse", "adam", "none"),
    ("sparse", "sgd", "clip_norm"),
    ("several", "adagrad", "average"),
    ("lazy", "sparse_adam", "none"),
    ("several", "momentum", "clip_value"),
]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("option", ["HYBRID", "PS", "AR"])
def test_hosts_give_the_numbers_of_one_device(
    pool: Pool, option: str, hosts: tuple[int, ...]
) -> None:
    for found in pool.run(hosts, equality.compare, option, CASES):
        assert all(difference <= 1e-10 for difference in found.values()), found


@pytest.mark.parametrize("hosts", HOSTS[:2], ids=str)
def test_a_row_crosses_to_a_host_once(pool: Pool, hosts: tuple[int, ...]) -> None:
    """Rows that a host's workers need of another host: there and back, and their ids."""
    found = pool.run(hosts, traffic.across_hosts)
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
