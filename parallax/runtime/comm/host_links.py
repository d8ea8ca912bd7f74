"""Links between the workers of one host: memory that they share, and short signals about it.

Each pair of workers has a Unix socket. A worker that shares memory sends its file descriptor over
them, so that nothing has a name that could be left behind; signals say what the memory holds. A
system call lies between writing memory and telling of it, and between being told and reading it,
so that the order holds on every processor. A worker that ends closes its sockets, and whoever
waits for it learns so at once.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import torch

from parallax.errors import DisagreementError, PeerError
from parallax.runtime.comm.texts import digest

Signal = Literal["memory", "full", "summed", "sent", "taken"]

_SIGNALS: tuple[Signal, ...] = ("memory", "full", "summed", "sent", "taken")
_RECORD = struct.Struct("=QIHH")
"""Whose signal, number, kind, and what else there is to say."""
_MOST_AT_ONCE = 64
"""Descriptors that are taken in by one call."""
_SLICE = 200
"""Milliseconds of a wait, after which Python may do something else."""
MEET_SECONDS = 60.0
"""In which the workers of a host have connected to each other."""


class HostLinks:
    """This worker's links to the others of its host, for any of its threads."""

    def __init__(
        self, rank: int, place: int, peers: dict[int, socket.socket], seconds: float
    ) -> None:
        """
        Args:
            rank: this worker.
            place: of this worker among those of its host.
            peers: by place, the links to all others.
            seconds: that a wait lasts at most.
        """
        self._rank = rank
        self.place = place
        self.size = len(peers) + 1
        self._peers = peers
        self._seconds = seconds
        self.lock = threading.RLock()
        """Is held while something is read or told, and by a thread that waits: it alone reads."""
        self._partial: dict[int, bytes] = dict.fromkeys(peers, b"")
        self._descriptors: dict[int, deque[int]] = defaultdict(deque)
        """By place, descriptors whose records are still to come."""
        self._memory: dict[tuple[int, int], mmap.mmap] = {}
        """By whose it is and place, memory that another worker shares."""
        self._told: dict[tuple[Signal, int, int], set[int]] = defaultdict(set)
        """By signal, name and number, who has told so."""
        self._details: dict[tuple[Signal, int, int, int], int] = {}
        """By the same and place, what else was told."""
        self._poll, self._poll_apart = select.poll(), select.poll()
        self._places = {}
        for at, peer in peers.items():
            peer.setblocking(False)
            self._poll.register(peer, select.POLLIN)
            self._poll_apart.register(peer, select.POLLIN)
            self._places[peer.fileno()] = at
        self.when_told: Callable[[], None] = lambda: None
        """Is called when signals have come."""
        self._names: Counter[str] = Counter()
        self._known: set[int] = set()

    # -- Memory -----------------------------------------------------------------------------

    def name(self, text: str) -> int:
        """A new name for what several workers make alike, as this one does, in the same order."""
        self._names[text] += 1
        return self.common_name(f"{text}\n{self._names[text]}")

    def common_name(self, text: str) -> int:
        """The same name for the same text, always."""
        name = int(digest(text), 16)
        with self.lock:
            self._known.add(name)
        return name

    def share(self, name: int, size: int) -> mmap.mmap:
        """New memory of so many bytes, zeros, that the others may look into.

        Args:
            name: what it is for: from :meth:`name`, and used for one memory.
            size: bytes.
        """
        descriptor = os.memfd_create("parallax")
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
            record = _RECORD.pack(name, 0, _SIGNALS.index("memory"), 0)
            with self.lock:
                for at in self._peers:
                    self._send(at, record, descriptor)
        finally:
            os.close(descriptor)
        return memory

    def memory(self, name: int, place: int) -> mmap.mmap:
        """What another worker shares under a name; waits for it.

        Raises:
            PeerError: it ended, or did not answer in time.
            DisagreementError: it shares something else.
        """
        with self.lock:
            self._wait(lambda: () if (name, place) in self._memory else (place,))
            return self._memory.pop((name, place))

    # -- Signals ----------------------------------------------------------------------------

    def tell(
        self, signal: Signal, name: int, number: int, detail: int = 0, to: int | None = None
    ) -> None:
        """Tell all others, or one.

        Raises:
            PeerError: one of them ended.
        """
        record = _RECORD.pack(name, number, _SIGNALS.index(signal), detail)
        with self.lock:
            for at in self._peers if to is None else (to,):
                self._send(at, record)

    def detail(self, signal: Signal, name: int, number: int, place: int) -> int:
        """What else a worker told with a signal that was heard; then it is forgotten."""
        return self._details.pop((signal, name, number, place), 0)

    def has_told(self, signal: Signal, name: int, number: int) -> bool:
        """Whether all others have told so, as far as was taken in."""
        return len(self._told[signal, name, number]) == len(self._peers)

    def heard(self, signal: Signal, name: int, number: int) -> bool:
        """Whether all others have told so, as far as was taken in; then it is forgotten."""
        key = (signal, name, number)
        with self.lock:
            if len(self._told[key]) < len(self._peers):
                return False
            del self._told[key]
            return True

    def hear(self, signal: Signal, name: int, number: int) -> None:
        """Wait until all others have told so.

        Raises:
            PeerError: one of them ended, or did not answer in time.
            DisagreementError: one of them sums something else.
        """
        with self.lock:
            told = self._told[signal, name, number]
            self._wait(lambda: self._peers.keys() - told)
            del self._told[signal, name, number]

    def advance(self) -> None:
        """Take in what has come, without waiting.

        Raises:
            PeerError: another worker ended.
        """
        with self.lock:
            if self._take_in(0):
                self.when_told()

    def look_out(self, milliseconds: int) -> bool:
        """Whether something has come, or comes soon, for another thread or this one to take in."""
        return bool(self._poll_apart.poll(milliseconds))

    # -- Sockets ----------------------------------------------------------------------------

    def _wait(self, missing: Callable[[], Collection[int]]) -> None:
        """Wait in slices, so that signals to the process stay alive, until nobody is missing."""
        deadline = time.monotonic() + self._seconds
        while late := missing():
            if self._take_in(_SLICE):
                self.when_told()
                continue
            self._check_same(late)
            if time.monotonic() > deadline:
                raise self._lost("no answer")

    def _check_same(self, late: Collection[int]) -> None:
        """Whether a worker that is waited for tells of what this one does not know: it would have
        told the other before, if it ran the same."""
        strange = [told for (_, name, _), told in self._told.items() if name not in self._known]
        if any(told.intersection(late) for told in strange):
            raise DisagreementError(
                f"Worker {self._rank} and another one of its host exchange different things.",
                hint="run the same step, with the same strategy, on every worker.",
            )

    def _send(self, at: int, record: bytes, descriptor: int | None = None) -> None:
        peer = self._peers[at]
        while record:
            try:
                if descriptor is None:
                    sent = peer.send(record)
                else:
                    sent = socket.send_fds(peer, [record], [descriptor])
                    descriptor = None
                record = record[sent:]
            except BlockingIOError:
                # The other may itself be sending: take in what is there, or both would wait.
                self._take_in(1)
            except OSError as error:
                raise self._lost(str(error)) from error

    def _take_in(self, milliseconds: int) -> bool:
        """Read what has come, or comes soon; whether anything did."""
        ready = self._poll.poll(milliseconds)
        for number, _ in ready:
            self._read(self._places[number])
        return bool(ready)

    def _read(self, at: int) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._peers[at], 1 << 14, _MOST_AT_ONCE)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(str(error)) from error
        self._descriptors[at].extend(descriptors)
        if not data:
            raise self._lost("it ended")
        data = self._partial[at] + data
        whole = len(data) - len(data) % _RECORD.size
        self._partial[at] = data[whole:]
        for name, number, kind, detail in _RECORD.iter_unpack(data[:whole]):
            signal = _SIGNALS[kind]
            if signal == "memory":
                descriptor = self._descriptors[at].popleft()
                try:
                    size = os.fstat(descriptor).st_size
                    self._memory[name, at] = mmap.mmap(descriptor, size)
                finally:
                    os.close(descriptor)
            else:
                self._told[signal, name, number].add(at)
                if detail:
                    self._details[signal, name, number, at] = detail

    def _lost(self, reason: str) -> PeerError:
        return PeerError(
            f"Worker {self._rank} lost another worker of its host: {reason}",
            hint="the first failure in the other workers' output is the cause; this one follows.",
        )

    def close(self) -> None:
        """Let the others know that this worker ends."""
        for peer in self._peers.values():
            peer.close()


def connect_host(
    exchange: Callable[[str, str], list[str]], ranks: Sequence[int], rank: int, seconds: float
) -> HostLinks | None:
    """Links among the workers of a host; all workers of all hosts must call this at once.

    Args:
        exchange: gives all workers' texts on a topic.
        ranks: the workers of this host.
        rank: this worker.
        seconds: that a wait lasts at most.

    Returns:
        None on all workers, where one of them cannot have such links.
    """
    place = list(ranks).index(rank)
    listener = _listener() if len(ranks) > 1 else None
    texts = exchange("host links", "" if listener is None else listener.getsockname()[1:].decode())
    peers: dict[int, socket.socket] | None = None
    if listener is not None:
        with listener:
            peers = _meet(listener, place, [texts[other] for other in ranks])
    outcome = exchange("host links met", "no" if peers is None else "yes")
    if "no" not in outcome and peers is not None:
        return HostLinks(rank, place, peers, seconds)
    for peer in (peers or {}).values():
        peer.close()
    return None


def _listener() -> socket.socket | None:
    """A socket that others of this host can connect to, of a name that is in no file system."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    try:
        os.close(os.memfd_create("parallax"))  # Some sandboxes forbid it.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(b"\0parallax-" + secrets.token_hex(16).encode())
        listener.listen(128)
    except OSError:
        return None
    return listener


def _meet(
    listener: socket.socket, place: int, names: Sequence[str]
) -> dict[int, socket.socket] | None:
    """Connect to all before this worker, and be connected to by all after it."""
    peers: dict[int, socket.socket] = {}
    try:
        for at in range(place):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peers[at] = peer
            peer.settimeout(MEET_SECONDS)
            peer.connect(b"\0" + names[at].encode())
            peer.sendall(struct.pack("=I", place))
            _check_user(peer)
        listener.settimeout(MEET_SECONDS)
        while len(peers) < len(names) - 1:
            peer, _ = listener.accept()
            peer.settimeout(MEET_SECONDS)
            _check_user(peer)
            (at,) = struct.unpack("=I", peer.recv(4, socket.MSG_WAITALL))
            peers[at] = peer
    except (OSError, struct.error):
        for peer in peers.values():
            peer.close()
        return None
    return peers


def _check_user(peer: socket.socket) -> None:
    """Others of the machine may know the name, but nobody but this user shares memory."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise PermissionError("another user's process")


def as_tensor(memory: mmap.mmap, dtype: torch.dtype, start: int, elements: int) -> torch.Tensor:
    """Elements of shared memory, from a byte on."""
    return torch.frombuffer(memory, dtype=dtype, count=elements, offset=start)
