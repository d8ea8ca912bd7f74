"""Large exchanges in parts, of which few are under way at once.

Whatever all workers hand to their links at once waits in queues there, and the acknowledgements of
what comes the other way wait behind it: with as much on its way as a link of one connection takes
in, each direction gets half of it (and several senders to one receiver crowd its queue). Parts that
take some ten milliseconds each leave the queues short. How large they are is measured when a run
starts (:func:`parallax.runtime.predictions.probe.measure_level`), where it is faster so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from parallax.runtime.comm.pending import Pending

__all__ = ["Parts", "in_parts", "share_of"]


def share_of(share: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """What of a worker's share travels in one of so many parts; both ends see it alike."""
    count = len(share)
    return share[count * part // parts : count * (part + 1) // parts]


class Parts(Pending):
    """An exchange in parts under way."""

    def __init__(
        self, started: Sequence[tuple[Pending, torch.Tensor, Sequence[torch.Tensor]]]
    ) -> None:
        """
        Args:
            started: of each part, its message, the memory that this brings, and where it belongs.
        """
        self._started = list(started)

    def wait(self) -> None:
        """Wait for all of it, and put what came in its place; errors: see :meth:`Pending.wait`."""
        started, self._started = self._started, []
        for pending, brought, places in started:
            # The parts behind it travel still while this one is copied.
            pending.wait()
            for place, values in zip(places, brought.split([len(p) for p in places]), strict=True):
                place.copy_(values)

    @property
    def has_arrived(self) -> bool:
        return all(pending.has_arrived for pending, _, _ in self._started)


def in_parts(
    arriving: Sequence[torch.Tensor],
    leaving: Sequence[torch.Tensor],
    parts: int,
    exchange: Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], Pending],
) -> Parts:
    """Start an exchange in so many parts.

    Args:
        arriving, leaving: by worker, where its share belongs, and what it gets.
        parts: how many, the same for all workers.
        exchange: starts a message, given the memory for what it brings, what it takes, and how much
            is from and for each worker.
    """
    started = []
    for part in range(parts):
        comes, goes = (
            [share_of(one, part, parts) for one in shares] for shares in (arriving, leaving)
        )
        sizes = [len(one) for one in comes]
        brought = arriving[0].new_empty((sum(sizes), *arriving[0].shape[1:]))
        pending = exchange(brought, torch.cat(goes), sizes, [len(one) for one in goes])
        started.append((pending, brought, comes))
    return Parts(started)
