"""Measure how fast a device computes, for predictions before a step has run."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec
import torch

from parallax.ops.kernels import onednn_product
from parallax.runtime.comm.world import World
from parallax.runtime.compute.products import has_onednn
from parallax.strategy.timeline import Speed

ROUNDS = 4
SIDE = 384
MANY_BYTES = 1 << 25
"""More than caches hold."""
BUSY = 100
HASHED_BYTES = 1 << 18
"""At once, without the interpreter."""


_known: WeakKeyDictionary[World, Speed] = WeakKeyDictionary()


def measure_speed(world: World) -> Speed:
    """Matrix products in float32 and copies, the same on every worker.

    Takes some hundred milliseconds, once for a world; all workers must call it, since they compute
    at the same time to see how those of one machine crowd its processors. Random numbers are not
    drawn.
    """
    if world not in _known:
        _known[world] = _measured(world)
    return _known[world]


def _measured(world: World) -> Speed:
    device = world.device
    # The default type may be another, and is not what most models compute in.
    square = torch.ones(SIDE, SIDE, dtype=torch.float32, device=device)
    tiny = torch.ones(1, dtype=torch.float32, device=device)
    node = _seconds(lambda: tiny + tiny, device)
    product = _seconds(lambda: square @ square, device)
    if device.type == "cpu" and has_onednn():
        product = min(product, _seconds(lambda: onednn_product(square, square), device))
    crowding, borrowed = _crowding(world, square)
    own = Speed(
        operations=2 * SIDE**3 / max(product - node, 1e-9),
        bytes=_bytes(device),
        node=node,
        crowding=crowding,
        borrowed=borrowed,
    )
    texts = world.texts("speed", msgspec.json.encode(own).decode())
    found = [msgspec.json.decode(text, type=Speed) for text in texts]
    alike = len(set(world.texts("device", _described(device)))) == 1

    def median(of: Callable[[Speed], float]) -> float:
        return statistics.median(of(one) for one in found)

    return Speed(
        operations=median(lambda one: one.operations),
        bytes=median(lambda one: one.bytes),
        node=median(lambda one: one.node),
        crowding=median(lambda one: one.crowding),
        borrowed=median(lambda one: one.borrowed),
        alike=alike,
    )


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


def _bytes(device: torch.device) -> float:
    """Bytes per second, read and written, by a copy of more than caches hold."""
    there, here = (torch.ones(MANY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * MANY_BYTES / _seconds(lambda: here.copy_(there), device)


def _crowding(world: World, square: torch.Tensor) -> tuple[float, float]:
    """Seconds that pass while this worker's threads compute for one, as all workers compute; and
    by which they are delayed if another thread of each worker works for one as well."""
    if world.device.type != "cpu":
        return 1.0, 0.0
    world.barrier("speed")
    worked, alone = _products(square)
    crowding = max(torch.get_num_threads() * alone / max(worked, 1e-9), 1.0)
    world.barrier("speed beside")
    with _Hashing() as beside:
        _, passed = _products(square)
    delayed = max(passed - alone, 0.0) / max(beside.worked, 1e-9)
    return crowding, min(delayed, 2 * crowding)


def _products(square: torch.Tensor) -> tuple[float, float]:
    """Seconds of processors, and that pass, for some products."""
    worked, began = time.process_time(), time.perf_counter()
    for _ in range(BUSY):
        square @ square
    return time.process_time() - worked, time.perf_counter() - began


class _Hashing:
    """A thread that keeps a processor busy, as the network's do."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.worked = 0.0
        """Seconds that it had a processor."""

    def __enter__(self) -> _Hashing:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        block, began = bytes(HASHED_BYTES), time.thread_time()
        while not self._ended.is_set():
            hashlib.sha256(block)
        self.worked = time.thread_time() - began


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
