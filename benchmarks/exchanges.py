"""How many bytes a second hosts get through, by the collective that moves them.

    python -m benchmarks.exchanges --hosts 4 --rate 1gbit

Every host has one worker, and all begin at once. Megabytes (of 10⁶ bytes) that each sends a second,
medians of several rounds. It needs root and what `benchmarks.virtual_cluster` needs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.comparison.launch import worker_environments
from benchmarks.virtual_cluster import ROOT, VirtualCluster, VirtualClusterError
from parallax.cluster.network import number_of_parts

MEGABYTES = (0.6, 3.0, 6.0, 15.0)
"""Sent by each worker to all others together, one way."""
ROUNDS = 7
PORT = 29_400
PIECE = 1 << 18
"""Bytes that a worker sends in one part of an exchange."""
Collective = Callable[[], None]


class Shards:
    """What one worker sends and receives: a part for each worker.

    Args:
        elements: of a part, of four bytes each.
    """

    def __init__(self, elements: int) -> None:
        self.rank, self.size, self.elements = dist.get_rank(), dist.get_world_size(), elements
        self.sent = torch.ones(elements * self.size)
        self.received = torch.zeros_like(self.sent)

    def _part(self, whole: torch.Tensor, worker: int) -> torch.Tensor:
        start = worker % self.size * self.elements
        return whole[start : start + self.elements]

    def _with(self, distance: int) -> list[dist.Work]:
        """The parts of two workers that are so far away, one in each direction."""
        to, source = self.rank + distance, self.rank - distance
        return self._swap(to, self._part(self.sent, to), source, self._part(self.received, source))

    def _swap(
        self, to: int, sent: torch.Tensor, source: int, into: torch.Tensor
    ) -> list[dist.Work]:
        operations = [
            dist.P2POp(dist.isend, sent, to % self.size),
            dist.P2POp(dist.irecv, into, source % self.size),
        ]
        return dist.batch_isend_irecv(operations)

    def all_to_all(self) -> None:
        """What parallax exchanges rows, and values of owners, by."""
        dist.all_to_all_single(self.received, self.sent)

    def in_parts(self) -> None:
        """The same in messages of so much each, that start together and go one after the other."""
        others = self.size - 1
        parts = number_of_parts(4 * self.elements * others, PIECE)
        sent, received = (
            whole.view(self.size, -1).chunk(parts, dim=1) for whole in (self.sent, self.received)
        )
        messages = [share.contiguous().view(-1) for share in sent]
        brought = [torch.empty_like(message) for message in messages]
        works = [
            dist.all_to_all_single(into, message, async_op=True)
            for into, message in zip(brought, messages, strict=True)
        ]
        for work, into, place in zip(works, brought, received, strict=True):
            work.wait()
            place.copy_(into.view_as(place))

    def at_once(self) -> None:
        """The same as sends and receives that start together."""
        for work in [work for d in range(1, self.size) for work in self._with(d)]:
            work.wait()

    def in_rounds(self) -> None:
        """The same, in each round with one worker."""
        for distance in range(1, self.size):
            for work in self._with(distance):
                work.wait()

    def all_gather(self) -> None:
        """Every worker's part to all."""
        dist.all_gather_into_tensor(self.received, self._part(self.sent, self.rank))

    def scatter_in_ring(self) -> None:
        """ReduceScatter: each part goes around once, and every worker adds its own to it."""
        came = torch.empty(self.elements)
        for step in range(1, self.size):
            given = self._part(self.sent, self.rank - step)
            for work in self._swap(self.rank + 1, given, self.rank - 1, came):
                work.wait()
            self._part(self.sent, self.rank - step - 1).add_(came)

    def all_reduce(self) -> None:
        """All parts summed on all workers: each byte is sent twice."""
        dist.all_reduce(self.sent)


COLLECTIVES: dict[str, tuple[str, int]] = {
    "all_to_all": ("all to all", 1),
    "in_parts": ("in parts", 1),
    "at_once": ("sends at once", 1),
    "in_rounds": ("sends in rounds", 1),
    "all_gather": ("AllGather", 1),
    "scatter_in_ring": ("ReduceScatter in a ring", 1),
    "all_reduce": ("AllReduce", 2),
}
"""By method, its name and how often it sends what another sends once."""


def measure() -> dict[str, list[float]]:
    """Megabytes that this worker sends a second: by collective, for each of ``MEGABYTES``."""
    found: dict[str, list[float]] = {name: [] for name in COLLECTIVES}
    others = dist.get_world_size() - 1
    for megabytes in MEGABYTES:
        shards = Shards(int(megabytes * 1e6 / 4 / others))
        for name, (_, times) in COLLECTIVES.items():
            run: Collective = getattr(shards, name)
            seconds = statistics.median(_timed(run) for _ in range(ROUNDS))
            found[name].append(times * megabytes / seconds)
    return found


def _timed(run: Collective) -> float:
    dist.barrier()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _worker() -> None:
    """Measure as one worker; the first one prints what it found, for the driver."""
    warnings.filterwarnings("ignore")  # torch 2.13 has other names, which 2.11 has not
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure()
    if dist.get_rank() == 0:
        print(msgspec.json.encode(found).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()  # else its threads may outlive Python, which ends by an abort


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exchanges", description="Time collectives on a virtual cluster."
    )
    parser.add_argument("--hosts", type=int, default=4, help="of the cluster, with a worker each")
    parser.add_argument("--rate", default="1gbit", help="of each link; 'none' does not shape")
    parser.add_argument("--worker", action="store_true", help="be one of its workers")
    args = parser.parse_args(arguments)
    if args.worker:
        _worker()
        return 0
    try:
        rate = None if args.rate == "none" else args.rate
        with VirtualCluster(args.hosts, rate, sshd=False) as cluster:
            found = _run(cluster)
    except VirtualClusterError as error:
        print(error, file=sys.stderr)
        return 2
    table = Table(title=f"MB/s sent by each of {args.hosts} hosts, {args.rate}")
    for column in ("sent by each", *(name for name, _ in COLLECTIVES.values())):
        table.add_column(column, justify="right")
    for place, megabytes in enumerate(MEGABYTES):
        table.add_row(f"{megabytes:g} MB", *(f"{found[name][place]:.0f}" for name in COLLECTIVES))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


def _run(cluster: VirtualCluster) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "benchmarks.exchanges", "--worker"]
    processes = [
        cluster.popen(host, command, environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for host, environment in zip(
            cluster.hosts, worker_environments(cluster, 1, PORT), strict=True
        )
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise VirtualClusterError("a worker failed", "see its output above")
    return msgspec.json.decode(outputs[0], type=dict[str, list[float]])


if __name__ == "__main__":
    sys.exit(main())
