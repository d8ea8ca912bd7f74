"""Sums over the batch, for all workers' batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parallax.ops.totals import TotalsSpec
from parallax.runtime.comm.control import StepControl
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World

GROUP = "totals"
"""The process group of their messages: they may start before or after others, as graphs do."""
MOST = 32
"""Totals in a message. It has one length, as workers' steps may have several numbers of them: for
each piece of a batch that is larger on some, say."""
_WEIGHT, _COUNT, _SQUARE, _FIRST = range(4)
_EACH = 3
_TOTAL, _FACTOR, _FACTOR_SQUARE = range(3)
_ROUNDING = 1e-9


class BatchTotals:
    """The runtime of one :class:`TotalsSpec`: 2(N-1)/N · 792 bytes sent per worker and step.

    Totals of several workers are one only where they are of the same terms of the same loss. So
    with them travels what multiplies the terms, and how many there are; where these are not equal
    on all workers, each keeps its own, and terms are weighted as the batches are.
    """

    def __init__(self, spec: TotalsSpec, world: World, control: StepControl) -> None:
        self.spec = spec
        self._world = world
        self._control = control
        world.open_group(GROUP)
        self._pending: Pending | None = None
        self._own = torch.zeros(0)
        self._weight = 0
        self._words = torch.zeros(_FIRST + _EACH * MOST, dtype=torch.float64, device=world.device)
        self._terms = len(spec.means)
        self._means = torch.tensor(spec.means, dtype=torch.bool, device=world.device)

    def _by_term(self) -> torch.Tensor:
        return self._words[_FIRST:].view(MOST, _EACH)[: self._terms]

    def start(self, number: int, numbers: Sequence[torch.Tensor], factors: Sequence[Any]) -> None:
        """Send this worker's numbers."""
        if self._pending is not None:
            self._pending.wait()  # of a step that failed
        self._weight = self._control.weight
        self._own = torch.stack([one.detach().double() for one in numbers])
        words, terms = self._words.zero_(), self._terms
        words[:_FIRST] = torch.tensor([self._weight, terms, terms**2], dtype=torch.float64)
        each = self._by_term()
        if self._weight:  # a mean over no rows is no number
            sums = torch.where(self._means, self._own * self._weight, self._own)
            each[:, _TOTAL] = sums[:MOST]
        multiplied = self._as_numbers(factors[:MOST])
        each[:, _FACTOR], each[:, _FACTOR_SQUARE] = multiplied, multiplied.square()
        self._pending = self._world.all_reduce(words, "batch totals", GROUP)

    def _as_numbers(self, factors: Sequence[Any]) -> torch.Tensor:
        found = [
            one.detach().reshape(()).to(self._words) if isinstance(one, torch.Tensor) else None
            for one in factors
        ]
        if all(one is None for one in found):
            return self._words.new_tensor([float(one) for one in factors])
        pairs = zip(found, factors, strict=True)
        return torch.stack(
            [self._words.new_tensor(float(f)) if one is None else one for one, f in pairs]
        )

    def finish(self, number: int) -> list[torch.Tensor]:
        """Wait for those of all workers."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        words, workers = self._words, self._world.size
        if len(self._own) > MOST or self._weight == 0:  # then its gradients count nothing
            return self._alone()
        whole, count = words[_WEIGHT], words[_COUNT]
        each = self._by_term()
        factor = each[:, _FACTOR].square()
        differs = (each[:, _FACTOR_SQUARE] * workers - factor).abs() > _ROUNDING * factor
        differs |= words[_SQUARE] * workers != count * count
        means = torch.where(self._means, each[:, _TOTAL] / whole, each[:, _TOTAL])
        totals = torch.where(differs, self._own, means)
        left = differs | self._means
        own = torch.where(left, 1.0, float(self._weight))
        return [*totals.unbind(), *own.unbind(), *torch.where(left, 1.0, whole).unbind()]

    def _alone(self) -> list[torch.Tensor]:
        ones = torch.ones_like(self._own).unbind()
        return [*self._own.unbind(), *ones, *ones]
