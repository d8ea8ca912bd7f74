"""Paired timing: variants of one thing take turns, and ratios are of one round.

A machine's speed drifts by more than the differences that are measured (other programs, clock
rates). Within a round all variants meet the same machine, so the ratio of a round is steadier than
a ratio of totals, and the median over rounds is not moved by a round that was disturbed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Variant = TypeVar("Variant")


@dataclass(frozen=True)
class Paired:
    """Seconds per step of each variant in each round."""

    seconds: Mapping[str, list[float]]

    def median(self, variant: str) -> float:
        return statistics.median(self.seconds[variant])

    def ratio(self, variant: str, base: str) -> float:
        """Median over the rounds of ``variant``'s time in units of ``base``'s."""
        return statistics.median(self._ratios(variant, base))

    def ratio_range(self, variant: str, base: str) -> tuple[float, float]:
        """Quartiles of the rounds' ratios (smallest and largest of fewer than four)."""
        ratios = sorted(self._ratios(variant, base))
        if len(ratios) < 4:
            return ratios[0], ratios[-1]
        low, _, high = statistics.quantiles(ratios, n=4)
        return low, high

    def _ratios(self, variant: str, base: str) -> list[float]:
        pairs = zip(self.seconds[variant], self.seconds[base], strict=True)
        return [mine / other for mine, other in pairs]


def in_turns(variants: Sequence[Variant], number: int) -> list[Variant]:
    """Their order in a round: each in turn goes first, as whoever follows finds the caches as
    another left them."""
    first = number % len(variants)
    return [*variants[first:], *variants[:first]]


def pair_turns(
    names: Sequence[str], turn: Callable[[str], float], *, rounds: int, warmup: int = 1
) -> Paired:
    """Let variants take turns.

    Args:
        names: of the variants.
        turn: lets one have its turn, and returns its seconds per step.
        rounds: measured rounds.
        warmup: rounds before these, not measured.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        for name in in_turns(names, number):
            taken = turn(name)
            if number >= 0:
                seconds[name].append(taken)
    return Paired(seconds)


def run_paired(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    steps: int,
    warmup: int = 1,
    barrier: Callable[[], object] = lambda: None,
) -> Paired:
    """Time ``steps`` calls of each variant in each of ``rounds`` rounds, all in this process.

    Args:
        variants: by name; each call runs one step.
        rounds: measured rounds.
        steps: calls of a variant in its turn.
        warmup: rounds before these, not measured.
        barrier: waits for all workers before and after a turn, so that none measures a start
            that is late or an end that is early.
    """

    def turn(name: str) -> float:
        barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            variants[name]()
        barrier()
        return (time.perf_counter() - begin) / steps

    return pair_turns(list(variants), turn, rounds=rounds, warmup=warmup)
