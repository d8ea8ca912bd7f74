"""When each worker ended, in order, and an end to those that do not stop when told.

torchrun polls its workers ten times a second and gives them 30 seconds to obey SIGTERM. Polling
cannot tell the worker that failed from those that failed because of it, and 30 seconds of a dead
run is long. So the launcher also watches each worker's end in the kernel's order (a pidfd), and
kills what is left after a short grace. torchrun remains the one who starts, stops and reaps.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "GRACE_SECONDS",
    "PEER_STATUS",
    "WorkerEnd",
    "WorkerWatch",
    "describe_status",
    "first_failure",
]

GRACE_SECONDS = 5.0
# A bystander that lost its peer leaves with this status (errors.PeerError.exit_code).
PEER_STATUS = 3
# Who fails this long after the first failure does so because the run is being stopped.
_SETTLED_SECONDS = 1.0


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker ended.

    Args:
        rank: the worker.
        status: its exit status, or minus the number of the signal that killed it.
        stopped: whether it ended because another's failure stopped the run.
    """

    rank: int
    status: int
    stopped: bool = False

    @property
    def shell_status(self) -> int:
        """The status as a shell shows it: 128 + n for signal n."""
        return self.status if self.status >= 0 else 128 - self.status


def first_failure(ends: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """The failure that the run is reported to have failed with.

    Args:
        ends: how workers ended, in the order of time.

    Returns:
        The earliest failure other than that of a worker that was stopped or only lost its peer;
        if there is no other, the earliest of one that was not stopped, or else of any; None without
        a failure.
    """
    failures = [end for end in ends if end.status != 0]
    own = [end for end in failures if not end.stopped]
    causes = [end for end in own if end.status != PEER_STATUS]
    return next(iter(causes or own or failures), None)


def describe_status(status: int) -> str:
    """How a worker ended, in words: "failed with exit status 1".

    Args:
        status: its exit status, or minus the number of the signal that killed it.
    """
    if status >= 0:
        return f"failed with exit status {status}"
    how = f"was killed by signal {-status}"
    with contextlib.suppress(ValueError):
        how += f" ({signal.Signals(-status).name})"
    if status == -signal.SIGKILL:
        how += ", as the kernel does when memory runs out"
    return how


class WorkerWatch:
    """Watches the workers from a thread; ``first_signal`` is the first that told it to stop.

    Args:
        directory: a private directory for the pipe through which workers report that they started.
        workers: number of workers.
        on_all_started: called in the thread when the last worker has reported.

    Raises:
        OSError: the pipe cannot be made.
    """

    def __init__(self, directory: Path, workers: int, on_all_started: Callable[[], None]) -> None:
        self.notices = str(directory / "started")
        os.mkfifo(self.notices, 0o600)
        self._notices = os.open(self.notices, os.O_RDWR | os.O_NONBLOCK)
        self._signals, self._signals_writer = os.pipe()
        os.set_blocking(self._signals_writer, False)
        self._lock = threading.Lock()
        self._ends: list[WorkerEnd] = []
        self._running: dict[int, int] = {}
        self._expected = workers
        self._deadline: float | None = None
        self.first_signal: int | None = None
        self._first_failure_at: float | None = None
        self._finished = False
        self._on_all_started = on_all_started
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._notices, selectors.EVENT_READ)
        self._selector.register(self._signals, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="worker watch", daemon=True)

    def start(self) -> None:
        """Starts to watch. To be called in the main thread, which receives signals."""
        # The interpreter writes each signal's number here as it arrives, whatever the main thread
        # is doing; torchrun's own handler only raises in the main thread.
        signal.set_wakeup_fd(self._signals_writer, warn_on_full_buffer=False)
        self._thread.start()

    def finish(self) -> None:
        """Stops watching; kills whatever still runs."""
        signal.set_wakeup_fd(-1)
        self._finished = True
        os.write(self._signals_writer, b"\0")
        self._thread.join()
        self._handle(self._selector.select(0))
        self._kill_all()
        self._selector.close()
        for descriptor in (self._notices, self._signals, self._signals_writer):
            os.close(descriptor)

    def ends(self) -> list[WorkerEnd]:
        """How workers ended so far, in the order of time."""
        with self._lock:
            return list(self._ends)

    def _run(self) -> None:
        while not self._finished:
            timeout = None
            if self._deadline is not None:
                timeout = max(0.0, self._deadline - time.monotonic())
            self._handle(self._selector.select(timeout))
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._kill_all()
                # Again after a while, for one that started in between.
                self._deadline = time.monotonic() + 1.0

    def _handle(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, _ in events:
            if key.fd == self._notices:
                self._on_notice()
            elif key.fd == self._signals:
                self._on_signal()
            else:
                self._on_end(key.fd, *key.data)

    def _on_notice(self) -> None:
        # Each notice is one write below PIPE_BUF, so notices arrive whole.
        for line in os.read(self._notices, 65536).splitlines():
            rank, pid = map(int, line.split())
            self._expected -= 1
            try:
                # Each worker is a child that nobody reaps before its end is seen here or in
                # torchrun's poll, so its number cannot have passed to another process.
                pidfd = os.pidfd_open(pid)
            except (AttributeError, OSError):
                # Not Linux, an old kernel, or gone already: torchrun's own poll has to do.
                continue
            self._running[pidfd] = pid
            self._selector.register(pidfd, selectors.EVENT_READ, (rank, pid))
        if self._expected == 0:
            self._on_all_started()

    def _on_signal(self) -> None:
        for number in os.read(self._signals, 4096).strip(b"\0"):
            if self.first_signal is None:
                self.first_signal = number
            # Told once, workers may finish what they do; told twice, the user is in earnest.
            grace = GRACE_SECONDS if self._deadline is None else 0.0
            self._deadline = time.monotonic() + grace

    def _on_end(self, pidfd: int, rank: int, pid: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        del self._running[pidfd]
        status = _peek_status(pid)
        now = time.monotonic()
        if status is None:
            # torchrun was quicker, and tells how it ended. If that was a failure, it is about to
            # stop the others.
            if self._first_failure_at is None:
                self._first_failure_at = now
            return
        with self._lock:
            self._ends.append(WorkerEnd(rank, status, self._was_stopped(status, now)))
        if status != 0:
            # What a failed worker started (data loaders) has nobody left to stop it.
            _kill_group(pid)
            if self._first_failure_at is None:
                self._first_failure_at = now
            if self._deadline is None:
                self._deadline = now + GRACE_SECONDS

    def _was_stopped(self, status: int, now: float) -> bool:
        # torchrun tells the others to stop at most one poll after the first failure, whose end may
        # have been reaped before it was seen here.
        first = self._first_failure_at
        return status == -signal.SIGTERM or (first is not None and now - first > _SETTLED_SECONDS)

    def _kill_all(self) -> None:
        for pid in self._running.values():
            _kill_group(pid)


def _peek_status(pid: int) -> int | None:
    """How a child ended, left for torchrun to reap; None if it was quicker."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _kill_group(pid: int) -> None:
    # torchrun makes each worker the leader of its own group.
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
