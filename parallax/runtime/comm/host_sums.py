"""Sums of flat buffers by the workers of one host, in memory that all of them share.

Every worker writes its gradients to a buffer of its own, adds up its part of all workers' buffers,
and reads the sums where all workers have put them: b bytes are read and b/k written for a buffer
of b bytes on k workers, and nothing is sent. Between hosts a part is summed by the workers with
the same place on each.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from parallax.runtime.comm.host_links import HostLinks, Signal, as_tensor
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.traffic import Traffic

_LINE = 64
"""Bytes of a cache line: what different workers write lies in different ones."""
_BLOCK = 1 << 15
"""Elements that are summed at once, of more than two workers: they stay in the cache."""
_LOOK_OUT = 200
"""Milliseconds after which a thread that looks out sees whether it still should."""


class HostArea:
    """Flat memory of every worker of the host, and of their sums."""

    def __init__(self, links: HostLinks, name: str, elements: int, dtype: torch.dtype) -> None:
        """
        Args:
            links: to the others.
            name: what the area is for, on all workers.
            elements: how many every worker has.
            dtype: of them.
        """
        self.links = links
        self.name = links.name(name)
        self.elements = elements
        self.dtype = dtype
        size = elements * dtype.itemsize
        self._sums_at = size + -size % _LINE
        # The first worker's memory has the sums as well.
        self._memory = links.share(self.name, self._sums_at + size if links.place == 0 else size)
        self.own = as_tensor(self._memory, dtype, 0, elements)
        self._all: list[torch.Tensor] = []
        self._sums = torch.empty(0)

    @property
    def all(self) -> list[torch.Tensor]:
        """By place, every worker's; waits for them when asked first."""
        self._look()
        return self._all

    @property
    def sums(self) -> torch.Tensor:
        """What all workers read, and each writes its part of."""
        self._look()
        return self._sums

    def _look(self) -> None:
        if self._all:
            return
        links = self.links
        memory = [
            self._memory if place == links.place else links.memory(self.name, place)
            for place in range(links.size)
        ]
        self._sums = as_tensor(memory[0], self.dtype, self._sums_at, self.elements)
        self._all = [as_tensor(one, self.dtype, 0, self.elements) for one in memory]


class HostSum:
    """The sum of a part of an area, step after step."""

    def __init__(
        self,
        area: HostArea,
        number: int,
        first: int,
        last: int,
        purpose: str = "dense: sum",
        crosses: bool = False,
    ) -> None:
        """
        Args:
            area: where it lies.
            number: of the sum, among those of the area.
            first, last: the first element, and the one after the last.
            purpose: what its bytes are counted as.
            crosses: it is summed between hosts, too.
        """
        self.purpose = purpose
        self.crosses = crosses
        self.area = area
        self.key = area.name, number
        self._bounds = first, last
        self.began = 0.0
        self.crossing: Pending | None = None
        places, place, size = area.links.size, area.links.place, last - first
        self._part = (first + size * place // places, first + size * (place + 1) // places)
        self.bytes = 2 * (places - 1) * size * area.dtype.itemsize / places
        """What the others read of a worker's buffer, and of its sums."""

    @property
    def buffer(self) -> torch.Tensor:
        """To be filled before the sum is started."""
        first, last = self._bounds
        return self.area.own[first:last]

    @property
    def result(self) -> torch.Tensor:
        """The sum: to be read only, since all workers read it, and not after the buffer was filled
        again."""
        first, last = self._bounds
        return self.area.sums[first:last]

    def add(self) -> torch.Tensor:
        """Add up this worker's part of all buffers."""
        first, last = self._part
        out = self.area.sums[first:last]
        parts = [own[first:last] for own in self.area.all]
        step = max(len(out), 1) if len(parts) == 2 else _BLOCK
        for start in range(0, len(out), step):
            block = out[start : start + step]
            torch.add(parts[0][start : start + step], parts[1][start : start + step], out=block)
            for part in parts[2:]:
                block.add_(part[start : start + step])
        return out


class HostSums:
    """The sums of a worker with the others of its host that are under way.

    They are added in the order in which they were started, the same on all workers: between hosts
    messages have to be in one order. Whoever takes in a signal goes on with them: this worker, when
    it starts one or waits; and where sums cross to other hosts a thread, so that they leave while
    the model computes.
    """

    def __init__(
        self,
        links: HostLinks,
        traffic: Traffic,
        cross: Callable[[torch.Tensor, str], Pending],
    ) -> None:
        """
        Args:
            links: to the others.
            traffic: of this worker.
            cross: starts the sum over hosts of a buffer, for a purpose.
        """
        self.links = links
        self._traffic = traffic
        self._cross_hosts = cross
        self._waiting: deque[HostSum] = deque()
        """Started, and not all buffers are known to be full."""
        self._crossing: list[HostSum] = []
        """Added, and other hosts' parts are on their way."""
        self._adding = False
        self._expected = threading.Event()
        """Signals are, while this worker computes."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        """What ended the thread."""
        links.when_told = self._go_on

    def start(self, one: HostSum) -> None:
        """Its buffer is full.

        Raises:
            PeerError: another worker ended.
        """
        one.began = time.perf_counter()
        self._traffic.begin()
        self._traffic.add(one.purpose, one.bytes, 0)
        self._traffic.in_memory[one.purpose] += round(one.bytes)
        with self.links.lock:
            self._waiting.append(one)
        self.links.tell("full", *one.key)
        self.links.advance()
        if one.crosses and self._waiting:
            self._expect()

    def _expect(self) -> None:
        """Let the thread look out for signals."""
        if self._thread is None:
            # A daemon: it may wait for a worker that has ended when this one ends.
            self._thread = threading.Thread(target=self._look_out, daemon=True, name="parallax")
            self._thread.start()
        self._expected.set()

    def _look_out(self) -> None:
        try:
            while self._expected.wait():
                if not self.links.look_out(_LOOK_OUT):
                    continue
                with self.links.lock:
                    self.links.advance()
                    if not self._waiting:
                        self._expected.clear()
        except BaseException as error:
            self._error = error

    def wait(self, sums: Sequence[HostSum]) -> None:
        """Wait for sums that were started.

        Raises:
            PeerError: another worker ended, or did not answer in time.
            DisagreementError: another worker sums something else.
        """
        for one in sums:
            with self.links.lock:
                while one in self._waiting:
                    self._add_first()
        if self._error is not None:
            raise self._error
        for one in sums:
            self._cross(one)
        for one in sums:
            self._hear("summed", one)
            self._traffic.end(one.purpose, one.bytes, one.began)

    def _add_first(self) -> None:
        self._adding = True  # Nobody else takes what is waited for here.
        try:
            self._hear("full", self._waiting[0])
        finally:
            self._adding = False
        self._add(self._waiting.popleft())

    def _hear(self, signal: Signal, one: HostSum) -> None:
        if self.links.heard(signal, *one.key):
            return
        began = time.perf_counter()
        self.links.hear(signal, *one.key)
        self._traffic.wait(time.perf_counter() - began)

    def _go_on(self) -> None:
        """As far as is possible without waiting."""
        while self._waiting and not self._adding and self._is_full(self._waiting[0]):
            self._add(self._waiting.popleft())
        for one in list(self._crossing):
            if one.crossing is not None and one.crossing.has_arrived:
                self._cross(one)

    def _is_full(self, one: HostSum) -> bool:
        return self.links.heard("full", *one.key)

    def _add(self, one: HostSum) -> None:
        self._adding = True  # It may wait for memory, and others have to wait for it.
        try:
            summed = one.add()
        finally:
            self._adding = False
        if not one.crosses:
            self.links.tell("summed", *one.key)
            return
        one.crossing = self._cross_hosts(summed, one.purpose)
        self._crossing.append(one)

    def _cross(self, one: HostSum) -> None:
        """Wait for the sum of the parts of all hosts."""
        with self.links.lock:
            crossing, one.crossing = one.crossing, None
            if crossing is None:
                return
            self._crossing.remove(one)
        crossing.wait()
        self.links.tell("summed", *one.key)
