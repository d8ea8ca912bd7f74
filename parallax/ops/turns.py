"""Messages of one step that start in an order that all workers share, whenever each is ready."""

from __future__ import annotations

from collections.abc import Callable


class Turns:
    """The turns of a step's phases: a message starts when all before it have."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        """By phase, whose turn it is."""
        self._ready: dict[tuple[int, int], Callable[[], object]] = {}
        """By phase and turn, what waits for it."""

    def take(self, phase: int, turn: int, start: Callable[[], object]) -> None:
        """Start a message in its turn: now, or when the last one before it is ready.

        Args:
            phase, turn: both as in the descriptions of what the graph asks for.
            start: starts it.
        """
        self._ready[phase, turn] = start
        number = self._next.setdefault(phase, 0)
        while (begin := self._ready.pop((phase, number), None)) is not None:
            number += 1
            self._next[phase] = number
            begin()
