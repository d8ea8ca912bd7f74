"""In which order sums of gradients start where the step that follows finishes them."""

from __future__ import annotations

import itertools

import late
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from strategies import built
from test_timeline import analysed
from torch import nn

from parallax.cluster.network import Level, Network
from parallax.graph.analysis.variables import Analysis
from parallax.rewrite.late import defer_updates
from parallax.rewrite.pipeline import rewrite
from parallax.rewrite.timeline import timeline
from parallax.strategy.data import Strategy
from parallax.strategy.late_order import Sum, in_order_of_need, with_late_turns
from parallax.strategy.message_sizes import MessageSizes
from parallax.strategy.messages import merge_messages
from parallax.strategy.timeline import Speed, predict
from parallax.strategy.verify import findings

LAYERS, WIDTH = 6, 64
NETWORK = Network(Level(4, 1e6, 1e-4))
SPEED = Speed(operations=40e6, bytes=1e12, node=0.0)


def test_what_is_needed_first_overtakes_what_waits_for_the_link() -> None:
    # Backward: of four layers the last is ready first; the link is free when all are.
    sums = [Sum(float(n), 3.0, 3.0 - n) for n in range(4)]
    assert in_order_of_need(sums) == [0, 3, 2, 1]
    # A link that is faster than backward keeps backward's order.
    assert in_order_of_need([Sum(float(n), 0.5, 3.0 - n) for n in range(4)]) == [0, 1, 2, 3]
    # One that is a little slower has two to choose from now and then.
    assert in_order_of_need([Sum(float(n), 1.5, 3.0 - n) for n in range(5)]) == [0, 1, 3, 4, 2]
    assert in_order_of_need([]) == []


numbers = st.floats(0.0, 10.0)


@given(st.lists(st.builds(Sum, numbers, numbers, numbers), max_size=8))
def test_the_link_is_never_idle_nor_given_to_what_is_needed_later(sums: list[Sum]) -> None:
    order = in_order_of_need(sums)
    assert sorted(order) == list(range(len(sums)))
    clock = 0.0
    for number, place in enumerate(order):
        rest = [sums[other] for other in order[number:]]
        clock = max(clock, min(one.ready for one in rest))
        assert sums[place].ready <= clock
        ready = [one for one in rest if one.ready <= clock]
        assert sums[place].needed == min(one.needed for one in ready)
        clock += sums[place].seconds


def layers() -> Analysis:
    """A dense model of several equal layers, and their gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return analysed(model, torch.randn(32, WIDTH))


def planned(analysis: Analysis, option: str = "AR") -> Strategy:
    """A strategy with a message for each layer, without an order of their late ones."""
    sizes = MessageSizes(operations=1, overlapped=1 << 30, most=1)
    strategy = built(option, analysis.variables.values(), 4)
    merged = merge_messages(strategy, analysis, sizes)
    found = {n: msgspec.structs.replace(c, pieces=1) for n, c in merged.variables.items()}
    return msgspec.structs.replace(merged, variables=found)


def late_turns(strategy: Strategy) -> list[int]:
    """By layer, from the first on."""
    return [choice.late_turn for choice in strategy.variables.values()]


def test_the_first_layer_is_sent_as_soon_as_the_link_is_free() -> None:
    analysis = layers()
    strategy = planned(analysis)
    assert [choice.group for choice in strategy.variables.values()] == [6, 5, 4, 3, 2, 1]
    ordered = with_late_turns(strategy, analysis, NETWORK, SPEED)
    # A layer's gradient is computed in 6.6 ms, twice that with what goes on backward, and takes
    # 24.6 ms to travel: the first to travel is the last layer's.
    assert late_turns(ordered) == [4, 5, 3, 6, 2, 1]
    assert findings(ordered, list(analysis.variables.values()), 4, two_levels=False) == []
    # Where all are ready before the first has travelled, the rest goes as the next step needs it.
    slow = with_late_turns(strategy, analysis, Network(Level(4, 1e5, 1e-4)), SPEED)
    assert late_turns(slow) == [2, 3, 4, 5, 6, 1]
    fast = with_late_turns(strategy, analysis, Network(Level(4, 1e9, 1e-6)), SPEED)
    assert late_turns(fast) == [6, 5, 4, 3, 2, 1]


def test_what_cannot_be_late_goes_first() -> None:
    analysis = layers()
    strategy = planned(analysis)
    names = list(strategy.variables)
    chosen = dict(strategy.variables)
    owned = built("PS", analysis.variables.values(), 4).variables[names[4]]
    assert owned.synchronizer == "owner"
    chosen[names[4]] = msgspec.structs.replace(owned, group=chosen[names[4]].group)
    mixed = msgspec.structs.replace(strategy, variables=chosen)
    slow = with_late_turns(mixed, analysis, Network(Level(4, 1e5, 1e-4)), SPEED)
    assert late_turns(slow) == [3, 4, 5, 6, 2, 1]


@pytest.mark.parametrize(("bandwidth", "share"), [(2e5, 0.97), (1e6, 0.95), (5e6, 1.0)])
def test_a_step_is_expected_to_take_less_by_that_order(bandwidth: float, share: float) -> None:
    network = Network(Level(4, bandwidth, 1e-4))

    def seconds(late: bool, ordered: bool) -> float:
        analysis = layers()
        strategy = planned(analysis)
        if ordered:
            strategy = with_late_turns(strategy, analysis, network, SPEED)
        graph = rewrite(analysis, strategy, 0, 4, late=late)
        if late:
            defer_updates(graph, lambda entry: True)
        items = timeline(graph, analysis.variables, strategy)
        return predict(items, analysis.variables, strategy, network, SPEED).step

    usual = seconds(late=False, ordered=False)
    # The order is one of late steps only.
    assert seconds(late=False, ordered=True) == usual
    assert seconds(late=True, ordered=False) == pytest.approx(usual, rel=0.05)
    assert seconds(late=True, ordered=True) <= share * usual


def test_messages_start_in_the_order_of_the_strategy(pool: Pool) -> None:
    for difference, started, orders in pool.run(2, late.in_turn, ("dense", "momentum", "none")):
        assert difference <= 1e-10
        by_group, by_turn = orders
        assert by_group == by_turn[::-1] != by_turn
        assert started == [by_turn] * len(started)


@pytest.mark.parametrize("turns", list(itertools.permutations([1, 2, 3]))[1:])
def test_any_order_gives_the_numbers_of_one_device(pool: Pool, turns: tuple[int, ...]) -> None:
    for difference, _, _ in pool.run(2, late.in_turn, ("dense", "adam", "none"), turns):
        assert difference <= 1e-10
