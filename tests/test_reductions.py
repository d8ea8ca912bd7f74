"""Sums by ring, tree, and halving, and gradients sent to all, in any order of the workers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import synchronizers
import torch
from pool import Pool
from torch import nn

from parallax.cluster.network import Level, Network
from parallax.graph.analysis.variables import analyze
from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover
from parallax.graph.objects.state import aliases, leaves
from parallax.ops.reductions import SCHEDULES, Transfer, remote_share, schedule
from parallax.runtime.exchange.sums import in_pieces, touches
from parallax.strategy.builders import ClusterFacts
from parallax.strategy.choose import choose_strategy
from parallax.strategy.timeline import Speed

CASES = {2: [("dense", "momentum", "clip_norm")], 3: [("sparse", "adam", "clip_norm")]}
"""By number of workers; test_synchronizers_long.py has more."""
BLOCKS: dict[str, Any] = {"partition": "block", "owners": "all"}
WAYS: dict[str, dict[str, Any]] = {
    "ring": {"synchronizer": "allreduce", "reduction": "ring"},
    "tree": {"synchronizer": "allreduce", "reduction": "tree"},
    "halving": {"synchronizer": "allreduce", "reduction": "halving"},
    "broadcast": {"synchronizer": "broadcast"},
    "scatter": {"synchronizer": "scatter", "reduction": "ring", **BLOCKS},
    "owner": {"synchronizer": "owner", "reduction": "ring", **BLOCKS},
    "one owner": {"synchronizer": "owner", "reduction": "ring", "owners": "one"},
}
ORDERS = {2: (1, 0), 3: (2, 0, 1), 4: (2, 0, 3, 1)}


def played(
    reduction: str, order: tuple[int, ...], elements: int, piece: int = 0
) -> dict[int, list[int]]:
    """Every worker's buffer after a sum, where worker w begins with 10^w in all elements."""
    buffers = {worker: [10**worker] * elements for worker in order}
    left = {w: list(in_pieces(schedule(reduction, order, w, elements), piece)) for w in order}
    sent: dict[tuple[int, int], list[list[int]]] = {}
    started: set[int] = set()
    while any(left.values()):
        before = 2 * sum(map(len, left.values())) - len(started)
        for worker in order:
            if not left[worker]:
                continue
            step = left[worker][0]
            if step.to is not None and worker not in started:
                values = buffers[worker][slice(*step.sent)]
                sent.setdefault((worker, step.to), []).append(values)
            started.add(worker)
            if step.source is not None:
                if not sent.get((step.source, worker)):
                    continue
                receive(buffers[worker], step, sent[step.source, worker].pop(0))
            left[worker].pop(0)
            started.discard(worker)
        after = 2 * sum(map(len, left.values())) - len(started)
        assert after < before, f"{reduction} of {order} waits for itself"
    assert not any(sent.values())
    return buffers


def receive(buffer: list[int], step: Transfer, values: list[int]) -> None:
    first, last = step.received
    assert last - first == len(values)
    for place, value in enumerate(values, first):
        buffer[place] = buffer[place] + value if step.adds else value


@pytest.mark.parametrize("reduction", SCHEDULES)
def test_schedules_sum_everything_once(reduction: str) -> None:
    for size, elements, piece in itertools.product(range(2, 8), (0, 1, 5, 24), (0, 1, 3)):
        order = tuple(reversed(range(size)))
        found = played(reduction, order, elements, piece)
        assert set(map(tuple, found.values())) == {(int("1" * size),) * elements}
        if elements == 24 and size in (2, 3, 4, 6):
            sent = sum(
                step.sent[1] - step.sent[0]
                for worker in order
                for step in schedule(reduction, order, worker, elements)
                if step.to is not None
            )
            assert sent == 2 * (size - 1) * elements


def test_a_message_of_a_schedule_waits_for_what_it_is_made_of_alone() -> None:
    whole = schedule("ring", (0, 1), 0, 12)
    pieces = in_pieces(whole, 2)
    assert [step.sent for step in pieces] == [
        *((0, 2), (2, 4), (4, 6)),  # its own half
        *((6, 8), (8, 10), (10, 12)),  # the other one, summed
    ]
    waits = {
        (late, early)
        for late, one in enumerate(pieces)
        for early, before in enumerate(pieces[:late])
        if touches(one, before)
    }
    assert waits == {(3, 0), (4, 1), (5, 2)}
    assert in_pieces(whole, 0) == whole


def test_the_order_decides_what_leaves_a_host() -> None:
    good, bad = (0, 1, 2, 3), (0, 2, 1, 3)
    assert remote_share("ring", good, 2) == pytest.approx(2 * 3 / 4 / 2)
    assert remote_share("ring", bad, 2) == pytest.approx(2 * 3 / 4)
    assert remote_share("ring", bad, 1) == 0


@pytest.mark.parametrize(
    ("network", "device", "wanted"),
    [
        (Network(Level(4, 80e6, 1e-3, summing=120e6)), "cpu", "ring"),
        (Network(Level(4, 80e6, 1e-3, summing=120e6)), "cuda", "auto"),
        (Network(Level(4, 80e6, 1e-3)), "cpu", "auto"),
        (Network(Level(2, 80e6, 1e-3, summing=120e6)), "cpu", "auto"),
        (Network(Level(64, 80e6, 3e-3, summing=120e6)), "cpu", "auto"),  # as many messages in a row
        (Network(Level(4, 80e6, 1e-3, summing=120e6), memory=Level(4, 1e9, 0.0)), "cpu", "auto"),
    ],
)
def test_owners_are_reached_in_rings_where_links_are_faster_so(
    network: Network, device: str, wanted: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 100), nn.Linear(100, 4))

    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(values: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(values).sum().backward()
        optimizer.step()

    found = discover(train)
    analysis = analyze(
        capture(train, found, (torch.zeros(2, 1000),), {}), leaves(found), aliases(found)
    )
    workers = network.whole.workers
    cluster = ClusterFacts(workers, network, speed=Speed(1e11, 1e10, 1e-6), device=device)
    strategy = choose_strategy("PS", analysis, cluster)
    assert {choice.reduction for choice in strategy.variables.values()} == {wanted}


@pytest.mark.parametrize("size", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_sums_give_the_numbers_of_one_device(pool: Pool, way: str, size: int) -> None:
    wanted = dict(WAYS[way])
    if way not in ("halving", "broadcast"):
        wanted["order"] = ORDERS[size]
    for found in pool.run(size, synchronizers.compare, wanted, CASES[size]):
        for case, (difference, chosen) in found.items():
            assert difference < 1e-10, case
            assert {"hidden.weight", "hidden.bias"} <= set(chosen)


@pytest.mark.parametrize("way", WAYS)
def test_sent_bytes_equal_the_formula(pool: Pool, way: str) -> None:
    found = pool.run(3, synchronizers.counted, WAYS[way])
    sent = [one["sent"] for one in found]
    assert sum(sent) / 3 == pytest.approx(found[0]["formula"], rel=0.02)
    # The tree's first worker sends to two, its leaves to one; an only owner gets no gradients.
    assert (max(sent) > 1.5 * min(sent)) == (way in ("tree", "halving", "one owner"))
