"""Time small computations, to choose the faster of two that compute the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from parallax.graph.common.sizes import sizes_of

CLEARLY = 0.9
"""What part of the time the other may take to be chosen: choices must not follow noise."""
IN_TURNS = 0.95
"""The same where both took turns."""
ALIKE = 0.85, 1.02
"""Between these ratios they are timed for longer, ..."""
LONG_PATIENCE = 0.05
"""... by so many seconds for both."""
LEAST_RUNS = 3
MOST_RUNS = 20
PATIENCE = 5e-3
"""Seconds after which a computation has been timed often enough ..."""
IMPATIENCE = 0.1
"""... and after which once is enough."""


COLD_NUMBERS = 1 << 23
"""As many as fill the caches of a core's share of a processor."""


def is_clearly_faster(other: Callable[[], object], usual: Callable[[], object]) -> bool:
    """Whether ``other`` takes less time than ``usual``, by more than noise.

    They take turns, so that a moment when the processor is slow is one for both, and take more of
    them where they are alike, since then less is told from noise.
    """
    other(), usual()  # libraries prepare a shape when they first see it
    best, began = [float("inf"), float("inf")], seconds()
    for run in range(MOST_RUNS):
        for place, compute in enumerate((other, usual)):
            started = seconds()
            compute()
            best[place] = min(best[place], seconds() - started)
        alike = ALIKE[0] * best[1] < best[0] < ALIKE[1] * best[1]
        passed = seconds() - began
        enough = LONG_PATIENCE if alike else PATIENCE
        if passed > IMPATIENCE or (run + 1 >= LEAST_RUNS and passed > enough):
            break
    return best[0] < IN_TURNS * best[1]


def is_plain(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a graph's example value is of the kind that is timed: float32, strided, on the CPU,
    of sizes that do not depend on values, and not empty."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is torch.float32
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and all(sizes_of(value))
    )


def seconds(device: torch.device | None = None) -> float:
    """A clock for what this process computes.

    Workers that share a processor's cores take turns on them, and most of what a wall clock shows
    is others' turns. The time of one thread is its own; that of several is not what passes. What a
    CUDA device was told before is waited for, as it runs behind the processor.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def best_of(compute: Callable[[], object], cold: bool = False) -> float:
    """The shortest of a few runs, in seconds.

    Args:
        compute: what to time.
        cold: put other memory into the caches before each run, as the rest of a step does.
    """
    compute()  # libraries prepare a shape when they first see it
    other = torch.zeros(COLD_NUMBERS, dtype=torch.float32) if cold else None
    best, began = float("inf"), seconds()
    for run in range(MOST_RUNS):
        if other is not None:
            other.add_(1)
        started = seconds()
        compute()
        ended = seconds()
        best = min(best, ended - started)
        passed = ended - began
        if passed > IMPATIENCE or (run + 1 >= LEAST_RUNS and passed > PATIENCE):
            break
    return best
