"""How long steps take."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

CPU = torch.device("cpu")


@dataclass
class Pace:
    """How long steps take that are not captured first, and how long of it workers wait.

    Times are medians of the last hundred steps, in seconds.
    """

    device: torch.device = CPU
    """What computes. A CUDA device is behind the processor: its times come when it has arrived."""
    times: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=100))
    computed: float = 0.0
    """In all steps, that were not spent waiting."""
    _started: tuple[Any, float] = (0.0, 0.0)
    _coming: deque[tuple[Any, Any, float]] = field(default_factory=lambda: deque(maxlen=100))
    """Steps that a device has been told of: their events, and seconds waited."""

    def start(self, waited: float) -> None:
        """A step begins; ``waited`` seconds were spent waiting so far."""
        while self._coming and self._coming[0][1].query():
            began, ended, waiting = self._coming.popleft()
            self._add(began.elapsed_time(ended) / 1e3, waiting)
        self._started = (self._now(), waited)

    def stop(self, waited: float) -> None:
        """It ended."""
        began, before = self._started
        ended, waiting = self._now(), waited - before
        if self.device.type == "cuda":
            self._coming.append((began, ended, waiting))
        else:
            self._add(ended - began, waiting)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _add(self, step: float, waiting: float) -> None:
        self.times.append((step, waiting))
        self.computed += max(0.0, step - waiting)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return statistics.median(step for step, _ in self.times)

    @property
    def waiting(self) -> float:
        """Seconds of it that pass waiting for messages."""
        return statistics.median(waiting for _, waiting in self.times)

    @property
    def computation(self) -> float | None:
        """Seconds of it that do not; None before there was a step."""
        if not self.times:
            return None
        return statistics.median(step - waiting for step, waiting in self.times)
