"""Numbers of the batches of all workers in one."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from parallax.ops.statistics import MOST, VARIANCES, Kind, StatisticsSpec
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
        self._columns = words.new_zeros(1 + spec.length if spec.length else 0)
        self._columns[:1] = spec.layout
        self._sent = words.new_zeros(4 * MOST + len(self._columns))
        self._sent[:MOST] = _ABSENT
        if self._travels:
            self._sent[: 4 * MOST] = words.view(-1)
            words = self._sent[: 4 * MOST].view(4, MOST)
        self._words = words
        self._gathered = words.new_zeros(world.size, len(self._sent))
        self._alike = words[0].expand(world.size, count).clone()
        """The keys, if all workers have the same statistics."""
        kinds = [spec.kinds[place] for place in self._single]
        self._kinds = set(kinds)
        corrections = [spec.corrections[place] for place in self._single]
        self._corrections = words.new_tensor(corrections)

    def start(self, number: int, numbers: Sequence[Any]) -> None:
        """Send this worker's numbers."""
        if self._pending is not None:
            self._pending.wait()  # of a step that failed
        if kept := len(self._single):
            own = self._as_numbers(self._of(numbers, self._single)).view(kept, 3).T
            self._words[1:, :kept] = torch.where(own[:1] > 0, own, 0.0)  # of nothing, no number
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
        if self._words.device.type == "cpu":  # a device would be waited for
            return self._words.new_tensor([float(one) for one in values])
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
        wholes: dict[int, torch.Tensor] = {}
        if self._single:
            known, (count, value, variance) = self._by_worker()
            by_kind, mean = _wholes(count, value, variance, self._kinds, self._corrections)
            for number, place in enumerate(self._single):
                found[place] = by_kind[self.spec.kinds[place]][number]
                means[place] = mean[number]
            wholes.update(zip(self._single, count.sum(0).unbind(), strict=True))
        else:
            known = None
        columns = self._gathered[:, 4 * MOST :]
        alike = columns[:, :1] == self._columns[:1] if self._several else None
        self._tell(known, alike)
        start = 1
        for place in self._several:
            width = self.spec.columns[place]
            kind, correction = self.spec.kinds[place], self.spec.corrections[place]
            assert alike is not None
            counts = torch.where(alike, columns[:, start : start + 1], 0.0)
            start += 1
            parts = [
                torch.where(alike, columns[:, first : first + width], 0.0)
                for first in range(start, start + width * (1 + (kind in VARIANCES)), width)
            ]
            start += width * len(parts)
            by_kind, means[place] = _wholes(counts, parts[0], parts[-1], {kind}, correction)
            found[place] = by_kind[kind]
            wholes[place] = counts.sum() * width
        places = range(len(self.spec.keys))
        return [of[place] for of in (found, wholes, means) for place in places]

    def _by_worker(self) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """What each worker tells of this one's numbers, and which it tells of; if that is known at
        once, None for all."""
        kept = len(self._single)
        own = self._words[:, :kept]
        told = self._gathered[:, : 4 * MOST].view(-1, 4, MOST)
        if not self._travels:
            return None, list(own[1:].unsqueeze(1).unbind(0))
        # A device would be waited for to see it.
        if told.device.type == "cpu" and torch.equal(told[:, 0], self._alike):
            return None, list(told[:, 1:, :kept].unbind(1))
        keys, *parts = told.unbind(1)
        same = keys.unsqueeze(2) == own[0]  # by worker, place in its message, and own statistic
        return same.any(1), [torch.where(same, one.unsqueeze(2), 0.0).sum(1) for one in parts]

    def _tell(self, known: torch.Tensor | None, alike: torch.Tensor | None) -> None:
        """Say it where workers leave out what is over all elements of their batches, too.

        Args:
            known: by worker and number, whether it tells of it; None if it does of all.
            alike: by worker, whether it has the same columns; None if there are none.
        """
        if self._looks == 0 or not any(self.spec.lines):
            return
        self._looks -= 1  # to look waits for a device
        left_out = dict.fromkeys(self._single, False)
        if known is not None:
            left_out.update(zip(self._single, (~known).any(0).tolist(), strict=True))
        if alike is not None:
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


def _wholes(
    count: torch.Tensor,
    value: torch.Tensor,
    variance: torch.Tensor,
    kinds: Collection[Kind],
    corrections: torch.Tensor | float,
) -> tuple[dict[Kind, torch.Tensor], torch.Tensor]:
    """By kind all numbers of all batches, as if they were of it; and their means.

    Args:
        count, value, variance: by worker and number. Those of nothing are zero.
        kinds: that are wanted.
        corrections: of variances and deviations.
    """
    found: dict[Kind, torch.Tensor] = {}
    whole = count.sum(0)
    mean = found["mean"] = (count * value).sum(0) / whole
    if "sum" in kinds:
        found["sum"] = value.sum(0)
    if "norm" in kinds:
        found["norm"] = value.square().sum(0).sqrt()
    if "logsumexp" in kinds:
        found["logsumexp"] = torch.where(count > 0, value, -math.inf).logsumexp(0)
    if "largest" in kinds:
        found["largest"] = torch.where(count > 0, value, -math.inf).amax(0)
    if "smallest" in kinds:
        found["smallest"] = torch.where(count > 0, value, math.inf).amin(0)
    if not {*kinds}.isdisjoint(VARIANCES):
        off = (count * (variance + (value - mean).square())).sum(0)
        found["variance"] = off / (whole - corrections).clamp(min=0)
        found["deviation"] = found["variance"].sqrt()
    return found, mean
