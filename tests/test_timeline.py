"""Predicted time of a step: what overlaps, what waits, and what a graph's messages are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from pool import Pool
from strategies import built
from test_golden_graphs import captured
from user_cases import squares

from parallax.cluster.network import Level, Network
from parallax.graph.analysis.variables import Analysis, Variable, analyze
from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover
from parallax.graph.objects.state import aliases, leaves
from parallax.rewrite.late import defer_updates
from parallax.rewrite.pipeline import rewrite
from parallax.rewrite.timeline import computation_alone, timeline
from parallax.runtime.comm.world import single
from parallax.runtime.predictions.speed import measure_speed
from parallax.strategy.data import Strategy, VariableStrategy
from parallax.strategy.message_sizes import MessageSizes
from parallax.strategy.messages import merge_messages
from parallax.strategy.timeline import (
    Awaited,
    Computed,
    Item,
    Speed,
    Started,
    merged,
    predict,
    with_ids_ahead,
)

DENSE = Variable("w", (250_000,), torch.float32, True)
STRATEGY = Strategy("", 2, {"w": VariableStrategy("allreduce")})
# 1 MB are summed in a second, and 0.2 s pass until the first byte comes.
NETWORK = Network(Level(2, 1e6, 0.1))
SPEED = Speed(operations=1e6, bytes=1e6, node=0.0)


def seconds(items: list[Item], speed: Speed = SPEED, computation: float | None = None) -> float:
    return predict(items, {"w": DENSE}, STRATEGY, NETWORK, speed, computation).step


def work(operations: int) -> Computed:
    return Computed(operations, 0, 1)


def test_a_message_that_is_awaited_at_once_adds_its_time() -> None:
    assert seconds([work(500_000), Started(1, "summed", ("w",)), Awaited(1)]) == pytest.approx(1.7)


def test_computation_hides_a_message() -> None:
    items = [Started(1, "summed", ("w",)), work(900_000), Awaited(1), work(100_000)]
    assert seconds(items) == pytest.approx(1.3)
    items[1] = work(3_000_000)
    assert seconds(items) == pytest.approx(3.1)


def test_messages_leave_one_after_the_other() -> None:
    items = [Started(1, "summed", ("w",)), Started(2, "summed", ("w",), 0.5), Awaited(2)]
    assert seconds([*items, Awaited(1)]) == pytest.approx(1.0 + 0.5 + 0.2)


def test_few_messages_of_a_group_are_on_their_way_at_once() -> None:
    """Each of a tenth takes 0.1 s of the link and arrives 0.2 s later."""
    items: list[Item] = [Started(number, "summed", ("w",), 0.1) for number in range(5)]
    items += [Awaited(number) for number in range(5)]
    # Two leave; the third when the first has arrived, at 0.3; and so on.
    assert seconds(items) == pytest.approx(0.3 + 0.3 + 0.3)
    items[1], items[3] = Started(1, "rows", ("w",), 0.1), Started(3, "rows", ("w",), 0.1)
    assert seconds(items) < 0.9


def test_the_link_of_an_owner_is_the_narrow_place() -> None:
    """Three send a megabyte each to one worker; to two owners they send at the same time."""
    network = Network(Level(4, 1e6, 0.1))
    two = {"v": DENSE, "w": DENSE}
    for owners, took in (((0, 0), 6.0), ((0, 1), 3.0)):
        chosen = zip(two, owners, strict=True)
        strategy = Strategy("", 4, {n: VariableStrategy("owner", owners=(o,)) for n, o in chosen})
        items: list[Item] = [Started(1, "owned", ("v",)), Started(2, "owned", ("w",))]
        time = predict([*items, Awaited(1), Awaited(2)], two, strategy, network, SPEED)
        assert time.step == pytest.approx(took + 0.1)
    # A synchroniser of another package may send to owners that only it knows.
    unknown = Strategy("", 4, {"w": VariableStrategy("owner")})
    assert predict([*items[1:], Awaited(2)], two, unknown, network, SPEED).step > 0.1
    parts = Strategy("", 4, {"w": VariableStrategy("owner", partition="rows", owners=(0, 1, 2, 3))})
    items = [Started(1, "owned", ("w",)), Awaited(1)]
    assert predict(items, two, parts, network, SPEED).step == pytest.approx(0.75 + 0.1)


def test_a_ring_of_owners_is_as_fast_as_its_largest_part() -> None:
    """A megabyte goes round by quarters, or as it is; each of three rounds has a latency."""
    network = Network(Level(4, 1e6, 0.1, summing=2e6))
    items: list[Item] = [Started(1, "owned", ("w",)), Awaited(1)]
    parts = VariableStrategy("owner", partition="block", owners=(0, 1, 2, 3), reduction="ring")
    whole = VariableStrategy("owner", owners=(2,), reduction="ring")
    for choice, took in ((parts, 0.75 / 2), (whole, 3 / 2)):
        time = predict(items, {"w": DENSE}, Strategy("", 4, {"w": choice}), network, SPEED)
        assert time.step == pytest.approx(took + 3 * 0.1)


def test_known_computation_is_divided_as_the_device_would() -> None:
    items = [work(100_000), Started(1, "summed", ("w",)), work(300_000), Awaited(1)]
    assert seconds(items, computation=8.0) == pytest.approx(8.0)
    assert seconds(items, computation=0.4) == pytest.approx(0.1 + 1.2)


def test_what_a_rewritten_step_does_not_compute_is_not_expected_of_it() -> None:
    items = [work(100_000), Started(1, "summed", ("w",)), work(300_000), Awaited(1)]
    # One device takes 8 s for five times as much.
    alone = Computed(2_000_000, 0, 5)
    time = predict(items, {"w": DENSE}, STRATEGY, NETWORK, SPEED, 8.0, alone)
    assert time.computation == pytest.approx(8.0 / 5)


@pytest.mark.parametrize("option", ["HYBRID", "AR"])
def test_all_that_one_device_computes_is_in_a_timeline(option: str) -> None:
    analysis = captured()
    variables = analysis.variables
    alone = computation_alone(analysis.step, variables)
    strategy = merge_messages(built(option, variables.values(), 2), analysis)
    items = timeline(rewrite(analysis, strategy, 0, 2), variables, strategy)
    own = [item for item in items if isinstance(item, Computed) and not item.added]
    assert sum(item.operations for item in own) == alone.operations > 0
    # Rows are looked up, and their gradients scattered, by the exchange.
    part = sum(item.bytes for item in own) / alone.bytes
    assert 0.5 < part < 1 if option == "HYBRID" else part == pytest.approx(1, rel=0.3)


def test_messages_take_a_processor_from_computation_where_none_is_free() -> None:
    network = Network(Level(2, 1e6, 0.1, processing=2e-7))
    items = [Started(1, "summed", ("w",)), work(2_000_000), Awaited(1)]
    for crowding, borrowed, step in ((1.0, 0.0, 2.0), (1.0, 1.0, 2.2), (2.0, 2.0, 2.4)):
        speed = replace(SPEED, crowding=crowding, borrowed=borrowed)
        found = predict(items, {"w": DENSE}, STRATEGY, network, speed, 2.0)
        assert found.step == pytest.approx(step)
        assert found.waiting == 0


def test_what_computes_on_a_crowded_processor_holds_messages_up() -> None:
    """Of 1.2 s that a message takes, half of 1.6 s passed while two workers computed in turns."""
    items = [Started(1, "summed", ("w",)), work(1_600_000), Awaited(1)]
    times = {
        crowding: predict(
            items, {"w": DENSE}, STRATEGY, NETWORK, replace(SPEED, crowding=crowding), 1.6
        )
        for crowding in (1.0, 2.0)
    }
    assert times[1.0].step == pytest.approx(1.6)
    assert times[2.0].step == pytest.approx(1.6 + 1.2 - 0.8)
    assert times[2.0].waiting == pytest.approx(1.2 - 0.8)


def test_sums_have_a_speed_of_their_own() -> None:
    """A ring of all workers, and the parts of several hosts' sums, go at the speed of sums."""
    slow = Level(2, 0.5e6, 0.1, summing=1e6)
    strategy = Strategy("", 2, {"w": VariableStrategy("owner", partition="rows", owners=(0, 1))})
    items: list[Item] = [Started(1, "summed", ("w",)), Awaited(1)]
    assert predict(items, {"w": DENSE}, STRATEGY, Network(slow), SPEED).step == pytest.approx(1.2)
    items = [Started(1, "owned", ("w",)), Awaited(1)]
    assert predict(items, {"w": DENSE}, strategy, Network(slow), SPEED).step == pytest.approx(1.1)
    assert slow.all_reduce(1e6) == pytest.approx(1.2)
    memory = Level(2, math.inf, 0.0)
    both = Network(Level(4, 1.0, 0.0), memory, slow, memory)
    hosts = Strategy("", 4, {"w": VariableStrategy("allreduce", hierarchy="hosts")})
    items = [Started(1, "summed", ("w",)), Awaited(1)]
    assert predict(items, {"w": DENSE}, hosts, both, SPEED).step == pytest.approx(0.5 + 0.2)


def test_products_of_an_exchange_are_as_fast_as_those_of_the_step() -> None:
    extra = Computed(1, 0, 0, added=True)
    network = Network(Level(2, 1e6, 0.0))
    own = work(2)
    alone = SPEED.seconds(own)
    twice = predict([own, extra], {}, STRATEGY, network, SPEED, 2 * alone, own).step
    assert twice == pytest.approx(2 * alone + 2 / SPEED.operations)
    small = Computed(0, 5, 1, added=True)
    same = predict([own, small], {}, STRATEGY, network, SPEED, 2 * alone, own).step
    assert same == pytest.approx(2 * alone + SPEED.seconds(small))
    measured = predict([own, extra, small], {}, STRATEGY, network, SPEED, 2 * alone).step
    assert measured == pytest.approx(2 * alone)


def test_neighbouring_computation_is_put_together() -> None:
    extra = Computed(0, 5, 1, added=True)
    assert merged([work(1), work(2), extra, Awaited(1), work(3)]) == (
        Computed(3, 0, 2),
        extra,
        Awaited(1),
        work(3),
    )


@pytest.mark.parametrize(
    ("option", "kinds"),
    [
        ("HYBRID", ["ids", "rows", "rows", "summed", "words"]),
        ("PS", ["ids", "rows", "rows", "owned", "words", "owned"]),
        ("AR", ["words", "gathered", "summed"]),
    ],
)
def test_a_graph_has_the_messages_of_its_strategy(option: str, kinds: list[str]) -> None:
    analysis = captured()
    variables = {
        name: replace(v, sparsity=0.25) if v.sparse else v for name, v in analysis.variables.items()
    }
    strategy = merge_messages(built(option, analysis.variables.values(), 2), analysis)
    items = timeline(rewrite(analysis, strategy, 0, 2), variables, strategy)
    started = [item for item in items if isinstance(item, Started)]
    assert sorted(item.kind for item in started) == sorted(kinds)
    assert {i.number for i in started} == {i.number for i in items if isinstance(i, Awaited)}
    trained = {name for name, v in variables.items() if v.trainable}
    assert {name for item in started for name in item.variables} == trained
    assert any(isinstance(item, Computed) and item.operations for item in items)
    time = predict(items, variables, strategy, NETWORK, SPEED)
    assert time.step >= time.computation > 0
    assert time.waiting == pytest.approx(time.step - time.computation)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def test_the_speed_of_this_machine_is_sane(pool: Pool, default_dtype: torch.dtype) -> None:
    speed = measure_speed(single(torch.device("cpu")))
    assert 1e8 < speed.operations < 1e14
    assert 1e7 < speed.bytes < 1e13
    assert 0 < speed.node < 0.1
    assert 1.0 <= speed.crowding < 1000
    assert 0.0 <= speed.borrowed <= 2 * speed.crowding
    found = pool.run(3, measure_speed)
    assert found[1:] == found[:-1]


def test_ids_ahead_leave_after_the_rows_of_their_step_and_nothing_waits_for_them() -> None:
    rows = Started(2, "rows", ("w",))
    items = [work(1), Started(1, "ids", ("w",)), Awaited(1), work(2), rows, work(3), Awaited(2)]
    assert with_ids_ahead(items) == (
        work(1),
        work(2),
        rows,
        Started(1, "ids", ("w",)),
        work(3),
        Awaited(2),
    )
    assert with_ids_ahead([work(1), rows]) == (work(1), rows)


def test_a_wait_that_comes_first_is_for_the_message_of_the_step_before() -> None:
    message = Started(1, "summed", ("w",))  # takes 1.2 s
    assert seconds([work(500_000), work(500_000), message, Awaited(1)]) == pytest.approx(2.2)
    assert seconds([work(500_000), Awaited(1), work(500_000), message]) == pytest.approx(1.7)
    assert seconds([work(1_000_000), Awaited(1), message]) == pytest.approx(1.2)
    assert seconds([work(1_300_000), Awaited(1), message]) == pytest.approx(1.3)


def test_late_updates_are_awaited_in_front_of_their_first_use() -> None:
    def items(late: bool) -> list[Item]:
        torch.manual_seed(0)
        analysis = two_layers()
        strategy = built("AR", analysis.variables.values(), 2)
        sizes = MessageSizes(operations=10**9, overlapped=1, most=1)
        strategy = merge_messages(strategy, analysis, sizes)
        graph = rewrite(analysis, strategy, 0, 2)
        if late:
            defer_updates(graph, lambda entry: True)
        return list(timeline(graph, analysis.variables, strategy))

    def waits_of(items: list[Item]) -> list[tuple[bool, int]]:
        """By message, whether its wait comes first, and how much is computed before that."""
        started: set[int] = set()
        found, computed = [], 0
        for item in items:
            if isinstance(item, Started):
                started.add(item.number)
            elif isinstance(item, Awaited):
                found.append((item.number not in started, computed))
            elif isinstance(item, Computed):
                computed += item.operations
        return found

    usual = waits_of(items(late=False))
    assert len(usual) == 4
    assert all(not first for first, _ in usual)
    first, second, third, last = waits_of(items(late=True))
    # Of the first layer, its weight alone: the bucket that is full last says that all agree.
    assert (first, second[0], third[0], last[0]) == ((True, 0), True, True, False)
    assert 0 < second[1] == third[1] < last[1]
    total = sum(item.operations for item in items(late=True) if isinstance(item, Computed))
    assert total == sum(item.operations for item in items(late=False) if isinstance(item, Computed))


def two_layers() -> Analysis:
    """Two layers of a dense model, and their gradients."""
    layers = (torch.nn.Linear(30, 20), torch.nn.Tanh(), torch.nn.Linear(20, 10))
    return analysed(torch.nn.Sequential(*layers), torch.randn(8, 30))


def analysed(model: torch.nn.Module, batch: torch.Tensor) -> Analysis:
    """A dense model trained by plain SGD, and its gradients."""
    step = squares(model)
    objects = discover(step)
    graph = capture(step, objects, (batch,), {})
    return analyze(graph, leaves(objects), aliases(objects))
