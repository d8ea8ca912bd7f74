"""Bytes that each synchroniser sends per step, as formulas (Parallax paper, table 3).

For N workers, a variable of b bytes and V rows, of which a share α is touched by one worker, each
worker sends on average:

===============  ==============================================================================
allreduce        2 (N-1)/N b                         by ring, tree, halving, or the backend
broadcast        (N-1) b                             whole gradients to all (peer to peer)
owner            2 (N-1)/N b                         gradient to its owners, new values back
scatter          2 (N-1)/N b                         the same; values at the next step's beginning
rows             2 (N-1)/N αb  +  4 (N-1)/N αV       rows and row gradients; ids of 4 bytes
allgather        (N-1) αb  +  8 (N-1) αV             row gradients to all; ids of 8 bytes
bags, P owners   2 (N-1)/N PBr + 4 (N-1)/N (n + PB)  parts of each bag from every owner; ids, sizes
bags, any        2 (N-1)/N αb  +  4 (N-1)/N αV       distinct rows, where they are fewer
factors          (N-1) K(M+M')                       both factors to all (thesis, table 3.4)
factor_push      (N-1)/N (K(M+M') + b)               both to the owner, new values back (Adam)
===============  ==============================================================================

with n ids in B bags a worker and step, r bytes in a row, and for a matrix [M, M'] K samples a
worker, in values of the matrix's dtype; for the weight of a convolution M and M' are the numbers in
an image that comes out and in one that goes in. The paper counts a server's own part
as transferred as well (2b, 2αb); here it stays local.

On H hosts of k workers each, numbered host by host, each worker sends of it to other hosts:

====================  =========================================================================
allreduce             2 (N-1)/N b/k                    one link of the ring leaves each host
allreduce, by host    2 (H-1)/H b/k
owner, scatter, ring  2 (N-1)/N b/k                    one link of the ring leaves each host
tree, halving         what their messages say           parallax.ops.reductions
rows, by host         (H-1)/H (2ur + 4u)/k             what a host's workers ask for, once
allgather             (N-k) αb  +  8 (N-k) αV
all others            as above, with (H-1)/H in place of (N-1)/N
====================  =========================================================================

with u distinct rows that a host's workers look up together: measured, or at most kαV and V. Rows by
host travel inside the host as well: (k-1)/k (2αb + 4αV).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from parallax.cluster.network import Network
from parallax.graph.analysis.variables import Variable
from parallax.strategy.data import HierarchyName, VariableStrategy
from parallax.strategy.encoders import encoder_of
from parallax.strategy.registry import MessageKind, facts


def bytes_per_step(
    variable: Variable, choice: VariableStrategy, workers: int, hosts: int = 1
) -> float:
    """Bytes one worker sends per step for one variable, on average over workers.

    Args:
        variable: as it was measured.
        choice: how it is synchronised.
        workers: how many there are.
        hosts: that they are on, equally many on each; counts for rows by host only.
    """
    return facts(choice).sent(variable, choice, workers, hosts)


def bytes_across(variable: Variable, choice: VariableStrategy, workers: int, hosts: int) -> float:
    """Bytes of them that go to another host; 0 on one host. Arguments as above."""
    if hosts == 1:
        return 0.0
    formula = facts(choice).across
    if formula is not None:
        return formula(variable, choice, workers, hosts)
    others = (workers - workers / hosts) / (workers - 1)
    return others * bytes_per_step(variable, choice, workers, hosts)


def summed_bytes(variable: Variable) -> int:
    """Of a gradient while it is summed: half types are summed in float32."""
    return variable.elements * max(variable.dtype.itemsize, 4)


def gradient_bytes(variable: Variable, choice: VariableStrategy) -> int:
    """Of a gradient as it travels: encoded if its encoder takes it."""
    encoder = encoder_of(choice)
    if encoder is None:
        return summed_bytes(variable)
    return encoder.encoded_bytes(variable.shape, max(variable.dtype.itemsize, 4))


def row_bytes(variable: Variable) -> float:
    """Of one row."""
    return variable.bytes / max(variable.rows, 1)


def factor_bytes(variable: Variable) -> float:
    """Of the factors of one worker's gradient: K rows of M and of M' values."""
    return variable.factor_elements * variable.dtype.itemsize


def touched_rows(variable: Variable) -> float:
    """Distinct rows that one worker looks up; all of them while nothing is measured."""
    return (variable.sparsity if variable.sparsity is not None else 1.0) * variable.rows


def sent_row_bytes(
    variable: Variable, choice: VariableStrategy, way: Literal["pull", "push"]
) -> float:
    """Of one row, or of its gradient, as it travels."""
    encoder, read = encoder_of(choice), variable.read
    cast = None if encoder is None else encoder.cast
    dtype = cast or (read.dtype if way == "pull" else None) or variable.dtype
    values = variable.elements / max(variable.rows, 1)
    if read.columns is not None:
        values = read.columns[1] - read.columns[0]
    return values * dtype.itemsize


def rows_both_ways(variable: Variable, choice: VariableStrategy, rows: float) -> float:
    """Ids of 4 bytes, rows and their gradients."""
    both = sent_row_bytes(variable, choice, "pull") + sent_row_bytes(variable, choice, "push")
    return rows * (both + 4)


def part_of_exchange(kind: MessageKind, ids: float, values: float, row: float) -> float:
    """What part of an exchange of rows one message of it carries.

    Args:
        kind: of the message.
        ids: of 4 bytes.
        values: rows or sums of rows, which travel both ways.
        row: bytes of one.
    """
    total = 4 * ids + 2 * values * row
    return (4 * ids if kind == "ids" else values * row) / total if total else 0.0


def sums_in_memory(choice: VariableStrategy, network: Network) -> bool:
    """Whether the workers of a host add up a gradient in memory that they share."""
    return (
        network.memory is not None
        and choice.synchronizer == "allreduce"
        and choice.reduction == "auto"
        and choice.encoder == "none"
        and (choice.hierarchy == "hosts" or network.hosts == 1)
    )


@dataclass(frozen=True)
class MessageTime:
    """Seconds that one message takes.

    Args:
        latency: from when its last byte is sent until it arrives.
        link: that the link is occupied.
        memory: that this worker itself works in memory that it shares.
        sent: bytes of it that a worker sends through the network's code.
    """

    latency: float
    link: float
    memory: float = 0.0
    sent: float = 0.0

    @property
    def whole(self) -> float:
        """Until it has arrived, if nothing else is on its way."""
        return self.latency + self.link + self.memory

    def working(self, network: Network) -> float:
        """Of a worker's processors: the network's code for what it sends."""
        return self.sent * network.whole.processing


def message_seconds(
    kind: MessageKind,
    decided: Sequence[tuple[Variable, VariableStrategy]],
    network: Network,
    share: float = 1.0,
) -> MessageTime:
    """Seconds that one message takes.

    Args:
        kind: what it carries.
        decided: for which variables.
        network: the links.
        share: of them that it carries.
    """
    if kind == "owned" and in_ring(decided):
        return _ring_of_owners(decided, network, share)
    by_host = any(choice.hierarchy == "hosts" for _, choice in decided)
    workers, hosts = network.whole.workers, network.hosts
    # A sum is two exchanges: parts to those that sum them, and the sums to all.
    times = 2 if kind == "summed" else 1
    sent = across = 0.0
    for variable, choice in decided if kind != "words" else ():
        part = share * facts(choice).part(kind, variable, choice, workers) / times
        sent += part * bytes_per_step(variable, choice, workers, hosts)
        across += part * bytes_across(variable, choice, workers, hosts)
    memory = network.memory
    if memory is not None and all(sums_in_memory(choice, network) for _, choice in decided):
        inside = times * (sent - across) / memory.bandwidth
        rail = network.rail
        if rail is None:
            return MessageTime(times * memory.latency, 0.0, inside)
        latency = times * (memory.latency + rail.latency)
        return MessageTime(latency, times * across / rail.sums, inside, times * across)
    host, rail = network.host, network.rail
    passes = [(network.whole, sent)]
    if by_host and host is not None and rail is not None:
        passes = [(host, sent - across), (rail, across)]
    idle = link = 0.0
    for level, size in passes:
        if level.workers > 1:
            idle += times * level.latency
            link += times * size / (level.sums if kind == "summed" else level.rate(size))
    return MessageTime(idle, link, sent=times * sent)


def in_ring(decided: Sequence[tuple[Variable, VariableStrategy]]) -> bool:
    """Whether a message to owners, or from them, goes round a ring."""
    return any(choice.reduction == "ring" for _, choice in decided)


def _ring_of_owners(
    decided: Sequence[tuple[Variable, VariableStrategy]], network: Network, share: float
) -> MessageTime:
    """In each of N-1 rounds the largest part is on some link, and others wait for it."""
    workers = network.whole.workers
    parts = bytes_at_owners(decided, workers, network.hosts, share)
    latency = (workers - 1) * network.whole.latency
    link = max(parts.values(), default=0.0) / network.whole.sums
    return MessageTime(latency, link, sent=sum(parts.values()) / workers)


def seconds_at_owners(
    decided: Sequence[tuple[Variable, VariableStrategy]], network: Network, share: float = 1.0
) -> dict[int, float]:
    """How long one message of gradients to their owners, or of values from them, occupies the
    link of each owner.

    All others send to an owner at once, so its link is the narrow place unless every worker owns
    as much.

    Args:
        decided: the variables that the message carries.
        network: the links.
        share: of them that it carries.
    """
    parts = bytes_at_owners(decided, network.whole.workers, network.hosts, share)
    rate = network.whole.rate(max(parts.values(), default=0.0))
    return {owner: size / rate for owner, size in parts.items()}


def bytes_at_owners(
    decided: Sequence[tuple[Variable, VariableStrategy]],
    workers: int,
    hosts: int,
    share: float = 1.0,
) -> dict[int, float]:
    """What all others send to each owner in one message of gradients, or get of each in one of
    values.

    Args:
        decided: the variables that the message carries.
        workers, hosts: how many there are.
        share: of the variables that it carries.
    """
    found: dict[int, float] = {}
    for variable, choice in decided:
        each = share * facts(choice).part("owned", variable, choice, workers)
        sent = each * bytes_per_step(variable, choice, workers, hosts)
        whole = sum(choice.shards) or len(choice.owners)
        for place, owner in enumerate(choice.owners):
            of_owner = (choice.shards[place] if choice.shards else 1) / whole
            found[owner] = found.get(owner, 0.0) + workers * sent * of_owner
    return found


def messages_of_step(
    decided: Iterable[tuple[Variable, VariableStrategy]], network: Network
) -> list[MessageTime]:
    """A step's messages, where variables that are synchronised alike travel together."""
    together: dict[tuple[str, HierarchyName, bool], list[tuple[Variable, VariableStrategy]]] = {}
    for variable, choice in decided:
        key = (choice.synchronizer, choice.hierarchy, sums_in_memory(choice, network))
        together.setdefault(key, []).append((variable, choice))
    return [
        message_seconds(kind, group, network)
        for group in together.values()
        for kind in facts(group[0][1]).messages
    ]


def communication_seconds(
    decided: Iterable[tuple[Variable, VariableStrategy]], network: Network
) -> float:
    """Seconds that a step's messages take, one after the other, by the latency-bandwidth model.

    What overlaps with computation is not subtracted.
    """
    return sum(message.whole for message in messages_of_step(decided, network))
