"""Starting the workers of one task on a virtual cluster, and ending them whatever they do."""

from __future__ import annotations

import itertools
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.comparison.values import Task
from benchmarks.virtual_cluster import ROOT, VirtualCluster

FIRST_PORT = 29_500
LINES = 3  # of a failed worker's output, if none of them names an error
LETTERS = 300


class TaskError(Exception):
    """A task's workers failed or took too long; the message fits a cell of a table."""


class Launcher:
    """Runs tasks on a cluster, one after the other."""

    def __init__(self, cluster: VirtualCluster, workers_per_host: int, limit: float) -> None:
        self.cluster = cluster
        self.workers_per_host = workers_per_host
        self.limit = limit
        # The hosts' ports are ours alone; another for each task, as the last one's may linger.
        self._numbers = itertools.count()

    def run(self, task: Task, limit: float | None = None) -> bytes:
        """Worker 0's answer.

        Raises:
            TaskError: a worker failed, or they did not end within ``limit`` seconds.
        """
        limit = limit or self.limit
        number = next(self._numbers)
        directory = self.cluster.directory / f"task{number}"
        directory.mkdir()
        answer = directory / "answer.json"
        path = directory / "task.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(task, answer=str(answer))))
        command = [sys.executable, "-m", "benchmarks.comparison.worker", str(path)]
        processes = []
        logs = []
        for rank, environment in enumerate(self._environments(number)):
            host = self.cluster.hosts[rank // self.workers_per_host]
            log = directory / f"worker{rank}.log"
            logs.append(log)
            with log.open("w") as output:
                processes.append(
                    self.cluster.popen(
                        host,
                        command,
                        environment,
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            _wait(processes, logs, limit)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return answer.read_bytes()

    def _environments(self, number: int) -> list[dict[str, str]]:
        local = self.workers_per_host
        size = len(self.cluster.hosts) * local
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return [
            {
                "RANK": f"{rank}",
                "WORLD_SIZE": f"{size}",
                "LOCAL_RANK": f"{rank % local}",
                "LOCAL_WORLD_SIZE": f"{local}",
                "MASTER_ADDR": self.cluster.hosts[0].address,
                "MASTER_PORT": f"{FIRST_PORT + number}",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": path.rstrip(os.pathsep),
            }
            for rank in range(size)
        ]


def _wait(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], limit: float) -> None:
    deadline = time.monotonic() + limit
    waiting = {os.pidfd_open(process.pid): rank for rank, process in enumerate(processes)}
    try:
        while waiting:
            ended, _, _ = select.select(list(waiting), [], [], max(0, deadline - time.monotonic()))
            if not ended:
                raise TaskError(f"did not end within {limit:.0f} s")
            for descriptor in ended:
                rank = waiting.pop(descriptor)
                os.close(descriptor)
                status = processes[rank].wait()
                if status:
                    raise TaskError(f"worker {rank} ended with {status}: {_last_words(logs[rank])}")
    finally:
        for descriptor in waiting:
            os.close(descriptor)


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b: |what\(\):", line)]
    return " / ".join(errors[-1:] or lines[-LINES:])[:LETTERS]
