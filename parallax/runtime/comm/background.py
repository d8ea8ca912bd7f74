"""A thread that runs schedules of messages one after the other, while the model computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

SLICE = 0.2


class Later:
    """Something that the background runs."""

    def __init__(self, run: Callable[[], None], ended: Callable[[float], None]) -> None:
        """
        Args:
            run: what is to be run.
            ended: is told how many seconds were waited for it.
        """
        self._run = run
        self._ended = ended
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run it; what it raises is kept for :meth:`wait`."""
        try:
            self._run()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> None:
        """Wait in slices, so that signals are heard; raises what it raised."""
        started = time.perf_counter()
        while not self._done.wait(SLICE):
            pass
        self._ended(time.perf_counter() - started)
        if self._error is not None:
            raise self._error


class Background:
    """One thread that runs what it is given in the order in which it is given.

    All workers give the same in the same order, so that their messages match.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def give(self, later: Later) -> Later:
        """Run ``later`` when all before it have ended."""
        if self._thread is None:
            # A daemon: it may wait for a worker that has ended when this one ends.
            self._thread = threading.Thread(target=self._serve, daemon=True, name="parallax")
            self._thread.start()
        self._queue.put(later)
        return later

    def _serve(self) -> None:
        while True:
            self._queue.get().run()
