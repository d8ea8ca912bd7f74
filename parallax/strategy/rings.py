"""Let gradients go to their owners round a ring, and values come back so, where that is faster."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from parallax.cluster.network import Network
from parallax.graph.analysis.variables import Variable
from parallax.strategy.data import Strategy
from parallax.strategy.message_sizes import MessageSizes
from parallax.strategy.registry import names_where


def in_rings(
    strategy: Strategy, variables: Sequence[Variable], network: Network, sizes: MessageSizes
) -> Strategy:
    """A strategy whose owners are reached round a ring, where these links are faster so.

    Several senders to one receiver get less out of its link than a ring does, which has one message
    on each, but a ring of N workers takes the latency of N-1 messages in a row. So it is for large
    gradients and few workers, and not where exchanges go through memory that workers share. There
    is one decision for all variables of a synchroniser, since these travel together. Two workers
    send each other the same either way, and an exchange needs no thread of our own.

    Args:
        strategy: of which the reductions of variables with owners are ``auto``.
        variables: that it is for.
        network: measured links.
        sizes: of messages.
    """
    whole, chosen = network.whole, dict(strategy.variables)
    if whole.workers == 2 or (network.hosts == 1 and network.memory is not None):
        return strategy
    for synchronizer in names_where(lambda one: one.sharded and "ring" in one.reductions):
        owned = [v for v in variables if chosen[v.name].synchronizer == synchronizer]
        size = sum(v.bytes for v in owned) * (whole.workers - 1) / whole.workers
        messages = math.ceil(size / sizes.overlapped)
        spared = size * (1 / whole.rate(size) - 1 / whole.sums)
        if spared > messages * (whole.workers - 2) * whole.latency:
            for v in owned:
                chosen[v.name] = msgspec.structs.replace(chosen[v.name], reduction="ring")
    return msgspec.structs.replace(strategy, variables=chosen)
