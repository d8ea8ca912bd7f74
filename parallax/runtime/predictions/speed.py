"""Measure how fast a device computes, for predictions before a step has run."""

from __future__ import annotations

import contextlib
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from parallax.ops.kernels import onednn_product
from parallax.runtime.comm.world import World
from parallax.runtime.compute.products import has_onednn
from parallax.strategy.timeline import Speed

ROUNDS = 4
SIDE = 384
ELEMENTS = 1 << 19
MANY_BYTES = 1 << 25
"""More than caches hold."""
BUSY = 100


def measure_speed(world: World) -> Speed:
    """Matrix products and element-wise additions in float32, the same on every worker.

    Takes some hundred milliseconds; all workers must call it, since they compute at the same time
    to see how those of one machine crowd its processors. Random numbers are not drawn.
    """
    device = world.device
    # The default type may be another, and is not what most models compute in.
    square = torch.ones(SIDE, SIDE, dtype=torch.float32, device=device)
    line = torch.ones(ELEMENTS, dtype=torch.float32, device=device)
    tiny = torch.ones(1, dtype=torch.float32, device=device)
    node = _seconds(lambda: tiny + tiny, device)
    product = _seconds(lambda: square @ square, device)
    if device.type == "cpu" and has_onednn():
        product = min(product, _seconds(lambda: onednn_product(square, square), device))
    added = _seconds(lambda: line + line, device)
    own = Speed(
        operations=2 * SIDE**3 / max(product - node, 1e-9),
        bytes=3 * line.numel() * line.element_size() / max(added - node, 1e-9),
        node=node,
        crowding=_crowding(world, square),
        memory=_memory(device),
    )
    texts = world.texts("speed", msgspec.json.encode(own).decode())
    found = [msgspec.json.decode(text, type=Speed) for text in texts]
    numbers = [(x.operations, x.bytes, x.node, x.crowding, x.memory or x.bytes) for x in found]
    alike = len(set(world.texts("device", _described(device)))) == 1
    medians = [statistics.median(one) for one in zip(*numbers, strict=True)]
    return Speed(medians[0], medians[1], medians[2], medians[3], alike, medians[4])


def _described(device: torch.device) -> str:
    """What decides in which order numbers are added up: the kind of device, libraries, threads."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    cpu = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
        cpu = next((line for line in lines if line.startswith("model name")), cpu)
    return (
        f"{cpu}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )


def _memory(device: torch.device) -> float:
    """Bytes per second, read and written, by a copy of more than caches hold."""
    there, here = (torch.ones(MANY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * MANY_BYTES / _seconds(lambda: here.copy_(there), device)


def _crowding(world: World, square: torch.Tensor) -> float:
    """Seconds that pass while this worker's threads compute for one, as all workers compute."""
    if world.device.type != "cpu":
        return 1.0
    world.barrier("speed")
    worked, began = time.process_time(), time.perf_counter()
    for _ in range(BUSY):
        square @ square
    worked, passed = time.process_time() - worked, time.perf_counter() - began
    return max(torch.get_num_threads() * passed / max(worked, 1e-9), 1.0)


def _seconds(compute: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        _finish(device)
        started = time.perf_counter()
        compute()
        _finish(device)
        best = min(best, time.perf_counter() - started)
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
