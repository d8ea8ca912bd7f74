"""In which order sums of gradients start where the next step finishes them.

Backward makes gradients from the last layer to the first, and the next step wants the variables in
the opposite order: its first layer would wait for the message that left last, behind all others.
So what is needed first overtakes what is ready and still waits for the link (P3 and ByteScheduler
schedule so). The order is one for all workers and every graph of the step, and part of the
strategy: backward is played with the measured link and device, and whenever the link is free, of
the messages that are ready the one leaves that is needed first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from torch.fx import Node

from parallax.cluster.network import Network
from parallax.graph.analysis.variables import Analysis
from parallax.graph.common.aliases import known_after, memory_of
from parallax.graph.common.operations import is_view, is_write
from parallax.strategy.cost import message_seconds
from parallax.strategy.data import Strategy, VariableStrategy
from parallax.strategy.registry import facts
from parallax.strategy.timeline import Speed

__all__ = ["Sum", "in_order_of_need", "with_late_turns"]


@dataclass(frozen=True)
class Sum:
    """A message with gradients.

    Args:
        ready: when backward has made the last of them, in seconds.
        seconds: that it takes the link.
        needed: how far the next step is when it wants what follows from it; only compared.
    """

    ready: float
    seconds: float
    needed: float


def in_order_of_need(sums: Sequence[Sum]) -> list[int]:
    """The order in which messages leave, by their places: of those that are ready when the link
    is free, the one that is needed first; it is not interrupted."""
    coming = deque(sorted(range(len(sums)), key=lambda place: sums[place].ready))
    ready: list[tuple[float, int]] = []
    order: list[int] = []
    clock = 0.0
    while coming or ready:
        if not ready:
            clock = max(clock, sums[coming[0]].ready)
        while coming and sums[coming[0]].ready <= clock:
            place = coming.popleft()
            heapq.heappush(ready, (sums[place].needed, place))
        _, chosen = heapq.heappop(ready)
        order.append(chosen)
        clock += sums[chosen].seconds
    return order


def with_late_turns(
    strategy: Strategy, analysis: Analysis, network: Network, speed: Speed
) -> Strategy:
    """The strategy with the order of its dense gradients' messages in steps with late updates.

    Args:
        strategy: with its messages merged.
        analysis: of the first graph.
        network: measured links.
        speed: of a worker's device.
    """
    groups: dict[int, list[str]] = {}
    for name, choice in strategy.variables.items():
        if facts(choice).in_turn and analysis.gradients.get(name):
            groups.setdefault(choice.group, []).append(name)
    played = _Played(strategy, analysis, network, speed)
    numbers = sorted(groups)
    sums = [played.sum_of(groups[number]) for number in numbers]
    chosen = dict(strategy.variables)
    for turn, place in enumerate(in_order_of_need(sums), 1):
        for name in groups[numbers[place]]:
            chosen[name] = msgspec.structs.replace(chosen[name], late_turn=turn)
    return msgspec.structs.replace(strategy, variables=chosen)


class _Played:
    """The first graph as one device computes it, and what its gradients take to travel."""

    def __init__(
        self, strategy: Strategy, analysis: Analysis, network: Network, speed: Speed
    ) -> None:
        self._strategy = strategy
        self._analysis = analysis
        self._network = network
        # While workers crowd the processors, messages go on for a share of the time only.
        self._seconds = speed.crowding * speed.progress / speed.operations
        self._place: dict[Node, int] = {}
        self._done: dict[Node, int] = {}
        """Operations that are computed when a node is."""
        total = 0
        for place, node in enumerate(analysis.step.graph.nodes):
            total += analysis.operations.get(node, 0)
            self._place[node], self._done[node] = place, total
        self._first_reads = self._found_first_reads({*strategy.variables})

    def _found_first_reads(self, names: Collection[str]) -> Mapping[str, int]:
        step = self._analysis.step
        places = {
            node: item.name
            for node, item in zip(step.own_placeholders(), step.inputs, strict=True)
            if item.name in names
        }
        found: dict[str, int] = {}
        for node in step.graph.nodes:
            if node.op != "call_function" or (is_view(node) and not is_write(node)):
                continue
            for source in node.all_input_nodes:
                name = places.get(memory_of(source))
                if name is not None:
                    found.setdefault(name, self._place[node])
        return found

    def sum_of(self, names: Sequence[str]) -> Sum:
        """The message with the gradients of these variables."""
        known = [known_after(mark) for name in names for mark in self._analysis.gradients[name]]
        decided = [(self._analysis.variables[n], self._strategy.variables[n]) for n in names]
        (_, first), *_ = decided
        message = message_seconds(facts(first).messages[0], decided, self._network)
        late = all(_may_be_late(choice) for _, choice in decided)
        return Sum(
            max(self._done[node] for node in known) * self._seconds,
            message.link,
            min(self._first_reads.get(name, 0) for name in names) if late else -1,
        )


def _may_be_late(choice: VariableStrategy) -> bool:
    """Whether its sum can be awaited in the step that follows; others are in their own."""
    one = facts(choice)
    return one.merges and not (one.sharded or one.factors) and choice.encoder == "none"
