"""What ``parallax probe`` runs on every worker: measures hosts, and the ways between them.

``python -m parallax.runtime.probe_hosts RESULT NAMES``: worker 0 writes what was found to the file
RESULT, as JSON; NAMES is a JSON list with a name for each host, in the order of their workers.

Pairs of hosts are measured in rounds, as in a tournament: a host is in one pair at a time, so each
link is measured alone. With many hosts each meets only some others, since what differs is mostly
the hosts' own links.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from parallax.cluster.environment import worker_environment
from parallax.cluster.host_report import cores, free_memory
from parallax.cluster.probed import HostFound, PairFound, ProbeFound, rounded
from parallax.cluster.units import format_bandwidth, format_bytes, format_time
from parallax.cluster.worker_start import prepare_worker_process
from parallax.runtime.comm.meeting import meet, world_of
from parallax.runtime.comm.world import World
from parallax.runtime.predictions.probe import measure_level, measure_way

__all__ = ["main", "measure_hosts", "rounds_of"]

# How long one exchange is to take: enough for a link that lets bursts through.
EXCHANGE_SECONDS = 0.25
MAX_ROUNDS = 8
COPY_BYTES = 1 << 28
COPY_ROUNDS = 5


def main(arguments: Sequence[str]) -> None:
    """Measures, as one of the workers.

    Args:
        arguments: where worker 0 writes what was found, and the hosts' names as JSON.
    """
    environment = worker_environment()
    prepare_worker_process(environment)
    world = meet(environment)
    found = measure_hosts(world, msgspec.json.decode(arguments[1], type=list[str]))
    if world.rank == 0:
        Path(arguments[0]).write_bytes(msgspec.json.encode(found))
    world.settle()


def measure_hosts(world: World, names: Sequence[str]) -> ProbeFound:
    """Measures every host and pairs of them; all workers must call it.

    Args:
        world: the workers.
        names: of the hosts, for progress.
    """
    members = world.members
    own = world.hosts[world.rank]
    host = _measure_host(world, members[own])
    pairs = []
    for pairing in rounds_of(len(members)):
        # One pair's messages are not to disturb those of the round before.
        world.barrier("probe round")
        pair = next((pair for pair in pairing if own in pair), None)
        if pair is not None and (found := _measure_pair(world, members, pair)) is not None:
            pairs.append(found)
            other = names[pair[0] + pair[1] - own]
            speed = format_bandwidth(rounded(found.bandwidth))
            _say(f"to {other}: {speed}, {format_time(rounded(found.latency))}")
    text = msgspec.json.encode((host, [pair for pair in pairs if pair.hosts[0] == own])).decode()
    texts = world.texts("probe hosts", text)
    told = [msgspec.json.decode(t, type=tuple[HostFound | None, list[PairFound]]) for t in texts]
    return ProbeFound(
        [host for host, _ in told if host is not None], [pair for _, own in told for pair in own]
    )


def rounds_of(hosts: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs: in each a host is in one pair at most, and no pair comes twice."""
    ring: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    found = []
    for _ in range(min(len(ring) - 1, MAX_ROUNDS)):
        half = len(ring) // 2
        facing = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def _measure_host(world: World, ranks: Sequence[int]) -> HostFound | None:
    """This worker's host; None unless it is the host's first."""
    free = None
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info(world.device)[0]
    told = world.texts("probe devices", msgspec.json.encode(free).decode())
    device_memory = [msgspec.json.decode(told[rank], type=int | None) for rank in ranks]
    first = world.rank == ranks[0]
    memory, bandwidth = free_memory(), _memory_bandwidth() if first else 0.0
    # The other workers wait: they would take part of the memory's time.
    world.barrier("probe memory")
    inside = latency = None
    if len(ranks) > 1:
        inside, latency = _measure_inside(world, ranks)
    if not first:
        return None
    found = HostFound(
        workers=len(ranks),
        cuda=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None,
        free_memory=memory,
        memory_bandwidth=bandwidth,
        device_memory=min((m for m in device_memory if m is not None), default=None),
        inside_bandwidth=inside,
        inside_latency=latency,
    )
    _say(_described(found))
    return found


def _described(found: HostFound) -> str:
    """One line about a host."""
    text = f"{found.workers} on the CPU"
    if found.cuda is not None:
        text = f"{found.workers} {found.cuda}, {_memory(found.device_memory or 0)} free on each"
    text += f"; memory {_memory(found.free_memory)} free, {found.memory_bandwidth / 1e9:.3g} GB/s"
    if found.inside_bandwidth is not None and found.inside_latency is not None:
        speed = format_bandwidth(rounded(found.inside_bandwidth))
        text += f"; inside {speed}, {format_time(rounded(found.inside_latency))}"
    return text


def _memory_bandwidth() -> float:
    """Bytes per second that all cores read and write, copying."""
    size = max(1 << 20, min(COPY_BYTES, free_memory() // 8))
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        source = torch.ones(size, dtype=torch.uint8)
        target = torch.empty_like(source)
        times = []
        for _ in range(COPY_ROUNDS):
            started = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return 2 * size / min(times)


def _measure_inside(world: World, ranks: Sequence[int]) -> tuple[float, float | None]:
    """Bytes per second of all workers of a host together; seconds between its first two."""
    level = measure_level(_among(world, ranks), least=EXCHANGE_SECONDS)
    latency: float | None = level.latency
    if len(ranks) > 2:
        latency = None
        if world.rank in ranks[:2]:
            latency = measure_level(_among(world, ranks[:2])).latency
    return level.bandwidth * len(ranks), latency


def _measure_pair(
    world: World, members: Sequence[Sequence[int]], pair: tuple[int, int]
) -> PairFound | None:
    """Two hosts, one of them this worker's; None unless it is the host's first."""
    one, other = (members[host] for host in pair)
    latency = None
    if world.rank in (one[0], other[0]):
        latency = measure_level(_among(world, [one[0], other[0]])).latency
    width = min(len(one), len(other))
    taking = [*one[:width], *other[:width]]
    if world.rank not in taking:
        return None
    both = _among(world, taking)
    bandwidth = min(measure_way(both, forth, EXCHANGE_SECONDS) for forth in (True, False))
    return None if latency is None else PairFound(pair, bandwidth, latency)


def _among(world: World, ranks: Sequence[int]) -> World:
    """Some of the workers, just which must call this."""
    if len(ranks) == world.size:
        return world
    return world_of(list(ranks), world.device, alone=True)


def _memory(size: int) -> str:
    return format_bytes(int(rounded(size)))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
