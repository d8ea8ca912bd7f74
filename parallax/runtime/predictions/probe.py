"""Measure the links between workers, by exchanges like those of training."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch

from parallax.cluster.network import Level, Network
from parallax.runtime.comm.host_sums import HostArea, HostSum, HostSums
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World

__all__ = ["measure_level", "measure_network", "measure_way"]

SMALL_ROUNDS = 5
LARGE_ROUNDS = 2
# Beyond the burst that a shaped link lets through at once, and beyond what waits in its queue.
LARGE_BYTES = 1 << 22
# Of a bucket that is summed in memory: it may stay in the cache.
MEMORY_BYTES = 1 << 20
MOST_BYTES = 1 << 28
# A part of an exchange takes so long, and is no smaller; parts are for links that are as fast so.
# Where they gain nothing in one moment they may in the next: at once, two hosts get all or half.
PIECE_SECONDS = 0.01
LEAST_PIECE = 1 << 17
AS_FAST = 0.95


def measure_network(world: World) -> Network:
    """Bandwidth and latency of the workers' links, the same on every worker.

    Takes some ten milliseconds, and as long as thirty megabytes need; all workers must call it.
    From then on the world's large exchanges travel in parts, unless those are slower.
    """
    if world.size == 1:
        return Network(Level(1, float("inf"), 0.0))
    world.pieces.clear()
    whole = _with_sums(world, measure_level(world, "rows"), "dense")
    world.pieces["dense"] = whole.piece
    memory = None if world.host_sums is None else _measure_memory(world, world.host_sums)
    if not world.two_levels:
        return Network(whole, memory=memory)
    host, rail = (
        _with_sums(world, measure_level(world, group), f"{group} dense")
        for group in ("host", "rail")
    )
    return Network(whole, host, rail, memory)


def _with_sums(world: World, level: Level, group: str) -> Level:
    """With the speed of an AllReduce of as many bytes as were exchanged."""
    workers = level.workers
    buffer = torch.zeros(LARGE_BYTES * workers // (8 * (workers - 1)), device=world.device)
    sent = 2 * (workers - 1) / workers * buffer.numel() * buffer.element_size()
    world.barrier(f"probe {group} sums")
    least = min(
        _timed(world, lambda: world.all_reduce(buffer, "probe", group)) for _ in range(LARGE_ROUNDS)
    )
    speed = sent / max(least - 2 * level.latency, least / 2)
    found = _told(world, f"{group} sums", (0.0, speed))
    return replace(level, summing=statistics.median(each for _, each in found))


def _measure_memory(world: World, sums: HostSums) -> Level:
    """Sums inside each host, by its workers in memory that they share."""
    size = sums.links.size
    small, large = (
        HostSum(HostArea(sums.links, "probe", count, torch.float32), 0, 0, count, "probe")
        for count in (size, MEMORY_BYTES // 4)
    )
    world.barrier("probe memory")
    # A sum is two exchanges; the first ones meet memory that nobody has touched yet.
    latency, slowest = (
        min(_sum_seconds(sums, one) for _ in range(SMALL_ROUNDS)) / 2 for one in (small, large)
    )
    latency = min(latency, slowest / 2)
    found = _told(world, "memory", (latency, large.bytes / 2 / (slowest - latency)))
    latency, bandwidth = (statistics.median(one) for one in zip(*found, strict=True))
    return Level(size, bandwidth, latency)


def _sum_seconds(sums: HostSums, one: HostSum) -> float:
    started = time.perf_counter()
    sums.start(one)
    sums.wait([one])
    return time.perf_counter() - started


def measure_level(world: World, group: str = "rows", least: float = 0.0) -> Level:
    """Exchanges among the workers of each group of a kind; all workers must call it.

    Args:
        world: the workers.
        group: its name in the world.
        least: seconds that an exchange is to take, for exactness; more is sent until it does.

    Returns:
        Medians over all workers, of the best of several rounds each.
    """
    others = len(world.group(group).ranks) - 1
    world.barrier(f"probe {group}")
    small = _exchange(world, group, [4] * (others + 1))
    latency = min(_timed(world, small) for _ in range(SMALL_ROUNDS))
    size = LARGE_BYTES // others
    while True:
        large = _exchange(world, group, [size] * (others + 1), most=size * others)
        slowest = worked = math.inf
        for _ in range(LARGE_ROUNDS):
            began = time.process_time()
            slowest = min(slowest, _timed(world, large))
            worked = min(worked, (time.process_time() - began) / (size * others))
        # Other work can delay every small exchange for longer than a large one takes.
        latency = min(latency, slowest / 2)
        found = _told(world, group, (latency, size * others / (slowest - latency)))
        bandwidth = statistics.median(bandwidth for _, bandwidth in found)
        more = _more(size * others, size * others / bandwidth, least)
        if more is None:
            break
        size = more // others
    latency = statistics.median(latency for latency, _ in found)
    processing = statistics.median(each for _, each in _told(world, f"{group} work", (0.0, worked)))
    level = Level(others + 1, bandwidth, latency, processing)
    return _in_parts(world, group, level, large, size * others)


def _in_parts(
    world: World, group: str, level: Level, exchange: Callable[[], Pending], sent: int
) -> Level:
    """The level with exchanges in parts, if they are as fast; the world makes them so."""
    if world.device.type != "cpu" or world.is_in_memory(group):
        return level
    piece = max(LEAST_PIECE, round(level.bandwidth * PIECE_SECONDS))
    if sent < 2 * piece:
        return level
    world.pieces[group] = piece
    least = min(_timed(world, exchange) for _ in range(LARGE_ROUNDS))
    speed = sent / max(least - level.latency, least / 2)
    found = _told(world, f"{group} parts", (0.0, speed))
    bandwidth = statistics.median(each for _, each in found)
    if bandwidth < AS_FAST * level.bandwidth:
        del world.pieces[group]
        return level
    return replace(level, bandwidth=bandwidth, piece=piece, at_once=level.bandwidth)


def measure_way(world: World, forth: bool, least: float) -> float:
    """Bytes per second from one half of the workers to the other, each to its partner there.

    One way at a time: two workers that exchange over one connection may get half of its speed.

    Args:
        world: the workers, an even number, all of which must call it.
        forth: from the first half to the second, else back.
        least: seconds that it is to take; more is sent until it does.
    """
    half = world.size // 2
    sends = (world.rank < half) == forth
    partner = (world.rank + half) % world.size
    size = LARGE_BYTES
    while True:
        counts = [size if worker == partner else 0 for worker in range(world.size)]
        none = [0] * world.size
        small = _exchange(world, "rows", [4] * world.size)
        large = _exchange(world, "rows", *((counts, none) if sends else (none, counts)))
        world.barrier("probe way")
        times = []
        for _ in range(LARGE_ROUNDS):
            # All begin at once, then: those who receive measure.
            _timed(world, small)
            times.append(_timed(world, large))
        found = _told(world, "way", (0.0, min(times)))
        took = max(seconds for _, seconds in found)
        more = _more(size, took, least)
        if more is None:
            return half * size / took
        size = more


def _more(sent: int, took: float, least: float) -> int | None:
    """Bytes to send for an exchange to take so long; None if it did, or that would be too many."""
    if took >= least or sent >= MOST_BYTES:
        return None
    return min(MOST_BYTES, math.ceil(sent * 1.2 * least / took))


def _told(world: World, topic: str, own: tuple[float, float]) -> list[tuple[float, float]]:
    texts = world.texts(f"probe {topic}", msgspec.json.encode(own).decode())
    return [msgspec.json.decode(text, type=tuple[float, float]) for text in texts]


def _exchange(
    world: World,
    group: str,
    sent: list[int],
    received: list[int] | None = None,
    most: int = 0,
) -> Callable[[], Pending]:
    """What starts an exchange, any number of times, in memory that was touched before: the first
    touch would cost more than the exchange.

    Args:
        world: the workers.
        group: those that take part.
        sent: bytes for each of them; what is for this worker itself travels nowhere.
        received: bytes from each of them; as many as are sent if None.
        most: see :meth:`World.all_to_all`.
    """
    arriving = sent if received is None else received
    leaves, comes = (
        torch.ones(sum(counts), dtype=torch.uint8, device=world.device)
        for counts in (sent, arriving)
    )
    return lambda: world.all_to_all(comes, leaves, arriving, sent, "probe", group, most=most)


def _timed(world: World, start: Callable[[], Pending]) -> float:
    """Seconds from when a message starts until it has arrived."""
    started = time.perf_counter()
    start().wait()
    if world.device.type == "cuda":
        # There, waiting only orders what follows on the device.
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - started
