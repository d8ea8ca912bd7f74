"""Measure the links between workers, by exchanges like those of training."""

from __future__ import annotations

import statistics
import time

import msgspec
import torch

from parallax.cluster.network import Level, Network
from parallax.runtime.comm import World

SMALL_ROUNDS = 5
LARGE_ROUNDS = 2
# Beyond the burst that a shaped link lets through at once.
LARGE_BYTES = 1 << 20


def measure_network(world: World) -> Network:
    """Bandwidth and latency of the workers' links, the same on every worker.

    Takes some ten milliseconds, and as long as six megabytes need; all workers must call it.
    """
    if world.size == 1:
        return Network(Level(1, float("inf"), 0.0))
    whole = _level(world, "rows")
    if not world.two_levels:
        return Network(whole)
    return Network(whole, _level(world, "host"), _level(world, "rail"))


def _level(world: World, group: str) -> Level:
    """Medians over all workers, the best of several rounds each."""
    workers = len(world.group(group).ranks)
    world.barrier(f"probe {group}")
    latency = min(_seconds(world, group, 4) for _ in range(SMALL_ROUNDS))
    slowest = min(_seconds(world, group, LARGE_BYTES // (workers - 1)) for _ in range(LARGE_ROUNDS))
    sent = LARGE_BYTES // (workers - 1) * (workers - 1)
    # Other work can delay every small exchange for longer than a large one takes.
    latency = min(latency, slowest / 2)
    bandwidth = sent / (slowest - latency)
    texts = world.texts(f"probe {group}", msgspec.json.encode((latency, bandwidth)).decode())
    found = [msgspec.json.decode(text, type=tuple[float, float]) for text in texts]
    return Level(
        workers,
        statistics.median(bandwidth for _, bandwidth in found),
        statistics.median(latency for latency, _ in found),
    )


def _seconds(world: World, group: str, size: int) -> float:
    """One exchange in which every worker sends ``size`` bytes to each other worker."""
    workers = len(world.group(group).ranks)
    sent = torch.zeros(size * workers, dtype=torch.uint8, device=world.device)
    received = torch.empty_like(sent)
    counts = [size] * workers
    started = time.perf_counter()
    world.all_to_all(received, sent, counts, counts, "probe", group).wait()
    return time.perf_counter() - started
