"""Processes that a benchmark asks, a line of JSON at a time, and that answer in kind.

What one system does to its process, its settings of the allocator or its threads, is not to make
another faster or slower: so each has processes of its own, and the driver says whose turn it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

LINES = 3  # of a failed process's output, if none of them names an error
LETTERS = 300
CHUNK = 1 << 16

Answer = TypeVar("Answer")


class SilentError(Exception):
    """Processes failed or took too long to answer; the message fits a cell of a table."""


class Asked:
    """Processes of which the first answers, on its standard output, what it reads on its standard
    input; all are killed by :meth:`close`.

    Args:
        processes: by rank; the first with pipes.
        logs: what each says on standard error.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
        self._processes = processes
        self._logs = logs
        self._said = b""

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for pipe in (self._processes[0].stdin, self._processes[0].stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, question: msgspec.Struct, kind: type[Answer], limit: float) -> Answer:
        """Its answer.

        Args:
            question: what the processes know.
            kind: of the answer.
            limit: seconds.

        Raises:
            SilentError: a process ended, or there is no answer within ``limit`` seconds.
        """
        pipe = self._processes[0].stdin
        assert pipe is not None
        # What has ended says why in its log.
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe.fileno(), msgspec.json.encode(question) + b"\n")
        return self.answer(kind, limit)

    def answer(self, kind: type[Answer], limit: float) -> Answer:
        """What comes next, unasked or not. Arguments and errors: see :meth:`ask`."""
        deadline = time.monotonic() + limit
        pipe = self._processes[0].stdout
        assert pipe is not None
        for rank, process in enumerate(self._processes):
            if process.returncode is not None:
                self._failed(rank)
        watched = {os.pidfd_open(process.pid): rank for rank, process in enumerate(self._processes)}
        try:
            while b"\n" not in self._said:
                rest = max(0, deadline - time.monotonic())
                ready, _, _ = select.select([pipe, *watched], [], [], rest)
                if not ready:
                    raise SilentError(f"did not answer within {limit:.0f} s")
                if pipe in ready and (text := os.read(pipe.fileno(), CHUNK)):
                    self._said += text
                    continue
                ended = [watched[one] for one in ready if one in watched]
                # Its output ends before the process does.
                self._failed(ended[0] if ended else 0)
        finally:
            for descriptor in watched:
                os.close(descriptor)
        line, _, self._said = self._said.partition(b"\n")
        return msgspec.json.decode(line, type=kind)

    def _failed(self, rank: int) -> None:
        status = self._processes[rank].wait()
        raise SilentError(f"worker {rank} ended with {status}: {_last_words(self._logs[rank])}")


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b: |what\(\):", line)]
    return " / ".join(errors[-1:] or lines[-LINES:])[:LETTERS]


class Asker:
    """The other side, in the process that is asked; what it prints goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def question(self, kind: Any) -> Any:
        """The next question, of this type; None when there are no more."""
        line = sys.stdin.buffer.readline()
        return msgspec.json.decode(line, type=kind) if line else None

    def answer(self, value: object) -> None:
        self._answers.write(msgspec.json.encode(value) + b"\n")
        self._answers.flush()
