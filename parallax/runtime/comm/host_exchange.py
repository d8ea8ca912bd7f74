"""Exchanges between the workers of one host, through memory that they share.

Every worker puts what it has for the others into memory of its own, where they take it from.
"""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch

from parallax.runtime.comm.host_links import HostLinks, as_tensor
from parallax.runtime.comm.pending import Pending, Waiting

_GRAIN = 1 << 16
"""Memory is made in multiples of so many bytes."""
_ROOM = 1.25
"""How many times as much of it as was asked for."""


class _Arena:
    """Memory of this worker for one message at a time."""

    def __init__(self, links: HostLinks, number: int, size: int) -> None:
        self.number = number
        self.size = size
        memory = links.share(links.common_name(f"arena {number}"), size)
        self.bytes = as_tensor(memory, torch.uint8, 0, size)
        self.heads = as_tensor(memory, torch.int64, 0, links.size + 1)
        self.used = False


class HostExchange:
    """All exchanges of a worker with the others of its host."""

    def __init__(self, worker: Waiting, links: HostLinks) -> None:
        self._worker = worker
        self._links = links
        self._taken = links.common_name("taken")
        self._arenas: list[_Arena] = []
        self._seen: dict[tuple[int, int], mmap.mmap] = {}
        """By place and number, other workers' memory."""
        self._count: Counter[int] = Counter()
        self._head = 8 * (links.size + 1)
        self._head += -self._head % 64

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        sent_counts: Sequence[int],
        received_counts: Sequence[int],
        purpose: str,
        size: float,
    ) -> HostPending:
        """Start an exchange; all workers of the host start the same of a purpose in one order.

        Args:
            received, sent: flat, of bytes.
            sent_counts, received_counts: bytes for, and of, each worker, one after the other.
            purpose: what it is for.
            size: bytes that it sends to others, for traces.

        Raises:
            PeerError: another worker ended.
        """
        links = self._links
        name = links.common_name(f"exchange {purpose}")
        self._count[name] += 1
        number = self._count[name] & 0xFFFFFFFF
        ends = list(accumulate(sent_counts, initial=self._head))
        arena = self._arena(ends[-1])
        arena.heads.copy_(torch.tensor(ends))
        arena.bytes[self._head : ends[-1]].copy_(sent[: ends[-1] - self._head])
        links.tell("sent", name, number, arena.number)
        ended = partial(self._worker.traffic.end, purpose, size, time.perf_counter())
        return HostPending(self, name, number, received, received_counts, self._worker, ended)

    def _arena(self, size: int) -> _Arena:
        """Memory that nobody reads any more."""
        self._links.advance()
        for arena in self._arenas:
            if arena.used and self._links.heard("taken", self._taken, arena.number):
                arena.used = False
        fitting = [arena for arena in self._arenas if not arena.used and arena.size >= size]
        if fitting:
            arena = min(fitting, key=lambda one: one.size)
        else:
            room = int(size * _ROOM)
            arena = _Arena(self._links, len(self._arenas) + 1, room + -room % _GRAIN)
            self._arenas.append(arena)
        arena.used = True
        return arena

    def has_arrived(self, name: int, number: int) -> bool:
        """Whether all have sent their parts."""
        self._links.advance()
        return self._links.has_told("sent", name, number)

    def take(self, name: int, number: int, received: torch.Tensor, counts: Sequence[int]) -> None:
        """Wait for all parts of an exchange, and copy them to where they belong.

        Raises:
            PeerError: another worker ended, or did not answer in time.
            DisagreementError: another worker exchanges something else.
        """
        links = self._links
        links.hear("sent", name, number)
        start, own = 0, links.place
        for place, count in enumerate(counts):
            if place != own:
                arena = links.detail("sent", name, number, place)
                memory = self._memory(place, arena)
                begin, end = as_tensor(memory, torch.int64, 8 * own, 2).tolist()
                if end - begin != count:
                    raise AssertionError(f"{end - begin} bytes came in place of {count}")
                if count:
                    part = as_tensor(memory, torch.uint8, begin, count)
                    received[start : start + count].copy_(part)
                links.tell("taken", self._taken, arena, to=place)
            start += count

    def _memory(self, place: int, arena: int) -> mmap.mmap:
        if (place, arena) not in self._seen:
            name = self._links.common_name(f"arena {arena}")
            self._seen[place, arena] = self._links.memory(name, place)
        return self._seen[place, arena]


class HostPending(Pending):
    """An exchange in shared memory, under way."""

    def __init__(
        self,
        exchange: HostExchange,
        name: int,
        number: int,
        received: torch.Tensor,
        counts: Sequence[int],
        worker: Waiting,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(None, "", worker)
        self._exchange: HostExchange | None = exchange
        self._id = name, number
        self._received = received
        self._counts = counts
        self._ended = ended

    def wait(self) -> None:
        """Wait, and take what has come.

        Raises:
            PeerError: another worker ended, or did not answer in time.
            DisagreementError: another worker exchanges something else.
        """
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        began = time.perf_counter()
        exchange.take(*self._id, self._received, self._counts)
        self._worker.traffic.wait(time.perf_counter() - began)
        self._ended()

    @property
    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._exchange is None or self._exchange.has_arrived(*self._id)
