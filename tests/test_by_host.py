"""Dense gradients on several hosts: summed inside a host before they cross to another."""

from __future__ import annotations

import re

import by_host
import pytest
from pool import HOSTS, Pool

from parallax.cluster.network import Level, Network

CASES = [("dense", "adam", "clip_norm"), ("tied", "momentum", "average"), ("sparse", "sgd", "none")]


@pytest.mark.parametrize("hosts", HOSTS[:2], ids=str)
@pytest.mark.parametrize("option", ["HYBRID", "AR"])
def test_two_levels_give_the_numbers_of_one_device(
    pool: Pool, option: str, hosts: tuple[int, ...]
) -> None:
    for found in pool.run(hosts, by_host.compare, option, CASES):
        assert all(difference <= 1e-10 for difference in found.values()), found


def test_two_levels_send_less_between_hosts(pool: Pool) -> None:
    flat = pool.run(HOSTS[0], by_host.across, False)
    levels = pool.run(HOSTS[0], by_host.across, True)
    size = flat[0]["bytes"]
    assert all(item["hierarchy"] == {"flat"} for item in flat)
    assert all(item["hierarchy"] == {"hosts"} for item in levels)
    # Two of four neighbours in the ring are on another host; a rail has half of the gradients.
    assert sum(item["sent"] for item in flat) == pytest.approx(2 * 2 * 3 / 4 * size, rel=0.01)
    assert sum(item["sent"] for item in levels) == pytest.approx(4 * 2 / 2 * size / 2, rel=0.01)
    assert "dense, by host" in levels[0]["plan"]


def test_the_network_decides() -> None:
    fast, slow = Level(2, 1e10, 1e-6), Level(2, 1e6, 1e-3)
    assert Network(Level(4, 1e6, 1e-3)).all_reduce_by_host(1e6) == pytest.approx(1.502)
    two = Network(Level(4, 1e6, 1e-3), fast, slow)
    assert two.all_reduce_by_host(1e6) == pytest.approx(0.502, rel=0.01)
    assert two.whole.all_reduce(1e6) == pytest.approx(1.502)
    even = Network(Level(4, 1e9, 1e-5), Level(2, 1e9, 1e-5), Level(2, 1e9, 1e-5))
    assert even.all_reduce_by_host(1e6) > even.whole.all_reduce(1e6)


@pytest.mark.parametrize("size", [1, 3, HOSTS[0], HOSTS[2]], ids=str)
def test_links_are_measured_alike_on_all_workers(pool: Pool, size: int | tuple[int, ...]) -> None:
    found = pool.run(size, by_host.measured)
    assert all(network == found[0] for network in found)
    network = found[0]
    assert (network.host is not None) == (size == HOSTS[0])
    levels = [network.whole] + [x for x in (network.host, network.rail) if x is not None]
    assert [level.workers for level in levels] == {1: [1], 3: [3]}.get(
        size if isinstance(size, int) else 0, [4, 2, 2] if size == HOSTS[0] else [4]
    )
    if size != 1:
        for level in levels:
            assert 1e6 < level.bandwidth < 1e12
            assert 1e-6 < level.latency < 1


def test_the_plan_tells_time(pool: Pool) -> None:
    text = pool.run(2, by_host.across, False)[0]["plan"]
    assert re.search(r"network: [\d,]+ MB/s from each worker, \d+\.\d\d ms", text)
    assert re.search(r"messages of a step, predicted: [\d,.]+ ms", text)
    assert re.search(r"measured: [\d,.]+ ms a step, [\d,.]+ ms of it waiting", text)
