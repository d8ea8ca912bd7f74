"""The launcher's console, written by a thread of its own.

A console that takes nothing (a stopped terminal) must not stop the launcher's signs of life, which
would end the run. What waits for it is bounded by its size, not by its number of pieces: a burst of
short lines is no reason to lose any.
"""

from __future__ import annotations

import threading
from collections import deque

from parallax.cluster.worker_output import write_all

__all__ = ["Console"]

_WAITING_BYTES = 64 * 2**20
_WRITE_BYTES = 16 * 1024


class Console:
    """Writes pieces of text to standard output and standard error, in the order they came.

    Args:
        waiting_bytes: how much may wait; what comes beyond it is not shown, and that is said.
    """

    def __init__(self, waiting_bytes: int = _WAITING_BYTES) -> None:
        self._limit = waiting_bytes
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._waiting = 0  # bytes, with the piece that is being written
        self._dropped = 0  # bytes since this was last said
        self._ended = False
        self._written = 0  # blocks
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def put(self, descriptor: int, text: bytes) -> None:
        """Takes a piece of text for a descriptor. Never blocks."""
        with self._changed:
            if self._waiting + len(text) > self._limit:
                self._dropped += len(text)
                return
            self._say_dropped()
            self._append(descriptor, text)

    def finish(self, seconds: float = 5.0) -> None:
        """Waits until all is written; a console that takes nothing for ``seconds`` is given up."""
        with self._changed:
            self._say_dropped()
            self._ended = True
            self._changed.notify()
        written = -1
        while self._thread.is_alive() and written != self._written:
            written = self._written
            self._thread.join(seconds)

    def _say_dropped(self) -> None:
        if self._dropped:
            note = f"parallax: {self._dropped} bytes of output were not shown: the console is"
            self._append(2, f"{note} too slow\n".encode())
            self._dropped = 0

    def _append(self, descriptor: int, text: bytes) -> None:
        self._pieces.append((descriptor, text))
        self._waiting += len(text)
        self._changed.notify()

    def _next(self) -> tuple[int, bytes] | None:
        """What is written next, pieces for one descriptor together; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._ended)
            if not self._pieces:
                return None
            descriptor, text = self._pieces.popleft()
            texts, size = [text], len(text)
            while self._pieces and self._pieces[0][0] == descriptor and size < _WRITE_BYTES:
                texts.append(self._pieces.popleft()[1])
                size += len(texts[-1])
            return descriptor, b"".join(texts)

    def _run(self) -> None:
        lost: set[int] = set()
        while (item := self._next()) is not None:
            descriptor, text = item
            for start in range(0, len(text), _WRITE_BYTES):
                if descriptor in lost:
                    break
                try:
                    write_all(descriptor, text[start : start + _WRITE_BYTES])
                except OSError:
                    # The reader of the console left (`| head`, a closed terminal). The run goes on.
                    lost.add(descriptor)
                self._written += 1
            with self._changed:
                self._waiting -= len(text)
