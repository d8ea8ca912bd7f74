"""Real launches for tests: scripts, their output, processes and sockets."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MARKER = "PARALLAX_TEST_MARKER"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")

PROLOGUE = """
import json, os, signal, subprocess, sys, time
from parallax.cluster.environment import worker_environment
from parallax.cluster.launch import launch_local_workers
from parallax.cluster.worker_start import keep_undestroyed, prepare_worker_process
from parallax.errors import *

def start(workers=2, redirect_path=None, seed=None):
    env = worker_environment()
    if env.world_size == 1 and not env.launched:
        launch_local_workers(workers, redirect_path=redirect_path, seed=seed)
    prepare_worker_process(env)
    return env
"""
# A collective that waits for a peer that never comes.
BLOCKED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
# As the runtime does: its sockets close when the process ends, not before.
keep_undestroyed(dist.group.WORLD)
def block():
    print("blocked", os.getpid(), flush=True)
    dist.all_reduce(torch.ones(3))
"""


class Run:
    """A started script: its output as it comes, and every process that carries its marker."""

    def __init__(self, command: list[str], cwd: Path, before: Callable[[], None] | None) -> None:
        self.marker = uuid.uuid4().hex
        environ = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
        environ |= {
            MARKER: self.marker,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(cwd / "tmp"),
        }
        (cwd / "tmp").mkdir(exist_ok=True)
        self.temporary = cwd / "tmp"
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=before,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self.readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, stream, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.decode().rstrip("\n"))
        stream.close()

    def wait_for(self, pattern: str, times: int = 1, seconds: float = 60) -> list[re.Match[str]]:
        """Waits until ``times`` lines of the output match."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = [m for line in [*self.out, *self.err] if (m := re.search(pattern, line))]
            if len(found) >= times:
                return found
            if self.process.poll() is not None and not any(r.is_alive() for r in self.readers):
                break
            time.sleep(0.01)
        raise AssertionError(f"no {pattern!r} in\n{self.text()}")

    def end(self, seconds: float = 60) -> int:
        """Waits for the end; the status as a shell shows it."""
        status = self.process.wait(seconds)
        for reader in self.readers:
            reader.join(10)
        return status if status >= 0 else 128 - status

    def text(self) -> str:
        return "\n".join([*self.out, "--- stderr", *self.err])

    def processes(self) -> list[int]:
        """Living processes (zombies included) that inherited the marker."""
        needle = f"{MARKER}={self.marker}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if needle in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def sockets(self) -> list[str]:
        """Listening sockets of these processes, as /proc/net shows addresses."""
        inodes = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        inodes.add(os.readlink(link).removeprefix("socket:[").rstrip("]"))
        rows = [
            row.split()
            for name in ("tcp", "tcp6")
            for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        ]
        return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]

    def assert_nothing_left(self, seconds: float = 5) -> None:
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.processes() == []
        assert list(self.temporary.iterdir()) == []


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(
        body: str,
        *arguments: str,
        command: list[str] | None = None,
        path: str = "train.py",
        before: Callable[[], None] | None = None,
    ) -> Run:
        script = tmp_path / path
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(PROLOGUE + body)
        run = Run([sys.executable, *(command or [path]), *arguments], tmp_path, before)
        runs.append(run)
        return run

    yield start
    for run in runs:
        for pid in run.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait(10)
