"""Measure how fast a device computes, for predictions before a step has run."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from parallax.strategy.timeline import Speed

ROUNDS = 4
SIDE = 384
ELEMENTS = 1 << 19
BUSY = 24


def measure_speed(device: torch.device) -> Speed:
    """Matrix products and element-wise additions in float32, the best of a few rounds each.

    Takes some ten milliseconds; workers of one machine call it at the same time, to see how they
    crowd its processors. Random numbers are not drawn.
    """
    square = torch.ones(SIDE, SIDE, device=device)
    line, tiny = torch.ones(ELEMENTS, device=device), torch.ones(1, device=device)
    node = _seconds(lambda: tiny + tiny, device)
    product = _seconds(lambda: square @ square, device)
    added = _seconds(lambda: line + line, device)
    worked, began = time.process_time(), time.perf_counter()
    for _ in range(BUSY):
        square @ square
    _finish(device)
    passed = time.perf_counter() - began
    crowding = passed / max(time.process_time() - worked, 1e-9) if device.type == "cpu" else 1.0
    return Speed(
        crowding=max(crowding * torch.get_num_threads(), 1.0) if device.type == "cpu" else 1.0,
        operations=2 * SIDE**3 / max(product - node, 1e-9),
        bytes=3 * line.numel() * line.element_size() / max(added - node, 1e-9),
        node=node,
    )


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
