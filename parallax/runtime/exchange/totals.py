"""Sums over the batch, for all workers' batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from parallax.ops.totals import MOST, TotalsSpec
from parallax.runtime.comm.control import StepControl
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World

GROUP = "totals"
"""The process group of their messages: they may start before or after others, as graphs do."""
_WEIGHT, _TERMS, _FIRST = range(3)
"""Columns: what a batch counts, how many totals there are, and from the third on all factors, then
all totals."""
_ROUNDING = 1e-9
_LOOKS = 3
"""First steps of a graph in which it is told that workers' terms differ: to look waits for them."""

logger = logging.getLogger("parallax")


class BatchTotals:
    """The runtime of one :class:`TotalsSpec`: (N-1) · 528 bytes sent per worker and step.

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
        length = _FIRST + 2 * MOST
        self._words = torch.zeros(length, dtype=torch.float64, device=world.device)
        self._gathered = self._words.new_zeros(world.size, length)
        terms = len(spec.means)
        self._factors = slice(_FIRST, _FIRST + min(terms, MOST))
        self._totals = slice(_FIRST + MOST, _FIRST + MOST + min(terms, MOST))
        self._means = torch.tensor(spec.means, dtype=torch.bool, device=world.device)
        self._looks = _LOOKS
        self._told: tuple[Any, ...] = ()
        """The words that :attr:`_words` has already."""

    def start(self, number: int, numbers: Sequence[torch.Tensor], factors: Sequence[Any]) -> None:
        """Send this worker's numbers."""
        if self._pending is not None:
            self._pending.wait()  # of a step that failed
        self._weight = self._control.weight
        self._own = self._words.new_zeros(0)
        if numbers:
            self._own = torch.stack([one.detach().to(self._words) for one in numbers])
        words = self._words
        told = self._weight, len(numbers), *factors
        if any(isinstance(one, torch.Tensor) for one in factors) or told != self._told:
            words.zero_()
            words[:_FIRST] = torch.tensor(told[:_FIRST], dtype=torch.float64)
            words[self._factors] = self._as_numbers(factors[:MOST])
            self._told = told
        if self._weight:  # a mean over no rows is no number
            own = self._own[:MOST]
            if any(self.spec.means):
                own = torch.where(self._means[:MOST], own * self._weight, own)
            words[self._totals] = own
        self._pending = self._world.all_gather(self._gathered, words, "batch totals", GROUP)

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
        if len(self._own) > MOST or self._weight == 0:  # then its gradients count nothing
            ones = torch.ones_like(self._own).unbind()
            return [*self._own.unbind(), *ones, *ones]
        told = self._gathered
        differs = self._differ(told)
        self._tell(differs)
        whole, totals = told[:, _WEIGHT].sum(), told[:, self._totals].sum(0)
        left = differs
        if any(self.spec.means):
            totals = torch.where(self._means, totals / whole, totals)
            left = differs | self._means
        totals = torch.where(differs, self._own, totals)
        own = torch.where(left, 1.0, float(self._weight))
        return [*totals.unbind(), *own.unbind(), *torch.where(left, 1.0, whole).unbind()]

    def _tell(self, differs: torch.Tensor) -> None:
        """Say it where workers cannot add up, which they all see alike."""
        if self._looks == 0:
            return
        self._looks -= 1
        if bool(differs.any()):
            self._looks = 0
            if self._world.rank == 0:
                logger.warning(
                    "the losses of workers' steps are sums of differing terms, so means over some "
                    "of the batch are each worker's own: pass equally many micro-batches, and "
                    "leave out no term where a set is empty (`if len(x)`), whose mean counts for "
                    "nothing"
                )

    def _differ(self, told: torch.Tensor) -> torch.Tensor:
        """Of each total, whether workers have it of other terms; as all of them see it."""
        weights = told[:, _WEIGHT]
        counted = (weights > 0).unsqueeze(1)
        # One whose batch is not empty: factors of others may be no numbers.
        first = told.index_select(0, weights.argmax().view(1))
        off = (told - first).abs() > _ROUNDING * first.abs()
        off &= counted
        return off[:, self._factors].any(0) | off[:, _TERMS].any()
