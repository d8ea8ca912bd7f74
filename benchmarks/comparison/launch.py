"""Starting workers on a virtual cluster."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import msgspec

from benchmarks.comparison.values import Task
from benchmarks.dialogue import Asked
from benchmarks.virtual_cluster import ROOT, VirtualCluster

FIRST_PORT = 29_500


class Launcher:
    """Starts workers on a cluster.

    Args:
        cluster: its hosts.
        workers_per_host: processes on each.
        limit: seconds that one system has for its trial.
    """

    def __init__(self, cluster: VirtualCluster, workers_per_host: int, limit: float) -> None:
        self.cluster = cluster
        self.workers_per_host = workers_per_host
        self.limit = limit
        # The hosts' ports are ours alone; another for each start, as the last one's may linger.
        self._numbers = itertools.count()

    def start(self, task: Task) -> Asked:
        """A worker for each device, which begins when asked."""
        number = next(self._numbers)
        directory = self.cluster.directory / f"task{number}"
        directory.mkdir()
        path = directory / "task.json"
        path.write_bytes(msgspec.json.encode(task))
        command = [sys.executable, "-m", "benchmarks.comparison.worker", str(path)]
        processes = []
        logs = []
        environments = worker_environments(self.cluster, self.workers_per_host, FIRST_PORT + number)
        for rank, environment in enumerate(environments):
            host = self.cluster.hosts[rank // self.workers_per_host]
            pipe = subprocess.DEVNULL if rank else subprocess.PIPE
            logs.append(directory / f"worker{rank}.log")
            with logs[-1].open("wb") as output:
                processes.append(
                    self.cluster.popen(
                        host,
                        command,
                        environment,
                        cwd=ROOT,
                        stdin=pipe,
                        stdout=pipe,
                        stderr=output,
                    )
                )
        return Asked(processes, logs)


def worker_environments(
    cluster: VirtualCluster, workers_per_host: int, port: int
) -> list[dict[str, str]]:
    """What torchrun would set for each worker, host by host.

    Args:
        cluster: its hosts.
        workers_per_host: processes on each.
        port: of the first host, where they meet.
    """
    size = len(cluster.hosts) * workers_per_host
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return [
        {
            "RANK": f"{rank}",
            "WORLD_SIZE": f"{size}",
            "LOCAL_RANK": f"{rank % workers_per_host}",
            "LOCAL_WORLD_SIZE": f"{workers_per_host}",
            "MASTER_ADDR": cluster.hosts[0].address,
            "MASTER_PORT": f"{port}",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path.rstrip(os.pathsep),
        }
        for rank in range(size)
    ]
