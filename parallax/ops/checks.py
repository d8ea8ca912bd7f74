"""What a step that checks what it computes asks of the runtime."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.ops.specs import MessageSpec


@dataclass(frozen=True)
class ChecksSpec(MessageSpec):
    """Checks that fail on all workers if they fail on one.

    ``start(number, found)`` takes what this worker's checks found; ``finish(number)`` raises where
    one failed on any worker.

    Args:
        messages: how many there are: checks before one update travel together.
    """

    messages: int = 0

    def message(self, number: int) -> tuple[str, tuple[str, ...]]:
        return "words", self.names
