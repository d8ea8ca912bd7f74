"""How large messages are, by what links and devices were measured to do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from strategies import built
from test_golden_graphs import captured
from test_timeline import two_layers

from parallax.cluster.network import Level, Network
from parallax.strategy.message_sizes import MessageSizes
from parallax.strategy.messages import dense_bytes, merge_messages
from parallax.strategy.timeline import Speed

CPU = Speed(operations=50e9, bytes=10e9, node=2e-6)
GPU = Speed(operations=50e12, bytes=2e12, node=5e-6)
ETHERNET = Network(Level(4, 100e6, 1e-3))
DENSE = 50e6


def cost(network: Network, dense: float, size: float) -> float:
    """What buckets of this size add to a step: all latencies, and the last one's bytes."""
    latency = network.whole.all_reduce(0.0)
    return dense / size * latency + network.whole.all_reduce(size) - latency


@pytest.mark.parametrize("bandwidth", [10e6, 100e6, 1e9, 10e9])
@pytest.mark.parametrize("latency", [3e-5, 1e-3, 5e-3])
@pytest.mark.parametrize("dense", [1e6, 50e6, 2e9])
def test_no_bucket_is_much_cheaper(bandwidth: float, latency: float, dense: float) -> None:
    network = Network(Level(4, bandwidth, latency))
    size = MessageSizes.measured(network, CPU, dense).overlapped
    least = cost(network, dense, math.sqrt(dense * latency * bandwidth * 4 / 3))
    at_an_end = size in (MessageSizes().overlapped // 16, MessageSizes().overlapped * 64)
    assert at_an_end or least <= cost(network, dense, size) <= 1.26 * least


def test_a_fast_device_computes_more_beside_a_message() -> None:
    slow = MessageSizes.measured(ETHERNET, CPU, DENSE)
    fast = MessageSizes.measured(ETHERNET, GPU, DENSE)
    assert (slow.operations, fast.operations) == (50_000_000, 50_000_000 * 4**5)
    crowded = MessageSizes.measured(ETHERNET, replace(CPU, crowding=4.0), DENSE)
    assert crowded.operations * 4 == slow.operations
    # What overlaps is a matter of links.
    assert slow.overlapped == fast.overlapped == crowded.overlapped


def test_links_that_take_no_time_say_nothing() -> None:
    assert MessageSizes.measured(Network(Level(4, math.inf, 1e-3)), CPU, DENSE) == MessageSizes()
    assert MessageSizes.measured(Network(Level(4, 1e8, 0.0)), CPU, DENSE) == MessageSizes()


def test_a_strategy_has_the_messages_of_its_sizes() -> None:
    analysis = captured()
    strategy = built("AR", analysis.variables.values(), 2)
    dense = [one for one in analysis.variables.values() if one.trainable and not one.sparse]
    assert dense_bytes(strategy, analysis.variables) == sum(one.bytes for one in dense)

    def groups(sizes: MessageSizes) -> int:
        chosen = merge_messages(strategy, analysis, sizes).variables
        return len({chosen[one.name].group for one in dense})

    assert groups(MessageSizes()) == 1
    assert groups(MessageSizes(operations=1, overlapped=1, most=1)) == len(dense) > 1


def test_the_last_bucket_is_cut_where_a_part_is_hidden() -> None:
    sizes = MessageSizes(operations=10, least=4, per_byte=2)
    # 10 operations for a message, and 2 for each byte, have to follow.
    assert sizes.cuts([5, 1], [20]) == [0, 1]
    assert sizes.cuts([5, 1], [19]) == [0, 0]
    assert sizes.cuts([5, 5, 1], [5, 30]) == [0, 0, 1]
    assert sizes.cuts([5, 5, 1], [5, 29]) == [0, 1, 2]
    assert sizes.cuts([5, 5, 1], [0, 19]) == [0, 0, 0]
    assert sizes.cuts([20, 4, 4, 1], [60, 0, 30]) == [0, 1, 1, 2]
    # Too little for a message of its own.
    assert sizes.cuts([3, 1], [100]) == [0, 0]
    assert sizes.cuts([], []) == []
    assert sizes.cuts([7], []) == [0]


def test_gradients_that_are_known_sooner_leave_before_the_last() -> None:
    analysis = two_layers()
    strategy = built("AR", analysis.variables.values(), 2)

    def groups(sizes: MessageSizes) -> dict[str, list[int]]:
        chosen = merge_messages(strategy, analysis, sizes).variables
        return {
            layer: sorted({one.group for name, one in chosen.items() if name[0] == layer})
            for layer in ("0", "2")
        }

    large = MessageSizes(operations=1, overlapped=1 << 30, most=1 << 30, least=1, per_byte=1 << 30)
    assert groups(large) == {"0": [1], "2": [1]}
    assert groups(replace(large, per_byte=0)) == {"0": [2], "2": [1]}


def test_a_byte_is_hidden_behind_more_work_where_devices_are_fast_and_links_slow() -> None:
    usual = MessageSizes.measured(ETHERNET, CPU, DENSE)
    assert MessageSizes.measured(ETHERNET, GPU, DENSE).per_byte == usual.per_byte * 4**5
    slow = Network(Level(4, 10e6, 1e-3))
    assert MessageSizes.measured(slow, CPU, DENSE).per_byte > usual.per_byte
    assert MessageSizes.measured(slow, CPU, DENSE).least < usual.least
