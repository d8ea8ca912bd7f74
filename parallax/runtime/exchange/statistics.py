"""Numbers of the batches of all workers in one."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from parallax.ops.statistics import MOST, VARIANCES, StatisticsSpec
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
    """The runtime of one :class:`StatisticsSpec`: (N-1) · 512 bytes sent per worker and step, and
    those of columns, whose number all workers know.

    Statistics of several workers are one where they have one key: a worker without it has left it
    out, and adds nothing. Those of columns are where a worker has the same ones, all of them.
    Variances are put together by the parallel algorithm of Chan, Golub and LeVeque (1979), so that
    large means cost no digits.
    """

    def __init__(self, spec: StatisticsSpec, world: World) -> None:
        self.spec = spec
        self._world = world
        world.open_group(GROUP)
        self._pending: Pending | None = None
        self._looks = _LOOKS
        places = range(len(spec.keys))
        self._single = [place for place in places if not spec.columns[place]]
        self._several = [place for place in places if spec.columns[place]]
        self._travels = len(self._single) <= MOST
        count = MOST if self._travels else len(self._single)
        words = torch.zeros(4, count, dtype=torch.float64, device=world.device)
        words[0] = _ABSENT
        kept = len(self._single)
        words[0, :kept] = words.new_tensor([spec.keys[place] for place in self._single])
        self._words = words
        self._columns = words.new_zeros(1 + spec.length if spec.length else 0)
        self._columns[:1] = spec.layout
        self._sent = words.new_zeros(4 * MOST + len(self._columns))
        self._sent[:MOST] = _ABSENT
        self._gathered = words.new_zeros(world.size, len(self._sent))

    def start(self, number: int, numbers: Sequence[Any]) -> None:
        """Send this worker's numbers."""
        if self._pending is not None:
            self._pending.wait()  # of a step that failed
        if kept := len(self._single):
            own = self._as_numbers(self._of(numbers, self._single)).view(kept, 3).T
            self._words[1:, :kept] = torch.where(own[:1] > 0, own, 0.0)  # of nothing, no number
        if self._travels:
            self._sent[: 4 * MOST] = self._words.view(-1)
        if self._several:
            told = list(self._told_of_columns(numbers))
            self._columns[1 : 1 + sum(map(len, told))] = torch.cat(told)
            self._sent[4 * MOST :] = self._columns
        self._pending = self._world.all_gather(
            self._gathered, self._sent, "batch statistics", GROUP
        )

    def _told_of_columns(self, numbers: Sequence[Any]) -> Iterator[torch.Tensor]:
        for place in self._several:
            count, values, variances = numbers[3 * place : 3 * place + 3]
            of_each = self._words.new_full((1,), float(count)) / self.spec.columns[place]
            yield of_each
            own = [values, variances] if self.spec.kinds[place] in VARIANCES else [values]
            for one in own:
                yield torch.where(of_each > 0, one.detach().reshape(-1).to(of_each), 0.0)

    @staticmethod
    def _of(numbers: Sequence[Any], places: Sequence[int]) -> list[Any]:
        return [one for place in places for one in numbers[3 * place : 3 * place + 3]]

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
        found: dict[int, torch.Tensor] = {}
        means: dict[int, torch.Tensor] = {}
        own = self._words[:, : len(self._single)]
        told = self._gathered[:, : 4 * MOST].view(-1, 4, MOST)
        keys, *parts = (told if self._travels else own.unsqueeze(0)).unbind(1)
        same = keys.unsqueeze(2) == own[0]  # by worker, place in its message, and own statistic
        by_worker = [torch.where(same, values.unsqueeze(2), 0.0).sum(1) for values in parts]
        for number, place in enumerate(self._single):
            told_of = [values[:, number] for values in by_worker]
            found[place], means[place] = self._whole(place, *told_of)
        wholes = dict(zip(self._single, by_worker[0].sum(0).unbind(), strict=True))
        columns = self._gathered[:, 4 * MOST :]
        alike = columns[:, :1] == self._columns[:1]
        self._tell(same, alike)
        start = 1
        for place in self._several:
            width = self.spec.columns[place]
            several = self.spec.kinds[place] in VARIANCES
            counts = torch.where(alike, columns[:, start : start + 1], 0.0)
            start += 1
            parts = [
                columns[:, first : first + width]
                for first in range(start, start + width * (1 + several), width)
            ]
            start += width * len(parts)
            found[place], means[place] = self._whole(place, counts, parts[0], parts[-1])
            wholes[place] = counts.sum() * width
        places = range(len(self.spec.keys))
        return [of[place] for of in (found, wholes, means) for place in places]

    def _tell(self, same: torch.Tensor, alike: torch.Tensor) -> None:
        """Say it where workers leave out what is over all elements of their batches, too."""
        if self._looks == 0 or not any(self.spec.lines):
            return
        self._looks -= 1  # to look waits for a device
        left_out = dict(zip(self._single, (~same.any(1)).any(0).tolist(), strict=True))
        left_out.update(dict.fromkeys(self._several, not bool(alike.all())))
        for place, line in enumerate(self.spec.lines):
            if line and left_out[place]:
                self._looks = 0
                logger.warning(
                    "a mean over the whole batch is computed on some workers only, as the step's "
                    "Python decides by values of the batch: what the others' batches have does not "
                    "count in it; compute it either way (%s)",
                    line,
                )
                return

    def _whole(
        self, place: int, count: torch.Tensor, number: torch.Tensor, variance: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One of all batches, of what each worker tells; and of a variance the mean."""
        kind, correction = self.spec.kinds[place], self.spec.corrections[place]
        if kind == "sum":
            whole = torch.where(count > 0, number, 0.0).sum(0)
            return whole, whole
        if kind in ("largest", "smallest"):
            least = -math.inf if kind == "largest" else math.inf
            known = torch.where(count > 0, number, least)
            whole = known.amax(0) if kind == "largest" else known.amin(0)
            return whole, whole
        whole = count.sum(0)
        mean = torch.where(count > 0, count * number, 0.0).sum(0) / whole
        if kind == "mean":
            return mean, mean
        found = (count * (variance + (number - mean).square())).sum(0)
        found = found / (whole - correction).clamp(min=0)
        return found.sqrt() if kind == "deviation" else found, mean
