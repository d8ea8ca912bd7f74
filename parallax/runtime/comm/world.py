"""The one module through which workers talk.

Only flat dense buffers of our own reach ``torch.distributed``: a strided or expanded tensor gives
wrong sums there without an error. Bytes are counted; texts travel through the store, and nothing
is ever unpickled.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallax.cluster.network import number_of_parts
from parallax.errors import PeerError
from parallax.runtime.comm.background import Background
from parallax.runtime.comm.host_exchange import HostExchange
from parallax.runtime.comm.host_sums import HostSums
from parallax.runtime.comm.parts import in_parts
from parallax.runtime.comm.pending import Pending, Transferring, told_of_peers
from parallax.runtime.comm.process_groups import process_group
from parallax.runtime.comm.texts import Texts
from parallax.runtime.comm.traffic import Traffic

TAKE_BACK_SECONDS = 1.0
GROUPS = ("dense", "rows")
"""Groups of all workers: what is in different ones may travel at once."""
_IN_MEMORY = (*GROUPS, "totals", "statistics", "whole batch", "checks", "host", "host dense")
"""Groups whose exchanges go through shared memory if all of them are on one host."""
_RARE = ("access", "partitions", "state")
"""What such exchanges are not for: shared memory stays, and these are large and seldom."""


@dataclass(frozen=True)
class Group:
    """Workers that communicate among themselves.

    Args:
        handle: the process group.
        ranks: the workers, by their place in it.
        place: this worker's place.
    """

    handle: Any
    ranks: tuple[int, ...]
    place: int


class World:
    """This worker and the others: collectives on flat buffers, and texts for all.

    With one worker nothing is opened and every operation is local.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        store: Any = None,
        groups: dict[str, Group] | None = None,
        hosts: Sequence[int] = (),
    ) -> None:
        """
        Args:
            rank, size: which worker this is, of how many.
            device: where its buffers are.
            store: for texts.
            groups: by what they are for.
            hosts: by worker, the number of its host; all on one if empty.
        """
        self.rank = rank
        self.size = size
        self.device = device
        self.hosts = tuple(hosts) or (0,) * size
        self.traffic = Traffic()
        self.host_sums: HostSums | None = None
        """Of the workers of this host, where they share memory."""
        self.host_exchange: HostExchange | None = None
        """Between them, in the same."""
        self.pieces: dict[str, int] = {}
        """By group, how many bytes of a large exchange a worker sends at once, where that was
        measured to be faster; the same on all workers."""
        self._groups = groups or {}
        self._texts = Texts(rank, size, store)
        self.background = Background()
        self._given: list[torch.Tensor] = []
        """Buffers that collectives' threads may still hold."""
        self._giving = threading.Lock()
        if store is not None:
            atexit.register(self._say_goodbye)

    def _say_goodbye(self) -> None:
        """Let workers that still wait for this one know that it will not come."""
        self._take_back()
        self._texts.say_goodbye()

    def _give(self, *buffers: torch.Tensor) -> None:
        """Note that a collective starts, and the buffers that it gets.

        They are kept as long as its threads hold them, so that none of these is the last to let go:
        whoever is needs the interpreter, which may be gone by then.
        """
        self.traffic.begin()
        with self._giving:
            self._given = [buffer for buffer in self._given if _is_held(buffer)]
            self._given.extend(buffers)

    def _take_back(self) -> None:
        """Wait until the collectives' threads have let go of their buffers, before Python ends.

        They do so some time after the end of the collective, and need the interpreter for it; where
        that is being taken down the process would be aborted.
        """
        deadline = time.monotonic() + TAKE_BACK_SECONDS
        while time.monotonic() < deadline and any(_is_held(buffer) for buffer in self._given):
            time.sleep(0.001)  # lets them have the interpreter

    # -- Hosts ------------------------------------------------------------------------------

    @property
    def two_levels(self) -> bool:
        """Whether there are several hosts with equally many workers, and more than one on each."""
        return "host" in self._groups

    @property
    def members(self) -> list[list[int]]:
        """By host, its workers."""
        found: dict[int, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return list(found.values())

    def group(self, name: str) -> Group:
        """The workers of this host ("host"), those with the same place on each ("rail"), ..."""
        return self._groups[name]

    def open_group(self, name: str) -> None:
        """Make another group of all workers, for messages that go beside those of others.

        All workers of the default process group must call this at once; a group that is there
        already stays.
        """
        if name in self._groups:
            return
        everyone = self._groups["rows"]
        ranks = dist.get_process_group_ranks(everyone.handle)
        handle = process_group(ranks, "exchanges")
        self._groups[name] = Group(handle, everyone.ranks, everyone.place)

    # -- Collectives ----------------------------------------------------------------------

    def all_reduce(self, buffer: torch.Tensor, purpose: str, group: str = "dense") -> Pending:
        """Sum ``buffer`` over a group in place: ring, 2(n-1)/n of its bytes sent."""
        _check(buffer)
        if self.size == 1:
            return Pending(None, "", self)
        among = self._groups[group]
        size = len(among.ranks)
        count = 2 * (size - 1) / size * _bytes(buffer)
        following = among.ranks[(among.place + 1) % size]
        across = count if self.hosts[following] != self.hosts[self.rank] else 0
        self.traffic.add(purpose, count, across)
        self._give(buffer)
        work = dist.all_reduce(buffer, group=among.handle, async_op=True)
        self.traffic.start(purpose, count, work)
        return Pending(work, "the sum of gradients", self)

    def transfer(
        self, sent: torch.Tensor, to: int | None, received: torch.Tensor, source: int | None
    ) -> Transferring:
        """Start to send to one worker, and to receive from another: for threads that have nothing
        else to do than to wait for it. Counts nothing.

        Raises:
            PeerError: another worker ended.
        """
        _check(sent)
        _check(received)
        handle = self._groups["dense"].handle
        operations = [
            dist.P2POp(one, part, dist.get_global_rank(handle, peer), handle)
            for one, part, peer in ((dist.isend, sent, to), (dist.irecv, received, source))
            if peer is not None and len(part)
        ]
        with told_of_peers(self, Transferring.WHAT):
            return Transferring(dist.batch_isend_irecv(operations) if operations else (), self)

    def count(self, purpose: str, sent: Sequence[int]) -> None:
        """Note a message, and the bytes of it that go to each worker."""
        self.traffic.begin()
        self._count(purpose, self._groups["dense"], sent)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        sent_counts: Sequence[int],
        purpose: str,
        group: str = "rows",
        spare: Sequence[int] = (),
        most: float = 0.0,
    ) -> Pending:
        """Send ``sent_counts[i]`` leading elements (or rows) to worker ``i`` of a group.

        ``spare`` says how many of them are not what the message is for: they count as room.
        ``most`` bytes are what some worker sends to the others, about: a number that all workers of
        the group know alike. What is large travels in parts; nothing does if it is 0.
        """
        _check(received)
        _check(sent)
        if self.size == 1:
            received.copy_(sent)
            return Pending(None, "", self)
        among = self._groups[group]
        row = math.prod(sent.shape[1:]) * sent.element_size()
        useful = list(sent_counts)
        if spare:
            useful = [count - rest for count, rest in zip(useful, spare, strict=True)]
            self._count("room", among, [rest * row for rest in spare])
        self._count(purpose, among, [count * row for count in useful])
        whole = (sum(useful) - useful[among.place]) * row
        if self.is_in_memory(group) and purpose not in _RARE:
            return self._in_memory(received, sent, received_counts, sent_counts, purpose, whole)
        parts = number_of_parts(most, self.pieces.get(group, 0))
        count = whole / parts

        def exchange(
            into: torch.Tensor, out: torch.Tensor, arrives: list[int], leaves: list[int]
        ) -> Pending:
            self._give(into, out)
            work = dist.all_to_all_single(
                into, out, arrives, leaves, group=among.handle, async_op=True
            )
            self.traffic.start(purpose, count, work)
            return Pending(work, f"an exchange ({purpose})", self)

        arrives, leaves = list(received_counts), list(sent_counts)
        if parts == 1:
            return exchange(received, sent, arrives, leaves)
        return in_parts(received.split(arrives), sent.split(leaves), parts, exchange)

    def is_in_memory(self, group: str) -> bool:
        """Whether exchanges of a group go through memory that this host's workers share: it is
        these workers, and no background's."""
        if self.host_exchange is None:
            return False
        ranks = self._groups[group].ranks
        return group in _IN_MEMORY and list(ranks) == self.members[self.hosts[self.rank]]

    def _in_memory(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        sent_counts: Sequence[int],
        purpose: str,
        size: float,
    ) -> Pending:
        """An exchange through memory that the workers of this host share, of so many bytes."""
        assert self.host_exchange is not None
        row = math.prod(sent.shape[1:]) * sent.element_size()
        arrives, leaves = ([count * row for count in x] for x in (received_counts, sent_counts))
        place = self.members[self.hosts[self.rank]].index(self.rank)
        self.traffic.begin()
        self.traffic.in_memory[purpose] += sum(leaves) - leaves[place]
        into, out = (x.view(-1).view(torch.uint8) for x in (received, sent))
        start, own = sum(arrives[:place]), sum(leaves[:place])
        into[start : start + arrives[place]].copy_(out[own : own + leaves[place]])
        return self.host_exchange.start(into, out, leaves, arrives, purpose, size)

    def _count(self, purpose: str, among: Group, sent: Sequence[int]) -> None:
        """Note what goes to each worker of a group, in bytes."""
        own = self.hosts[self.rank]
        across = sum(
            n for rank, n in zip(among.ranks, sent, strict=True) if self.hosts[rank] != own
        )
        self.traffic.add(purpose, sum(sent) - sent[among.place], across)

    def exchange_numbers(
        self, sent: list[list[int]], purpose: str, group: str = "rows"
    ) -> list[list[int]]:
        """Send each worker of a group its list of numbers, all equally long; return theirs."""
        message = torch.tensor(sent, device=self.device)
        received = torch.empty_like(message)
        even = [message.shape[1]] * len(sent)
        self.all_to_all(received.view(-1), message.view(-1), even, even, purpose, group).wait()
        numbers: list[list[int]] = received.tolist()
        return numbers

    def all_gather(
        self, received: torch.Tensor, sent: torch.Tensor, purpose: str, group: str = "rows"
    ) -> Pending:
        """Every worker's equally sized ``sent``, one after the other: N-1 times its bytes sent."""
        _check(received)
        _check(sent)
        count = [sent.numel()] * self.size
        repeated = sent.reshape(-1).repeat(self.size)
        most = (self.size - 1) * _bytes(sent)
        return self.all_to_all(received.view(-1), repeated, count, count, purpose, group, most=most)

    def broadcast(self, buffer: torch.Tensor, source: int, purpose: str) -> None:
        """Overwrite ``buffer`` by the one of worker ``source``."""
        _check(buffer)
        if self.rank == source:
            remote = sum(host != self.hosts[source] for host in self.hosts)
            count = _bytes(buffer)
            self.traffic.add(purpose, (self.size - 1) * count, remote * count)
        handle = self._groups["rows"].handle
        self._give(buffer)
        work = dist.broadcast(buffer, group_src=source, group=handle, async_op=True)
        Pending(work, f"values of worker {source}", self).wait()

    # -- Texts ----------------------------------------------------------------------------

    def texts(self, topic: str, text: str) -> list[str]:
        """Every worker's text on ``topic``, in worker order; waits for all.

        Raises:
            PeerError: names the workers that did not come.
        """
        return self._texts.exchange(topic, text)

    def settle(self) -> None:
        """Before all workers raise the same: wait until each has read why.

        The first to end may take the store with it, and the others' reason would be lost.
        """
        with contextlib.suppress(PeerError):
            self.barrier("settled")

    def barrier(self, topic: str) -> None:
        """Wait for all workers."""
        self.texts(f"barrier-{topic}", "")


def _bytes(buffer: torch.Tensor) -> int:
    return buffer.numel() * buffer.element_size()


def _is_held(buffer: torch.Tensor) -> bool:
    """Whether something that is not Python holds a tensor, as far as torch tells."""
    count = getattr(buffer, "_use_count", None)
    return count is not None and count() > 1


def _check(buffer: torch.Tensor) -> None:
    if not buffer.is_contiguous() or buffer.requires_grad:
        raise AssertionError("only our own dense buffers may be communicated")


def single(device: torch.device) -> World:
    """The world of a lone worker; no network is opened."""
    return World(0, 1, device)
