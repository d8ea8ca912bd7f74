"""The output of all hosts' workers on the launcher's console, and in files if asked."""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path

from parallax.cluster.console import Console
from parallax.cluster.worker_output import LineMarker, write_all

__all__ = ["ClusterOutput"]

_KEPT_LINES = 60
_ERROR = re.compile(r"(?:error: )?(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt)\b")


class ClusterOutput:
    """Shows workers' lines, marked by host and worker, and keeps the last of each.

    Args:
        redirect: directory that also receives each worker's output, as ``worker-0.out`` and
            ``worker-0.err``; those of an earlier run are overwritten.
        quiet: whether lines of the launcher's own about what goes well are left out.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self, redirect: Path | None, quiet: bool = False) -> None:
        self._quiet = quiet
        if redirect is not None:
            redirect.mkdir(parents=True, exist_ok=True)
        self.redirect = redirect
        self._files: dict[tuple[int, bool], int | None] = {}
        self._markers: dict[tuple[str, int, bool], LineMarker] = {}
        self._last: dict[tuple[str, int], deque[str]] = {}
        self._console = Console()

    def save(self, workers: int) -> None:
        """Makes the files of all workers, if output is saved; also of those that print nothing."""
        for rank in range(workers):
            for error in (False, True):
                self._save(LineMarker(b"parallax: "), rank, error, b"")

    def show(self, host: str, rank: int, error: bool, data: bytes) -> None:
        """Takes bytes of a worker (or of a host's agent, rank -1) and shows what lines they end."""
        key = (host, rank, error)
        marker = self._markers.get(key)
        if marker is None:
            label = f"[{host}] " if rank < 0 else f"[{host} worker {rank}] "
            marker = self._markers[key] = LineMarker(label.encode())
        self._save(marker, rank, error, data)
        self._emit(key, marker.feed(data))

    def say(self, text: str) -> None:
        """A line of the launcher's own, of what goes well."""
        if not self._quiet:
            self._console.put(2, f"parallax: {text}\n".encode(errors="replace"))

    def write(self, text: str) -> None:
        """Lines as they are, to standard error."""
        self._console.put(2, text.encode(errors="replace"))

    def last_words(self, host: str, rank: int) -> list[str]:
        """A worker's last lines of standard error, from its last traceback or error on."""
        lines = list(self._last.get((host, rank), ()))
        starts = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent")]
        if starts:
            return lines[starts[-1] :]
        errors = [at for at, line in enumerate(lines) if line.startswith("error: ")]
        return lines[errors[-1] :] if errors else lines[-5:]

    def cause(self, host: str, rank: int) -> str:
        """The line in which a worker's last words name an error; empty if there is none."""
        lines = self.last_words(host, rank)
        named = [line for line in lines if _ERROR.match(line)]
        return named[-1].removeprefix("error: ") if named else ""

    def finish(self, seconds: float = 5.0) -> None:
        """Shows what is left; a console that takes nothing for ``seconds`` is given up."""
        for key, marker in self._markers.items():
            self._emit(key, marker.finish())
        self._markers.clear()
        self._console.finish(seconds)
        for file in self._files.values():
            if file is not None:
                os.close(file)
        self._files.clear()

    def _emit(self, key: tuple[str, int, bool], text: bytes) -> None:
        host, rank, error = key
        if not text:
            return
        if error and rank >= 0:
            kept = self._last.setdefault((host, rank), deque(maxlen=_KEPT_LINES))
            prefix = f"[{host} worker {rank}] "
            for line in text.decode(errors="replace").splitlines():
                kept.append(line.removeprefix(prefix))
        self._console.put(2 if error else 1, text)

    def _save(self, marker: LineMarker, rank: int, error: bool, data: bytes) -> None:
        if self.redirect is None or rank < 0:
            return
        key = (rank, error)
        try:
            if key not in self._files:
                path = self.redirect / f"worker-{rank}.{'err' if error else 'out'}"
                self._files[key] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            file = self._files[key]
            if file is not None:
                write_all(file, data)
        except OSError as problem:
            file, self._files[key] = self._files.get(key), None
            if file is not None:
                os.close(file)
            note = f"its output is no longer saved in {self.redirect}: {problem.strerror}"
            self._console.put(2, marker.prefix + note.encode() + b"\n")
