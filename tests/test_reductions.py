"""Sums by ring, tree, and halving, and gradients sent to all, in any order of the workers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import synchronizers
from pool import Pool

from parallax.ops.reductions import SCHEDULES, Transfer, remote_share, schedule

CASES = {2: [("dense", "momentum", "clip_norm")], 3: [("sparse", "adam", "clip_norm")]}
"""By number of workers; test_synchronizers_long.py has more."""
WAYS: dict[str, dict[str, Any]] = {
    "ring": {"synchronizer": "allreduce", "reduction": "ring"},
    "tree": {"synchronizer": "allreduce", "reduction": "tree"},
    "halving": {"synchronizer": "allreduce", "reduction": "halving"},
    "broadcast": {"synchronizer": "broadcast"},
}
ORDERS = {2: (1, 0), 3: (2, 0, 1), 4: (2, 0, 3, 1)}


def played(reduction: str, order: tuple[int, ...], elements: int) -> dict[int, list[int]]:
    """Every worker's buffer after a sum, where worker w begins with 10^w in all elements."""
    buffers = {worker: [10**worker] * elements for worker in order}
    left = {w: list(schedule(reduction, order, w, elements)) for w in order}
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
    for size, elements in itertools.product(range(2, 8), (0, 1, 5, 24)):
        order = tuple(reversed(range(size)))
        found = played(reduction, order, elements)
        assert set(map(tuple, found.values())) == {(int("1" * size),) * elements}
        if elements == 24 and size in (2, 3, 4, 6):
            sent = sum(
                step.sent[1] - step.sent[0]
                for worker in order
                for step in schedule(reduction, order, worker, elements)
                if step.to is not None
            )
            assert sent == 2 * (size - 1) * elements


def test_the_order_decides_what_leaves_a_host() -> None:
    good, bad = (0, 1, 2, 3), (0, 2, 1, 3)
    assert remote_share("ring", good, 2) == pytest.approx(2 * 3 / 4 / 2)
    assert remote_share("ring", bad, 2) == pytest.approx(2 * 3 / 4)
    assert remote_share("ring", bad, 1) == 0


@pytest.mark.parametrize("size", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_sums_give_the_numbers_of_one_device(pool: Pool, way: str, size: int) -> None:
    wanted = dict(WAYS[way])
    if way in ("ring", "tree"):
        wanted["order"] = ORDERS[size]
    for found in pool.run(size, synchronizers.compare, wanted, CASES[size]):
        for case, (difference, chosen) in found.items():
            assert difference < 1e-10, case
            assert {"hidden.weight", "hidden.bias", "scale"} <= set(chosen)


@pytest.mark.parametrize("way", WAYS)
def test_sent_bytes_equal_the_formula(pool: Pool, way: str) -> None:
    found = pool.run(3, synchronizers.counted, WAYS[way])
    sent = [one["sent"] for one in found]
    assert sum(sent) / 3 == pytest.approx(found[0]["formula"], rel=0.02)
    # The tree's first worker sends to two, its leaves to one.
    assert (max(sent) > 1.5 * min(sent)) == (way in ("tree", "halving"))
