"""The output of a host's workers: named pipes that the agent reads and passes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

__all__ = ["OutputPipes", "pipe_path"]

_READ_BYTES = 64 * 1024
Send = Callable[[int, bool, bytes], Awaitable[None]]


def pipe_path(directory: str | Path, local_rank: int, error: bool) -> str:
    """Where a worker's output or error pipe is."""
    return os.path.join(directory, f"{local_rank}.{'err' if error else 'out'}")


class OutputPipes:
    """Named pipes for the output of a host's workers.

    Args:
        directory: an empty private directory for the pipes.
        first_rank: number of the first worker.
        workers: how many.
        send: called with rank, whether to standard error, and bytes; awaited before more is read.

    Raises:
        OSError: a pipe cannot be made.
    """

    def __init__(self, directory: Path, first_rank: int, workers: int, send: Send) -> None:
        self._send = send
        self._pipes: list[tuple[int, bool, int]] = []
        for local_rank in range(workers):
            for error in (False, True):
                path = pipe_path(directory, local_rank, error)
                os.mkfifo(path, 0o600)
                # Open for writing too: then there is no end-of-file between two writers.
                pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                self._pipes.append((first_rank + local_rank, error, pipe))
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts to read."""
        self._tasks = [asyncio.create_task(self._pass_on(*pipe)) for pipe in self._pipes]

    async def finish(self) -> None:
        """Passes on what is left and stops. The workers must have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rank, error, pipe in self._pipes:
            while data := _read(pipe):
                await self._send(rank, error, data)
            os.close(pipe)
        self._pipes.clear()

    async def _pass_on(self, rank: int, error: bool, pipe: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data = _read(pipe)
            if data:
                await self._send(rank, error, data)
                continue
            ready = asyncio.Event()
            loop.add_reader(pipe, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(pipe)


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, _READ_BYTES)
    except BlockingIOError:
        return b""
