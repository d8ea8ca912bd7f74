"""What the synchroniser of scattered variables asks of the runtime."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallax.ops.specs import MessageSpec


@dataclass(frozen=True)
class GatherSpec(MessageSpec):
    """Variables of which every worker has some rows, and which are read whole.

    Args:
        shapes, strides, dtypes: of the whole variables.
        ranges: of each variable, by worker, its first and one-past-last row.
        axes: of each, along which its rows lie.
        messages: of each, the message that brings it.
        rings: by message, the workers in the order in which it goes from one to the next; None
            where all send to all.
    """

    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    axes: tuple[int, ...]
    messages: tuple[int, ...]
    rings: tuple[tuple[int, ...] | None, ...]

    def of_message(self, number: int) -> list[int]:
        """The variables of a message, by their place."""
        return [index for index, message in enumerate(self.messages) if message == number]

    def message(self, number: int) -> tuple[str, tuple[str, ...]]:
        return "owned", tuple(self.names[index] for index in self.of_message(number))
