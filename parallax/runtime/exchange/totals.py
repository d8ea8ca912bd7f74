"""Sums over the batch, for all workers' batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from parallax.ops.totals import MOST, MOST_TERMS, NUMBERS, PARTS, PLACES, TotalsSpec
from parallax.runtime.comm.control import StepControl
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World

GROUP = "totals"
"""The process group of their messages: they may start before or after others, as graphs do."""
_WEIGHT, _COUNT, _FIRST = range(3)
"""Columns: what a batch counts, how many totals there are; from the third on all keys of totals,
all keys of terms, all that multiplies these, and all totals."""
_KEYS = slice(_FIRST, _FIRST + MOST)
_TERM_KEYS = slice(_KEYS.stop, _KEYS.stop + MOST_TERMS)
_FACTORS = slice(_TERM_KEYS.stop, _TERM_KEYS.stop + MOST_TERMS)
_TOTALS = slice(_FACTORS.stop, _FACTORS.stop + MOST)
_DESCRIBED = slice(0, _TOTALS.start)
"""What is the same in most steps."""
_ROUNDING = 1e-9
_LOOKS = 3
"""First steps of a graph in which it is told that workers' terms differ: to look waits for them."""

logger = logging.getLogger("parallax")


class _Matched(NamedTuple):
    """What follows from all that workers say of their totals.

    Args:
        described: this.
        same: by worker, place in its message and own total, whether that is added to it.
        differs: of each total, whether it cannot be added up.
        whole: what the batches count together.
    """

    described: torch.Tensor
    same: torch.Tensor
    differs: torch.Tensor
    whole: torch.Tensor


class BatchTotals:
    """The runtime of one :class:`TotalsSpec`: (N-1) · 1552 bytes sent per worker and step.

    Totals of several workers are one where they are of the same terms of the same loss, which
    their keys say; a worker without a key has left the terms out, and adds nothing to their total.
    Where a line has made several numbers of totals, or has them multiplied by other numbers, or has
    made what this is not known of, each worker keeps its own, and the terms are weighted as the
    batches are.
    """

    def __init__(self, spec: TotalsSpec, world: World, control: StepControl) -> None:
        self.spec = spec
        self._world = world
        self._control = control
        world.open_group(GROUP)
        self._pending: Pending | None = None
        self._own = torch.zeros(0)
        self._weight = 0
        words = torch.zeros(_TOTALS.stop, dtype=torch.float64, device=world.device)
        self._words = words
        self._gathered = words.new_zeros(world.size, _TOTALS.stop)
        self._travels = len(spec.keys) <= MOST and len(spec.terms) <= MOST_TERMS
        if self._travels:
            self._describe()
        self._keys = words.new_tensor(spec.keys)
        self._term_keys = words.new_tensor([one.key for one in spec.terms])
        self._same_line = _of_lines(self._keys[None], self._keys)[0].to(words)
        """Of each two totals, whether they are of one line."""
        self._term_lines = words.new_tensor([one.line for one in spec.terms])
        self._divided = words.new_zeros(len(spec.terms), len(spec.keys))
        """Of each term and total, whether it is divided by this."""
        for place, one in enumerate(spec.terms):
            self._divided[place, one.total] = 1
        self._means = torch.tensor(spec.means, dtype=torch.bool, device=world.device)
        self._matched: _Matched | None = None
        self._looks = _LOOKS
        self._told: tuple[Any, ...] = ()
        """The numbers that :attr:`_words` has already."""

    def _describe(self) -> None:
        """Write what is the same in all steps."""
        spec = self.spec
        terms = [one.key for one in spec.terms]
        self._words[_KEYS][: len(spec.keys)] = torch.tensor(spec.keys, dtype=torch.float64)
        keys = torch.tensor([*terms, *spec.others], dtype=torch.float64)
        self._words[_TERM_KEYS][: len(keys)] = keys
        self._factors = slice(_FACTORS.start, _FACTORS.start + len(terms))
        self._totals = slice(_TOTALS.start, _TOTALS.start + len(spec.keys))

    def start(self, number: int, numbers: Sequence[torch.Tensor], factors: Sequence[Any]) -> None:
        """Send this worker's numbers."""
        if self._pending is not None:
            self._pending.wait()  # of a step that failed
        self._weight = self._control.weight
        self._own = self._words.new_zeros(0)
        if numbers:
            self._own = torch.stack([one.detach().to(self._words) for one in numbers])
        words = self._words
        told = self._weight, *factors
        if any(isinstance(one, torch.Tensor) for one in factors) or told != self._told:
            words[:_FIRST] = torch.tensor([self._weight, len(numbers)], dtype=torch.float64)
            if self._travels:
                words[self._factors] = self._as_numbers(factors)
            self._told = told
        if self._travels:
            own = self._own
            if not self._weight:  # a mean over no rows is no number
                own = torch.zeros_like(own)
            elif any(self.spec.means):
                own = torch.where(self._means, own * self._weight, own)
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
        if not self._travels or self._weight == 0 or not len(self._own):
            # Of an empty batch gradients count nothing.
            ones = torch.ones_like(self._own).unbind()
            return [*self._own.unbind(), *ones, *ones]
        told = self._gathered
        _, same, differs, whole = self._match(told)
        self._tell(differs, told)
        totals = torch.where(same, told[:, _TOTALS].unsqueeze(2), 0.0).sum((0, 1))
        left = differs
        if any(self.spec.means):
            totals = torch.where(self._means, totals / whole, totals)
            left = differs | self._means
        totals = torch.where(differs, self._own, totals)
        own = torch.where(left, 1.0, float(self._weight))
        return [*totals.unbind(), *own.unbind(), *torch.where(left, 1.0, whole).unbind()]

    def _match(self, told: torch.Tensor) -> _Matched:
        """Find what belongs together; a device would be waited for to see that it is as before."""
        described, before = told[:, _DESCRIBED], self._matched
        if (
            before is not None
            and told.device.type == "cpu"
            and torch.equal(described, before.described)
        ):
            return before
        counted = (told[:, _WEIGHT] > 0).view(-1, 1, 1)
        same = (told[:, _KEYS].unsqueeze(2) == self._keys) & counted
        differs = self._differ(told, same, counted)
        self._matched = _Matched(described.clone(), same, differs, told[:, _WEIGHT].sum())
        return self._matched

    def _differ(
        self, told: torch.Tensor, same: torch.Tensor, counted: torch.Tensor
    ) -> torch.Tensor:
        """Of each total, whether it cannot be added up with those of its lines.

        Args:
            told: of all workers.
            same: by worker, place in its message and total, whether the keys are equal.
            counted: by worker, whether its batch is not empty.
        """
        keys = told[:, _KEYS]
        alike = _alike(keys, self._keys).any(1)
        # Of a line that counts nothing alike there and here nobody knows.
        known = (alike.to(keys) @ self._same_line) > 0
        off = alike & ~same.any(1) | _may_be_alike(keys, self._keys).any(1) & ~known
        terms = told[:, _TERM_KEYS].unsqueeze(2)
        same_terms = terms == self._term_keys
        unknown = (terms == self._term_lines).any(1)
        others, own = told[:, _FACTORS].unsqueeze(2), self._words[self._factors]
        equal = (others - own).abs() <= _ROUNDING * own.abs()
        alike = _alike(told[:, _TERM_KEYS], self._term_keys).any(1)
        off_terms = unknown | alike & ~same_terms.any(1) | (same_terms & ~equal).any(1)
        off |= (off_terms.to(keys) @ self._divided) > 0
        many = (told[:, _COUNT] > MOST).any()
        differs: torch.Tensor = (off & counted.squeeze(2)).any(0) | many
        return differs

    def _tell(self, differs: torch.Tensor, told: torch.Tensor) -> None:
        """Say it where workers cannot add up: the first of those that have such a total."""
        if self._looks == 0:
            return
        self._looks -= 1
        for place in differs.nonzero().flatten().tolist():
            holders = _of_lines(told[:, _KEYS], self._keys[place : place + 1]).flatten(1).any(1)
            self._looks = 0
            if int(holders.nonzero()[0]) == self._world.rank:
                logger.warning(
                    "workers' losses have differing numbers of terms of one line, or multiply "
                    "them by differing numbers, so a mean over some of the batch is each worker's "
                    "own: pass equally many micro-batches (%s)",
                    self.spec.lines[place],
                )
                return


def _alike(told: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """By worker, place and key, whether they are of the same line, and count the same."""
    found: torch.Tensor = (told // PLACES).unsqueeze(2) == keys // PLACES
    return found


def _may_be_alike(told: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """By worker, place and key, whether they are of the same line, and it is not numbers alone that
    tell apart what they count."""
    told = (told // PLACES).unsqueeze(2)
    keys = keys // PLACES
    apart = (told // NUMBERS == keys // NUMBERS) & (told % NUMBERS > 0) & (keys % NUMBERS > 0)
    size = NUMBERS * PARTS
    found: torch.Tensor = (told // size == keys // size) & ~apart
    return found


def _of_lines(told: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """By worker, place and key, whether they are of the same line."""
    size = PLACES * NUMBERS * PARTS
    found: torch.Tensor = (told // size).unsqueeze(2) == keys // size
    return found
