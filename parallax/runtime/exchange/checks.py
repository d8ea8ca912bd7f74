"""Checks of what the step computes, for all workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallax.graph.symbols.assertions import Found
from parallax.ops.checks import ChecksSpec
from parallax.runtime.comm.control import StepControl
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World

GROUP = "checks"
"""The process group of their messages: they may start before or after others, as graphs do."""
_FINE = -1


class Checks:
    """The runtime of one :class:`ChecksSpec`: (N-1) · 8 bytes sent per worker and message."""

    def __init__(self, spec: ChecksSpec, world: World, control: StepControl) -> None:
        self.spec = spec
        self._world = world
        self._control = control
        world.open_group(GROUP)
        self._own = torch.zeros(1, dtype=torch.int64, device=world.device)
        self._gathered = self._own.new_zeros(spec.messages, world.size)
        self._pending: list[Pending | None] = [None] * spec.messages
        self._found: Sequence[Found] = ()

    def start(self, number: int, found: Sequence[Found]) -> None:
        """Tell which check failed, if one did; of no rows, none counts."""
        if (pending := self._pending[number]) is not None:
            pending.wait()  # of a step that failed
        self._found = found
        places = (place for place, one in enumerate(found) if one.failed)
        first = _FINE if self._control.is_empty else next(places, _FINE)
        self._own.fill_(first)
        received = self._gathered[number]
        self._pending[number] = self._world.all_gather(received, self._own, "checks", GROUP)

    def finish(self, number: int) -> None:
        """Wait for those of all workers.

        Raises:
            CheckError: on all workers, if one failed.
            LeftOutError: the same, where the step ends then.
        """
        pending, self._pending[number] = self._pending[number], None
        assert pending is not None
        pending.wait()
        for worker, place in enumerate(self._gathered[number].tolist()):
            if place != _FINE:
                # Of pieces of a batch there may be more on that worker.
                place = min(place, len(self._found) - 1)
                found = self._found[place]
                raise found.assertion.stop(self._found, place, f" on worker {worker}")
