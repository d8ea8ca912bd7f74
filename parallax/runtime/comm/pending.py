"""Messages under way. Waits are sliced, so that signals and Python stay alive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from parallax.errors import PeerError
from parallax.runtime.comm.traffic import Traffic

SLICE = timedelta(milliseconds=200)
TIMEOUT = timedelta(minutes=30)


class Waiting(Protocol):
    """The worker that waits."""

    rank: int
    device: torch.device
    traffic: Traffic


class Pending:
    """A collective under way."""

    def __init__(self, work: Any, what: str, worker: Waiting) -> None:
        self._work = work
        self._what = what
        self._worker = worker

    def wait(self) -> None:
        """Wait in slices.

        Raises:
            PeerError: another worker ended or did not answer in time.
        """
        if self._work is None:
            return
        work, self._work = self._work, None
        started = time.perf_counter()
        try:
            self._finish(work)
        finally:
            self._worker.traffic.wait(time.perf_counter() - started)

    @property
    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return at once, as far as the processor knows."""
        if self._work is None:
            return True
        return self._worker.device.type == "cpu" and bool(self._work.is_completed())

    def _finish(self, work: Any) -> None:
        if self._worker.device.type == "cuda":
            work.wait()
            return
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError as error:
                if time.monotonic() > deadline:
                    raise self._lost("no answer") from error
                if not work.is_completed():
                    continue
            # It ended, maybe just after the slice did: only another look tells how.
            try:
                work.wait()
                return
            except RuntimeError as error:
                raise self._lost(str(error)) from error

    def _lost(self, reason: str) -> PeerError:
        return lost_worker(self._worker, self._what, reason)


class Transferring:
    """A message between two, under way: its wait is not sliced, for threads that nobody stops."""

    WHAT = "the sum of gradients"

    def __init__(self, works: Sequence[Any], worker: Waiting) -> None:
        self._works = works
        self._worker = worker

    def wait(self) -> None:
        """Wait for it.

        Raises:
            PeerError: another worker ended or did not answer in time.
        """
        with told_of_peers(self._worker, self.WHAT):
            for work in self._works:
                work.wait()


@contextlib.contextmanager
def told_of_peers(worker: Waiting, what: str) -> Iterator[None]:
    """Raises the engine's errors as those of another worker that this one waits for."""
    try:
        yield
    except RuntimeError as error:
        raise lost_worker(worker, what, str(error)) from error


def lost_worker(worker: Waiting, what: str, reason: str) -> PeerError:
    """Another worker failed while this one waited for something."""
    return PeerError(
        f"Worker {worker.rank} lost another worker while waiting for {what}: "
        f"{(reason.splitlines() or ['no reason'])[0]}",
        hint="the first failure in the other workers' output is the cause; this one follows.",
    )
