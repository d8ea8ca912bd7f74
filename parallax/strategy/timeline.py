"""How long a step takes: computation and messages in their order, and what of them overlaps.

A timeline is what a worker's graph does, without its values: it computes, starts messages, and
waits for them. Messages share the worker's link and travel one after the other; a message leaves
when one of a few that were on their way has arrived, and a wait ends when its message has arrived
(Poseidon, section 3.2, has the same picture of wait-free backpropagation). Where workers have to
share processors, what computes keeps messages from going on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from parallax.cluster.network import Network
from parallax.graph.analysis.variables import Variable
from parallax.strategy.cost import in_ring, message_seconds, seconds_at_owners
from parallax.strategy.data import Strategy, VariableStrategy
from parallax.strategy.registry import MessageKind, facts

TIMES_BY_HOST = 2
"""Rows are asked for and handed on inside each host, and between hosts once more."""
LOOKED_UP = 100
"""Small operations to read and update a table of bags by itself; those whose bags are exchanged are
handled together."""
LANES = 2
"""How many messages of a process group are on their way at once: Gloo has as many threads."""


@dataclass(frozen=True)
class Computed:
    """Computation between messages.

    Args:
        operations: multiplications and additions of matrix products and convolutions, and what
            takes as long.
        bytes: read and written by all nodes.
        nodes: how many.
        added: it is work for the exchange of messages, that the step on one device has not.
    """

    operations: int
    bytes: int
    nodes: int
    added: bool = False


@dataclass(frozen=True)
class Started:
    """A message leaves.

    Args:
        number: of the message, for its wait.
        kind: what it carries.
        variables: for which; a piece of a gradient names its variable.
        share: of the gradient that it carries.
    """

    number: int
    kind: MessageKind
    variables: tuple[str, ...]
    share: float = 1.0


@dataclass(frozen=True)
class Awaited:
    """Nothing goes on before this message has arrived; where that starts later in the timeline,
    before the one that started in the step before has."""

    number: int


Item = Computed | Started | Awaited


@dataclass(frozen=True)
class Speed:
    """What a device computes.

    Args:
        operations: per second, in matrix products.
        bytes: per second, read and written by element-wise operations; of what lies in no cache,
            as most of a step does not.
        node: seconds that any node takes at least.
        crowding: seconds that pass while a processor works for one second, as all workers of the
            machine compute at once.
        alike: all workers' devices are the same, and compute the same to the last bit.
        borrowed: seconds by which computing is delayed when messages need a processor for one
            second, as all workers compute: nothing where processors are free for them.
    """

    operations: float
    bytes: float
    node: float
    crowding: float = 1.0
    alike: bool = True
    borrowed: float = 0.0

    @property
    def progress(self) -> float:
        """What share of the time messages go on while all workers compute: as long as processors
        are free for them, all of it."""
        return 1.0 / max(self.crowding, 1.0)

    def added(self, variable: Variable, choice: VariableStrategy, workers: int) -> float:
        """Seconds that a worker's step computes longer than that of one device, for a variable."""
        one = facts(choice)
        calls = one.calls * (TIMES_BY_HOST if choice.hierarchy == "hosts" else 1)
        if variable.bags and not one.bags:
            calls += LOOKED_UP
        operations = one.computes(variable, workers)
        return self.crowding * (operations / self.operations + calls * self.node)

    def seconds(self, part: Computed) -> float:
        """Time of some computation: products and the rest one after the other."""
        return part.operations / self.operations + self.rest(part)

    def rest(self, part: Computed) -> float:
        """Time of all but products."""
        return part.bytes / self.bytes + part.nodes * self.node


@dataclass(frozen=True)
class StepTime:
    """Predicted times of one step, in seconds.

    Args:
        step: all of it.
        computation: of it, computing.
        messages: what its messages take, one after the other.
    """

    step: float
    computation: float
    messages: float

    @property
    def waiting(self) -> float:
        """What is left of the messages when computation has hidden what it can."""
        return self.step - self.computation


def predict(
    items: Sequence[Item],
    variables: Mapping[str, Variable],
    strategy: Strategy,
    network: Network,
    speed: Speed,
    computation: float | None = None,
    alone: Computed | None = None,
) -> StepTime:
    """Play a timeline; one of many steps, where a step waits for messages of the one before.

    Args:
        items: the timeline.
        variables: as they were measured.
        strategy: how they are synchronised.
        network: the links.
        speed: of the device.
        computation: seconds that a step computes, if that is known better than by ``speed``, which
            then only divides it.
        alone: what was computed in that time; None for all that this step computes.
    """
    parts = {id(i): speed.seconds(i) for i in items if isinstance(i, Computed)}
    total = sum(parts.values()) if alone is None else speed.seconds(alone)
    scale = speed.crowding if computation is None or not total else computation / total
    # Of what was not in that time, products are as fast as the step's own.
    rest_scale = speed.crowding if alone is not None else scale
    clock = free = messages = owed = computing = 0.0
    moved = 0.0  # seconds in which messages could go on: their times are told in these
    arrives: dict[int, float] = {}
    lanes: dict[bool, list[float]] = {}  # of each process group, until when they are
    taken: dict[int, float] = {}  # by owner, until when its link is
    before = StepTime(0.0, 0.0, 0.0)
    played = [*items, None, *items] if _goes_on(items) else items
    for item in played:
        if item is None:
            before = StepTime(clock, computing, messages)
        elif isinstance(item, Computed):
            rest = speed.rest(item) if item.added else 0.0
            took = (parts[id(item)] - rest) * scale + rest * rest_scale
            # What messages in the background took of the processor.
            clock += took + owed
            moved += took * speed.progress + owed
            computing += took + owed
            owed = 0.0
        elif isinstance(item, Started):
            chosen = [(variables[name], strategy.variables[name]) for name in item.variables]
            message = message_seconds(item.kind, chosen, network, item.share)
            latency, occupied = message.latency, message.link
            clock += message.memory
            moved += message.memory * speed.progress
            computing += message.memory
            lane = lanes.setdefault(item.kind == "summed", [0.0] * LANES)
            first = lane.index(min(lane))
            free = max(free, moved, lane[first]) + occupied
            there = free
            if item.kind == "owned" and network.host is None and not in_ring(chosen):
                at_owners = seconds_at_owners(chosen, network, item.share)
                for owner, seconds in at_owners.items():
                    taken[owner] = max(taken.get(owner, 0.0), moved) + seconds
                    there = max(there, taken[owner])
                occupied = max([occupied, *at_owners.values()])
            arrives[item.number] = lane[first] = there + latency
            messages += latency + occupied
            owed += message.working(network) * speed.borrowed
        else:
            # In the first of two steps, what it would wait for was not sent.
            waited = max(arrives.get(item.number, 0.0) - moved, 0.0)
            owed = max(owed - waited, 0.0)
            clock += waited
            moved += waited
    return StepTime(clock - before.step, computing - before.computation, messages - before.messages)


def _goes_on(items: Iterable[Item]) -> bool:
    """Whether a step waits for messages of the one before."""
    started: set[int] = set()
    for item in items:
        if isinstance(item, Started):
            started.add(item.number)
        elif isinstance(item, Awaited) and item.number not in started:
            return True
    return False


def with_ids_ahead(items: Sequence[Item]) -> tuple[Item, ...]:
    """The timeline of a step whose ids came with the step before, as those of the next one do with
    it: they leave after the rows that they asked for, and nothing waits for them."""
    ids = {item.number for item in items if isinstance(item, Started) and item.kind == "ids"}
    result: list[Item] = []
    later: list[Item] = []
    for item in items:
        if isinstance(item, Awaited) and item.number in ids:
            continue
        if isinstance(item, Started) and item.number in ids:
            later.append(item)
            continue
        result.append(item)
        if later and isinstance(item, Started):
            result += later
            later = []
    return (*result, *later)


def merged(items: Iterable[Item]) -> tuple[Item, ...]:
    """The same timeline with neighbouring computation put together."""
    result: list[Item] = []
    for item in items:
        last = result[-1] if result else None
        if isinstance(item, Computed) and isinstance(last, Computed) and item.added == last.added:
            result[-1] = Computed(
                last.operations + item.operations,
                last.bytes + item.bytes,
                last.nodes + item.nodes,
                item.added,
            )
        else:
            result.append(item)
    return tuple(result)


__all__ = [
    "Awaited",
    "Computed",
    "Item",
    "Speed",
    "Started",
    "StepTime",
    "merged",
    "predict",
    "with_ids_ahead",
]
