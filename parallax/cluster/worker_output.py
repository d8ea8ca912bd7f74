"""The workers' output on the console, each line marked with its worker, and in files if asked.

Each worker writes into named pipes that the launcher reads: lines appear at once, lines of two
workers never mix, and nothing accumulates on disk in a long run (torchrun's own way is to write
files without limit and to follow them).
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import threading
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["MAX_LINE_BYTES", "LineMarker", "WorkerOutput", "write_all"]

MAX_LINE_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024
# A carriage return at the end may be half of "\r\n" and is left for the next time.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


@dataclass
class LineMarker:
    """Cuts a stream of bytes into lines and puts a prefix before each.

    A progress bar's carriage returns end lines too, since a prefix cannot be written over.

    Args:
        prefix: what is written before each line.
    """

    prefix: bytes
    _rest: bytes = b""

    def feed(self, data: bytes) -> bytes:
        """The marked lines that ``data`` completes."""
        text = self._rest + data
        marked = []
        begin = 0
        for end in _LINE_END.finditer(text):
            line = text[begin : end.start()]
            begin = end.end()
            # "\rstep 1\rstep 2" begins with an empty piece that nobody meant as a line.
            if line or end[0] != b"\r":
                marked.append(self.prefix + line + b"\n")
        self._rest = text[begin:]
        if len(self._rest) >= MAX_LINE_BYTES:
            marked.append(self.finish())
        return b"".join(marked)

    def finish(self) -> bytes:
        """The last line, if it was never ended."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return self.prefix + rest + b"\n" if rest else b""


@dataclass
class _Stream:
    pipe: int
    console: int
    marker: LineMarker
    file: int | None
    console_lost: bool = field(default=False)

    def read(self) -> bool:
        """Moves what the pipe holds, up to one block; False if it holds nothing."""
        try:
            data = os.read(self.pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        if self.file is not None:
            self._save(self.file, data)
        self._show(self.marker.feed(data))
        return bool(data)

    def finish(self) -> None:
        while self.read():
            pass
        self._show(self.marker.finish())
        if self.file is not None:
            os.close(self.file)
        os.close(self.pipe)

    def _show(self, text: bytes) -> None:
        if self.console_lost:
            return
        try:
            write_all(self.console, text)
        except OSError:
            # The reader of the console left (`| head`, a closed terminal). The run goes on, as
            # its results do not depend on being watched.
            self.console_lost = True

    def _save(self, file: int, data: bytes) -> None:
        try:
            write_all(file, data)
        except OSError as error:
            self.file = None
            os.close(file)
            note = self.marker.prefix + f"its output is no longer saved: {error}\n".encode()
            with contextlib.suppress(OSError):
                write_all(2, note)


class WorkerOutput:
    """Named pipes for the output of all workers, and the thread that reads them.

    Args:
        directory: an empty private directory for the pipes.
        workers: number of workers.
        redirect: directory that also receives each worker's output, as ``worker-0.out`` and
            ``worker-0.err``; those of an earlier run are overwritten.

    Raises:
        OSError: a pipe or file cannot be made.
    """

    def __init__(self, directory: Path, workers: int, redirect: Path | None) -> None:
        self.stdouts: dict[int, str] = {}
        self.stderrs: dict[int, str] = {}
        self._streams: list[_Stream] = []
        if redirect is not None:
            redirect.mkdir(parents=True, exist_ok=True)
        for rank in range(workers):
            for name, console, paths in (("out", 1, self.stdouts), ("err", 2, self.stderrs)):
                path = directory / f"{rank}.{name}"
                os.mkfifo(path, 0o600)
                # Open for writing too: then there is no end-of-file between two writers.
                pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                file = None
                if redirect is not None:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                    file = os.open(redirect / f"worker-{rank}.{name}", flags, 0o666)
                marker = LineMarker(f"[worker {rank}] ".encode())
                self._streams.append(_Stream(pipe, console, marker, file))
                paths[rank] = str(path)
        self._stop, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="worker output", daemon=True)

    def start(self) -> None:
        """Starts to read."""
        self._thread.start()

    def finish(self) -> None:
        """Shows what is left and stops. The workers must have ended."""
        os.write(self._stop_writer, b"x")
        self._thread.join()
        for stream in self._streams:
            stream.finish()
        self._streams.clear()
        os.close(self._stop)
        os.close(self._stop_writer)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ, None)
            for stream in self._streams:
                selector.register(stream.pipe, selectors.EVENT_READ, stream)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    key.data.read()


def write_all(file: int, data: bytes) -> None:
    """Writes all of ``data``, also to a descriptor that does not block.

    Raises:
        OSError: it cannot be written.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(file, view) :]
        except BlockingIOError:
            # Some parents hand down a console that does not block.
            select.select([], [file], [])
