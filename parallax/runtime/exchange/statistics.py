"""Numbers of the batches of all workers in one."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from parallax.ops.statistics import MOST, StatisticsSpec
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World

GROUP = "statistics"
"""The process group of their messages: they may start before or after others, as graphs do."""
_LOOKS = 3
"""First steps of a graph in which it is told what some workers leave out."""
_ABSENT = -1.0
"""In the place of a key: there is no statistic."""


logger = logging.getLogger("parallax")


class BatchStatistics:
    """The runtime of one :class:`StatisticsSpec`: (N-1) · 512 bytes sent per worker and step.

    Statistics of several workers are one where they have one key: a worker without it has left it
    out, and adds nothing. Variances are put together by the parallel algorithm of Chan, Golub and
    LeVeque (1979), so that large means cost no digits.
    """

    def __init__(self, spec: StatisticsSpec, world: World) -> None:
        self.spec = spec
        self._world = world
        self._travels = len(spec.keys) <= MOST
        world.open_group(GROUP)
        self._pending: Pending | None = None
        self._looks = _LOOKS
        count = MOST if self._travels else len(spec.keys)
        words = torch.zeros(4, count, dtype=torch.float64, device=world.device)
        words[0] = _ABSENT
        words[0, : len(spec.keys)] = words.new_tensor(spec.keys)
        self._words = words
        self._gathered = torch.zeros(world.size, 4 * MOST, dtype=torch.float64, device=world.device)
        self._nothing = words.new_full((4, MOST), 0.0)
        self._nothing[0] = _ABSENT

    def start(self, number: int, numbers: Sequence[Any]) -> None:
        """Send this worker's numbers."""
        if self._pending is not None:
            self._pending.wait()  # of a step that failed
        kept = len(self.spec.keys)
        if kept:
            own = self._as_numbers(numbers).view(kept, 3).T
            self._words[1:, :kept] = torch.where(own[:1] > 0, own, 0.0)  # of nothing, no number
        words = self._words if self._travels else self._nothing
        self._pending = self._world.all_gather(
            self._gathered, words.view(-1), "batch statistics", GROUP
        )

    def _as_numbers(self, values: Sequence[Any]) -> torch.Tensor:
        are_tensors = [isinstance(one, torch.Tensor) for one in values]
        pairs = list(zip(values, are_tensors, strict=True))
        # Those that are Python's in one copy to the device.
        plain = self._words.new_tensor([0.0 if is_tensor else float(v) for v, is_tensor in pairs])
        known = [
            value.detach().reshape(()).to(plain) if is_tensor else number
            for (value, is_tensor), number in zip(pairs, plain.unbind(), strict=True)
        ]
        return torch.stack(known)

    def finish(self, number: int) -> list[torch.Tensor]:
        """Wait for those of all workers."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        kept = len(self.spec.keys)
        own = self._words[:, :kept]
        told = own.unsqueeze(0)
        if self._travels:
            told = self._gathered.view(-1, 4, MOST)
        keys, counts, numbers, variances = told.unbind(1)
        same = keys.unsqueeze(2) == own[0]  # by worker, place in its message, and own statistic
        self._tell(same)

        def of(values: torch.Tensor) -> torch.Tensor:
            return torch.where(same, values.unsqueeze(2), 0.0).sum(1)

        counts, numbers, variances = of(counts), of(numbers), of(variances)
        return [self._whole(place, counts, numbers, variances) for place in range(kept)]

    def _tell(self, same: torch.Tensor) -> None:
        """Say it where workers leave out what is over all elements of their batches, too."""
        if self._looks == 0 or not any(self.spec.lines):
            return
        self._looks -= 1  # to look waits for a device
        left_out = (~same.any(1)).any(0).tolist()
        for line, is_left_out in zip(self.spec.lines, left_out, strict=True):
            if line and is_left_out:
                self._looks = 0
                logger.warning(
                    "a mean over the whole batch is computed on some workers only, as the step's "
                    "Python decides by values of the batch: what the others' batches have does not "
                    "count in it; compute it either way (%s)",
                    line,
                )
                return

    def _whole(
        self, place: int, counts: torch.Tensor, numbers: torch.Tensor, variances: torch.Tensor
    ) -> torch.Tensor:
        """One of all batches, of what each worker tells."""
        kind, correction = self.spec.kinds[place], self.spec.corrections[place]
        count, number, variance = counts[:, place], numbers[:, place], variances[:, place]
        if kind == "sum":
            return number.sum()
        if kind in ("largest", "smallest"):
            least = -math.inf if kind == "largest" else math.inf
            known = torch.where(count > 0, number, least)
            return known.amax() if kind == "largest" else known.amin()
        whole = count.sum()
        mean = (count * number).sum() / whole
        if kind == "mean":
            return mean
        found = (count * (variance + (number - mean).square())).sum()
        found = found / (whole - correction).clamp(min=0)
        return found.sqrt() if kind == "deviation" else found
