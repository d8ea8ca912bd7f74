"""Several hosts: dense gradients are summed, and rows merged, before they cross to another."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import by_host
import pytest
import torch
from by_host import FLAT
from by_host import HOSTS as BY_HOST
from cells import sampled
from pool import HOSTS, Pool
from strategies import built

from parallax.cluster.network import Level, Network
from parallax.graph.analysis.variables import Variable
from parallax.strategy import hierarchy
from parallax.strategy.cost import bytes_across, bytes_per_step, communication_seconds
from parallax.strategy.data import VariableStrategy

CASES = [("dense", "adam", "clip_norm"), ("tied", "momentum", "average"), ("sparse", "sgd", "none")]


@pytest.mark.parametrize(
    ("option", "hosts"), sampled(itertools.product(("HYBRID", "AR"), HOSTS[:2]), 3), ids=str
)
def test_two_levels_give_the_numbers_of_one_device(
    pool: Pool, option: str, hosts: tuple[int, ...]
) -> None:
    for found in pool.run(hosts, by_host.compare, option, CASES, BY_HOST):
        assert all(difference <= 1e-10 for difference in found.values()), found


def test_two_levels_send_less_between_hosts(pool: Pool) -> None:
    flat = pool.run(HOSTS[0], by_host.across, FLAT)
    levels = pool.run(HOSTS[0], by_host.across, BY_HOST)
    size = flat[0]["bytes"]
    assert all(item["hierarchy"] == {"flat"} for item in flat)
    assert all(item["hierarchy"] == {"hosts"} for item in levels)
    # Two of four neighbours in the ring are on another host; a rail has half of the gradients.
    assert sum(item["sent"] for item in flat) == pytest.approx(2 * 2 * 3 / 4 * size, rel=0.01)
    assert sum(item["sent"] for item in levels) == pytest.approx(4 * 2 / 2 * size / 2, rel=0.01)
    assert "allreduce, by host" in levels[0]["plan"]
    assert "rows, by host" in levels[0]["plan"]
    assert re.search(r"sent per worker and step, [\d.]+ MB of it to other hosts", flat[0]["plan"])
    assert "by host" not in flat[0]["plan"]


@pytest.mark.parametrize("levels", [FLAT, BY_HOST])
@pytest.mark.parametrize("option", ["HYBRID", "PS", "AR"])
def test_what_crosses_equals_the_formula(pool: Pool, option: str, levels: str) -> None:
    found = pool.run(HOSTS[0], by_host.formulas, option, levels)
    for kind in ("sent", "across"):
        sent = sum(item[kind] for item in found)
        assert sent == pytest.approx(sum(item[f"{kind} by formula"] for item in found), rel=0.05)
    assert 0 < found[0]["across"] < found[0]["sent"]


@pytest.mark.long
def test_two_levels_of_the_language_model() -> None:
    """4 hosts x 2 workers.

    Words by Zipf's law leave less to merge inside a host than its number of workers suggests: two
    batches have mostly rare words that the other has not. What is sent is what must be.
    """
    hosts = (0, 0, 1, 1, 2, 2, 3, 3)
    pool = Pool(len(hosts), (hosts,))
    try:
        flat = pool.run(hosts, by_host.language_model, FLAT)
        levels = pool.run(hosts, by_host.language_model, BY_HOST)
    finally:
        pool.close()
    total = {
        (name, kind): sum(item[kind] for item in found)
        for name, found in (("flat", flat), ("hosts", levels))
        for kind in ("across", "formula", "lookups")
    }
    assert flat[0]["tables"] == 3
    for name in ("flat", "hosts"):
        assert total[name, "across"] == pytest.approx(total[name, "formula"], rel=0.02)
    share = total["hosts", "across"] / total["flat", "across"]
    # One message for each word that is looked up, which is what a parameter server gets whose
    # workers do not look for words that occur twice.
    each = total["flat", "lookups"] * 3 / 4
    print(f"two levels send {share:.3f} of one, {total['hosts', 'across'] / each:.3f} of all words")
    assert share < 0.92
    assert total["hosts", "across"] < 0.6 * each


FAST, SLOW = Level(2, 1e10, 1e-6), Level(2, 1e6, 1e-3)
SLOW_RAIL = Network(Level(4, 1e6, 1e-3), FAST, SLOW)
EVEN = Network(Level(4, 1e9, 1e-5), Level(2, 1e9, 1e-5), Level(2, 1e9, 1e-5))


TABLE = Variable("t", (1000, 16), torch.float32, True, lookups=("embedding",), sparse=True)
DENSE = Variable("d", (500, 20), torch.float32, True)


def test_the_network_decides() -> None:
    big = Variable("b", (500, 500), torch.float32, True)
    flat, levels = VariableStrategy("allreduce"), VariableStrategy("allreduce", hierarchy="hosts")

    def seconds(choice: VariableStrategy, network: Network) -> float:
        return communication_seconds([(big, choice)], network)

    assert seconds(levels, Network(Level(4, 1e6, 1e-3))) == pytest.approx(1.502)
    assert seconds(levels, SLOW_RAIL) == pytest.approx(0.502, rel=0.01)
    assert seconds(flat, SLOW_RAIL) == pytest.approx(1.502)
    assert seconds(levels, EVEN) > seconds(flat, EVEN)
    sums = Network(Level(4, 1e6, 1e-3, summing=2e6))
    assert seconds(flat, sums) == pytest.approx(0.752)
    assert seconds(VariableStrategy("broadcast"), sums) == pytest.approx(3.001)


def test_each_kind_gets_two_levels_where_that_is_faster() -> None:
    def levels(table: Variable, network: Network) -> dict[str, str]:
        strategy = built("HYBRID", [table, DENSE], 4)
        chosen = hierarchy.by_host(strategy, [table, DENSE], network)
        return {name: one.hierarchy for name, one in chosen.variables.items()}

    table = replace(TABLE, sparsity=0.1)
    half = replace(table, host_rows=100.0)
    assert levels(half, SLOW_RAIL) == {"t": "hosts", "d": "hosts"}
    assert levels(half, EVEN) == {"t": "flat", "d": "flat"}
    assert levels(half, Network(Level(4, 1e6, 1e-3))) == {"t": "flat", "d": "flat"}
    # Nothing in common, and inside a host is no faster than between hosts: once more for nothing.
    apart = replace(table, host_rows=200.0)
    assert (
        levels(apart, Network(Level(4, 1e6, 0.0), Level(2, 1e6, 0.0), Level(2, 1e6, 0.0)))["t"]
        == "flat"
    )


def test_formulas_of_several_hosts() -> None:
    table = replace(TABLE, sparsity=0.1)
    rows, row = 100, 2 * 64 + 4
    flat, hosts = VariableStrategy("rows"), VariableStrategy("rows", hierarchy="hosts")
    assert bytes_across(table, flat, 8, 4) == pytest.approx(3 / 4 * rows * row)
    assert bytes_across(table, flat, 8, 1) == 0
    # At most what its workers touch one by one, and no more than there is.
    assert bytes_across(table, hosts, 8, 4) == pytest.approx(3 / 4 * 2 * rows * row / 2)
    most = replace(table, sparsity=0.9)
    assert bytes_across(most, hosts, 8, 4) == pytest.approx(3 / 4 * 1000 * row / 2)
    measured = replace(table, host_rows=120.0)
    assert bytes_across(measured, hosts, 8, 4) == pytest.approx(3 / 4 * 120 * row / 2)
    assert bytes_per_step(measured, hosts, 8, 4) == pytest.approx(
        rows * row / 2 + 3 / 4 * 120 * row / 2
    )
    ring, levels = VariableStrategy("allreduce"), VariableStrategy("allreduce", hierarchy="hosts")
    assert bytes_across(DENSE, ring, 8, 4) == pytest.approx(2 * 7 / 8 * 40_000 / 2)
    assert bytes_across(DENSE, levels, 8, 4) == pytest.approx(2 * 3 / 4 * 40_000 / 2)
    assert bytes_per_step(DENSE, levels, 8, 4) == bytes_per_step(DENSE, ring, 8)
    gather = VariableStrategy("allgather")
    assert bytes_across(table, gather, 8, 4) == pytest.approx(6 * rows * (64 + 8))
    owner = VariableStrategy("owner", owners=(0,))
    assert bytes_across(DENSE, owner, 8, 4) == pytest.approx(2 * 3 / 4 * 40_000)
    around = VariableStrategy("owner", owners=(0,), reduction="ring")
    assert bytes_across(DENSE, around, 8, 4) == pytest.approx(2 * 7 / 8 * 40_000 / 2)
    seconds = communication_seconds([(measured, hosts)], SLOW_RAIL)
    assert seconds == pytest.approx(3e-3 + bytes_across(measured, hosts, 4, 2) / 1e6, rel=0.01)


@pytest.mark.parametrize(("processing", "wanted"), [(0.0, "flat"), (1e-6, "hosts")])
def test_what_processors_do_for_messages_decides_as_well(processing: float, wanted: str) -> None:
    """A sum among all is a little faster, but workers of one host send to each other in it."""
    whole = Level(4, 1e6, 0.0, processing, 1.2e6)
    network = Network(whole, FAST, Level(2, 0.38e6, 0.0), Level(2, 1e10, 0.0))
    chosen = hierarchy.by_host(built("AR", [DENSE], 4), [DENSE], network)
    assert chosen.variables["d"].hierarchy == wanted


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
    text = pool.run(2, by_host.across, FLAT)[0]["plan"]
    assert re.search(r"network: [\d,]+ MB/s from each worker, \d+\.\d\d ms", text)
    assert re.search(r"messages of a step, predicted: [\d,.]+ ms", text)
    assert re.search(r"measured: [\d,.]+ ms a step, [\d,.]+ ms of it waiting", text)
