"""Runs on the virtual cluster: scripts that are launched on several hosts over real ssh."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from launching import LAUNCHER_VARIABLES, ROOT, Run

from benchmarks.virtual_cluster import VirtualCluster, missing_requirement

# What ends a run ends it within this, also on a machine that does other things.
SECONDS = 30.0
# Every agent and many a worker imports torch, all on the same few cores.
START_SECONDS = 150.0
PROLOGUE = """
import json, os, signal, sys, time
from parallax.cluster.begin import begin
from parallax.cluster.environment import worker_environment
from parallax.cluster.worker_start import prepare_worker_process
from parallax.errors import *

def start(redirect_path=None):
    env = worker_environment()
    if not env.launched:
        begin("hosts.yml", workers=2, redirect_path=redirect_path)
    prepare_worker_process(env)
    return env

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
"""


class ClusterRun(Run):
    """A command that runs on a host of the cluster, with its output and what it leaves."""

    def __init__(
        self, cluster: VirtualCluster, host: str, directory: Path, command: Sequence[str]
    ) -> None:
        self.cluster = cluster
        self.out: list[str] = []
        self.err: list[str] = []
        self.temporary = directory / "tmp"
        unset = [word for name in LAUNCHER_VARIABLES for word in ("-u", name)]
        self.process = cluster.popen(
            host,
            ["env", f"--chdir={directory}", *unset, *command],
            {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self.readers:
            reader.start()

    def wait_for(
        self, pattern: str, times: int = 1, seconds: float = START_SECONDS
    ) -> list[re.Match[str]]:
        return super().wait_for(pattern, times, seconds)

    def end(self, seconds: float = START_SECONDS) -> int:
        return super().end(seconds)

    def left(self) -> dict[str, dict[int, str]]:
        """What runs on the hosts."""
        found = {host.name: self.cluster.processes(host) for host in self.cluster.hosts}
        return {name: processes for name, processes in found.items() if processes}

    def assert_nothing_left(self, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.left() == {}, self.text()
        names = sorted(str(path) for path in self.temporary.rglob("*"))
        assert names == [], names

    def interrupt(self) -> None:
        """Ctrl-C: the whole foreground group gets it."""
        os.killpg(self.process.pid, signal.SIGINT)


class Site:
    """A cluster, and a directory that all its hosts see, with a resource file and a script."""

    def __init__(self, cluster: VirtualCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.runs: list[ClusterRun] = []
        self.mounts: list[tuple[str, str]] = []
        self.hosts("{address: vhost1, cpus: 1}", "{address: vhost2, cpus: 2}")

    def hosts(self, *entries: str) -> None:
        """Writes the resource file: one entry for each host, as YAML."""
        lines = "".join(f"- {entry}\n" for entry in entries)
        temporary = f"ssh: {{environment: {{TMPDIR: {self.temporary}}}}}\n"
        (self.directory / "hosts.yml").write_text(f"hosts:\n{lines}{temporary}")

    def launch(self, body: str, *arguments: str, prologue: str = PROLOGUE) -> ClusterRun:
        """Starts ``python train.py`` on the first host."""
        (self.directory / "train.py").write_text(prologue + body)
        return self.run(sys.executable, "train.py", *arguments)

    def run(self, *command: str, host: str = "vhost1") -> ClusterRun:
        """Starts a command on a host."""
        run = ClusterRun(self.cluster, host, self.directory, command)
        self.runs.append(run)
        return run

    def check(self, *arguments: str) -> ClusterRun:
        """``parallax check`` on the first host."""
        command = [sys.executable, "-m", "parallax", "check", "--resource-info", "hosts.yml"]
        return self.run(*command, *arguments)

    def hide(self, host: str, path: Path | str, other: Path | str) -> None:
        """On one host only, puts another file in the place of a file."""
        self._do(host, "mount", "--bind", str(other), str(path))
        self.mounts.append((host, str(path)))

    def small_disk(self, host: str, path: Path, size: str) -> None:
        """On one host only, puts a file system of a size at a directory."""
        self._do(host, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))
        self.mounts.append((host, str(path)))

    def close(self) -> None:
        """Ends what a failed test left, and undoes what was done to hosts."""
        for run in self.runs:
            if run.process.poll() is None:
                os.killpg(run.process.pid, signal.SIGKILL)
            for processes in run.left().values():
                for pid in processes:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
            run.end(10)
        for host, path in self.mounts:
            self._do(host, "umount", path)
        for host in self.cluster.hosts:
            self.cluster.heal(host)

    def _do(self, host: str, *command: str) -> None:
        done = self.cluster.popen(host, command, stderr=subprocess.PIPE)
        _, said = done.communicate(timeout=20)
        assert done.returncode == 0, said


def make_cluster(rate: str | None = None) -> Iterator[VirtualCluster]:
    """A cluster of two hosts with links of a rate, or a skipped test where there can be none."""
    missing = missing_requirement()
    if missing is not None:
        pytest.skip(f"no virtual cluster: {missing[0]}; {missing[1]}")
    with VirtualCluster(2, rate) as cluster:
        yield cluster
