"""Sums of all workers as schedules of messages between two: ring, tree, halving and doubling.

Half of a ring each are sums that are left to owners (ReduceScatter), and what owners have for all
(AllGather). A schedule is data, what one worker sends and receives in which order. It says at the
same time what is executed, what it sends, and to whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Transfer:
    """One step of a schedule: send some elements to a worker while receiving from another.

    Args:
        to: who receives ``sent``; None if nothing is sent.
        sent: first and one-past-last element.
        source: who sends ``received``; None if nothing is received.
        received: first and one-past-last element.
        adds: what comes is added to what is there, else it takes its place.
    """

    to: int | None = None
    sent: tuple[int, int] = (0, 0)
    source: int | None = None
    received: tuple[int, int] = (0, 0)
    adds: bool = False


Schedule = tuple[Transfer, ...]
Part = tuple[int, int]
"""Its first and one-past-last element."""


@lru_cache(maxsize=256)
def schedule(reduction: str, order: tuple[int, ...], worker: int, elements: int) -> Schedule:
    """What one worker does for a sum: 2(N-1)/N of the elements are sent, on average over workers.

    Args:
        reduction: ``ring``, ``tree`` or ``halving``.
        order: the workers, by their place in it.
        worker: of whom to know.
        elements: of the buffer that is summed.
    """
    return SCHEDULES[reduction](order, order.index(worker), elements)


@lru_cache(maxsize=256)
def scattering(order: tuple[int, ...], worker: int, parts: tuple[Part, ...]) -> Schedule:
    """What one worker does for sums of which each worker wants a part: all but its own is sent.

    Args:
        order: the workers, by their place in the ring.
        worker: of whom to know.
        parts: by worker, what it wants of the buffer; its sum is there in the end.
    """
    place = order.index(worker)
    return _around(order, place, [parts[one] for one in order], place - 1, adds=True)


@lru_cache(maxsize=256)
def gathering(order: tuple[int, ...], worker: int, parts: tuple[Part, ...]) -> Schedule:
    """What one worker does for all to have the parts of all: all but the following one's is sent.

    Args:
        order, worker: as for :func:`scattering`.
        parts: by worker, what it has of the buffer.
    """
    place = order.index(worker)
    return _around(order, place, [parts[one] for one in order], place, adds=False)


def _around(
    order: tuple[int, ...], place: int, parts: Sequence[Part], first: int, adds: bool
) -> Schedule:
    """Every part goes around once; this worker sends part ``first`` and then those before it."""
    size = len(order)
    following, previous = order[(place + 1) % size], order[(place - 1) % size]
    return tuple(
        Transfer(following, parts[start % size], previous, parts[(start - 1) % size], adds)
        for start in range(first, first - size + 1, -1)
    )


def _ring(order: tuple[int, ...], place: int, elements: int) -> Schedule:
    """Each part goes around once to be summed, and once more as a sum."""
    size = len(order)
    parts = [(elements * n // size, elements * (n + 1) // size) for n in range(size)]
    summed = _around(order, place, parts, place, adds=True)
    return (*summed, *_around(order, place, parts, place + 1, adds=False))


def _tree(order: tuple[int, ...], place: int, elements: int) -> Schedule:
    """Everything is summed on the way to the first worker of the order, and sent back."""
    whole = (0, elements)
    children = [order[i] for i in (2 * place + 1, 2 * place + 2) if i < len(order)]
    up = [Transfer(source=child, received=whole, adds=True) for child in children]
    down = [Transfer(to=child, sent=whole) for child in children]
    if place == 0:
        return (*up, *down)
    parent = order[(place - 1) // 2]
    return (*up, Transfer(to=parent, sent=whole), Transfer(source=parent, received=whole), *down)


def _halving(order: tuple[int, ...], place: int, elements: int) -> Schedule:
    """Recursive halving, then doubling (Rabenseifner); workers beyond a power of two join one."""
    power = 1 << (len(order).bit_length() - 1)
    whole = (0, elements)
    if place >= power:
        partner = order[place - power]
        return (Transfer(to=partner, sent=whole), Transfer(source=partner, received=whole))
    own, halves = whole, []
    distance = power // 2
    while distance:
        middle = (own[0] + own[1]) // 2
        low, high = (own[0], middle), (middle, own[1])
        kept, given = (high, low) if place & distance else (low, high)
        halves.append((order[place ^ distance], kept, given))
        own = kept
        distance //= 2
    steps = [Transfer(peer, given, peer, kept, True) for peer, kept, given in halves]
    steps += [Transfer(peer, kept, peer, given) for peer, kept, given in reversed(halves)]
    if place + power < len(order):
        joined = order[place + power]
        first = Transfer(source=joined, received=whole, adds=True)
        return (first, *steps, Transfer(to=joined, sent=whole))
    return tuple(steps)


SCHEDULES: dict[str, Callable[[tuple[int, ...], int, int], Schedule]] = {
    "ring": _ring,
    "tree": _tree,
    "halving": _halving,
}


@lru_cache(maxsize=256)
def remote_share(reduction: str, order: tuple[int, ...], hosts: int) -> float:
    """What part of a buffer's bytes one worker sends to other hosts for a sum, on average.

    Args:
        reduction, order: as for :func:`schedule`.
        hosts: that the workers are on, equally many on each, numbered host by host.
    """
    workers, elements = len(order), 1 << 20
    sent = sum(
        step.sent[1] - step.sent[0]
        for worker in order
        for step in schedule(reduction, order, worker, elements)
        if step.to is not None and step.to * hosts // workers != worker * hosts // workers
    )
    return sent / elements / workers
