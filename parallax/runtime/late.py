"""Updates that the step before has left, finished where this one first needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule


class LateUpdates:
    """The runtime of one :class:`parallax.ops.specs.LateSpec`.

    What it waits for was sent in the step that left it, and no worker waits for another in it but
    for that. So workers may settle at different times.
    """

    def __init__(self, updates: Sequence[GraphModule]) -> None:
        """
        Args:
            updates: each a graph that waits for gradients and changes state.
        """
        self._updates = list(updates)
        self._left: dict[int, Sequence[Any]] = {}
        """By update that is not finished, what it needs."""

    def leave(self, inputs: Sequence[Sequence[Any]]) -> None:
        """See :func:`parallax.ops.resources.leave`."""
        self._left = dict(enumerate(inputs))

    def settle(self, number: int) -> None:
        """See :func:`parallax.ops.resources.settle`."""
        inputs = self._left.pop(number, None)
        if inputs is not None:
            with torch.no_grad():
                self._updates[number](*inputs)

    def finish(self) -> None:
        """Settle what is left."""
        for number in range(len(self._updates)):
            self.settle(number)
