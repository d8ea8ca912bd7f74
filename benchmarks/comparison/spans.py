"""How much of a thread's time no operation of PyTorch takes, read off a profile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

TURN = "benchmark: turn"
"""What the turn is called that a profile records."""

COMPUTES = ("aten::", "mkldnn::")
"""How the names of operations begin that compute; those of collectives start messages."""


def idle_seconds(events: Iterable[Any]) -> float:
    """Seconds of a turn in which its thread computes nothing: it waits, or Python runs.

    Args:
        events: of a profile (``torch.autograd.profiler_util.FunctionEvent``) with one ``TURN``.
    """
    found = list(events)
    (turn,) = (event for event in found if event.name == TURN)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found
        if event.thread == turn.thread and event.name.startswith(COMPUTES)
    )
    idle, at = 0.0, turn.time_range.start
    for start, end in [*spans, (turn.time_range.end, turn.time_range.end)]:
        idle += max(min(start, turn.time_range.end) - at, 0.0)
        at = max(at, end)
    return float(idle) * 1e-6
