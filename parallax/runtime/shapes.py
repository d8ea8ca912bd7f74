"""Forms of a program for the shapes of batches that come often."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from parallax.graph.common.sizes import BatchSizes

OFTEN = 3
"""Batches of a shape after which it has a form of its own: making one takes as long as many steps.
"""
MOST_SHAPES = 32
"""That have one, those used last."""
MOST_MADE = 256
"""Forms that are made in all: with more, shapes come and go faster than forms pay."""

Run = Callable[..., Sequence[Any]]


class ByShape:
    """Finds what runs a batch of its shape, where that comes often enough."""

    def __init__(self, sizes: BatchSizes, make: Callable[[tuple[int, ...]], Run | None]) -> None:
        """
        Args:
            sizes: which vary.
            make: what runs batches with these sizes; None if there is no room for it.
        """
        self._sizes = sizes
        self._make = make
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._forms: OrderedDict[tuple[int, ...], Run] = OrderedDict()
        self._made = 0

    def form(self, batch: Sequence[Any]) -> Run | None:
        """What runs a flat batch; None if it is to be run as any other."""
        values = self._sizes.values(batch)
        form = self._forms.get(values)
        if form is not None:
            self._forms.move_to_end(values)
            return form
        self._seen[values] += 1
        if self._seen[values] < OFTEN or self._made >= MOST_MADE:
            return None
        form = self._make(values)
        if form is not None:
            self._made += 1
            self._forms[values] = form
            if len(self._forms) > MOST_SHAPES:
                self._forms.popitem(last=False)
        return form
