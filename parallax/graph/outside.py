"""Python values that a step reads besides its batch: its graph takes them for granted.

An attribute of a trainer, an entry of a configuration, a global name: what the step's Python does
follows from them, and the script may change them between steps. They are read before each step and
are part of what a graph is valid for; a number of which several values were seen becomes an input
of graphs instead, as a learning rate is. Which of them the step reads is told by names: those that
code loads which the step can reach.
"""

from __future__ import annotations

import contextlib
import enum
import operator
import types
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parallax.errors import UnsupportedError
from parallax.graph.discovery import StepObjects
from parallax.graph.sites import MISSING, Site, names_read, sites

DIFFERENT = 3
"""Values of a number with which it becomes an input of graphs."""

_DEEPEST, _ITEMS, _BYTES = 4, 64, 4096
"""Of lists in lists, of the items of each, and of an array, how much is looked at."""
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, type)


@dataclass(frozen=True)
class Numbers:
    """Python's numbers that are inputs of a graph, besides floats of the batch.

    Args:
        batch: the places of whole numbers in the flat batch.
        outside: where the step reads others.
        others: where it reads numbers that are none, but for those that it changes itself.
    """

    batch: frozenset[int] = frozenset()
    outside: tuple[Site, ...] = ()
    others: tuple[Site, ...] = ()

    def with_counted(self, counted: Sequence[Site]) -> Numbers:
        """With these among the inputs, which the step has turned out to change."""
        others = tuple(site for site in self.others if site not in counted)
        return Numbers(self.batch, (*self.outside, *counted), others)


NO_NUMBERS = Numbers()


class OutsideValues:
    """The values of one step, read anew before each call."""

    def __init__(self, objects: StepObjects) -> None:
        self._sites = sites(objects, names_read(objects))
        self._owned = {
            index: (site, value)
            for index, site in enumerate(self._sites)
            if isinstance(value := site.value, torch.nn.Module | Optimizer | LRScheduler)
        }
        self._getters = [site.source for site in self._sites]
        self._last: list[Any] = []
        self._seen: dict[int, set[float]] = {}
        self._constant: set[int] = set()
        self._inputs: dict[int, type] = {}
        self._counted: set[int] = set()

    @property
    def names(self) -> list[str]:
        """Of the values, as :meth:`read` has them."""
        return [site.name for site in self._sites]

    def read(self) -> tuple[Hashable, ...]:
        """What they are now; of inputs, their type. Other than plain values and functions count for
        nothing.

        Raises:
            UnsupportedError: a model, an optimizer or a scheduler is another one than at first.
        """
        values = [get() for get in self._getters]
        for index, (site, first) in self._owned.items():
            if values[index] is not first:
                raise UnsupportedError(
                    f"{site.name!r} is another {type(first).__name__} than in the first step.",
                    hint="change it in place (its parameter groups, load_state_dict()), or make "
                    "another runner for what comes then.",
                )
        if any(map(operator.is_not, values, self._last)) or not self._last:
            self._look(values)
        told = [_told(value) for value in values]
        for index, kind in self._inputs.items():
            told[index] = kind
        return tuple(told)

    def _look(self, values: list[Any]) -> None:
        """Which numbers are inputs, now that values have changed."""
        self._last = values
        self._inputs.clear()
        for index in self._numbers():
            value = values[index]
            seen = self._seen.setdefault(index, set())
            if len(seen) < DIFFERENT:
                seen.add(value)
            if len(seen) >= DIFFERENT or index in self._counted:
                self._inputs[index] = type(value)

    def _numbers(self) -> Iterator[int]:
        """The places of values that can be inputs."""
        for index, value in enumerate(self._last):
            number = type(value) in (int, float) and index not in self._constant
            if number and self._sites[index].source.writable:
                yield index

    def inputs(self) -> tuple[list[Site], list[Site]]:
        """Where the numbers are that were inputs when values were read last, and the others."""
        found: tuple[list[Site], list[Site]] = ([], [])
        for index in self._numbers():
            found[index not in self._inputs].append(self._sites[index])
        return found

    def count(self, names: Collection[str]) -> bool:
        """Let numbers that a captured step changes be inputs from now on; whether any is new."""
        found = {index for index, site in enumerate(self._sites) if site.name in names}
        new = found - self._counted - self._inputs.keys()
        self._counted |= new
        self._last = []
        return bool(new)

    def keep_constant(self) -> list[Site]:
        """A graph could not be made with them as inputs; those that the step changes stay inputs.

        Returns:
            Where the others are.
        """
        found = self._inputs.keys() - self._counted
        self._constant |= found
        self._last = []
        return [self._sites[index] for index in sorted(found)]


@contextlib.contextmanager
def standing_for(places: Sequence[Site], symbols: Sequence[Any]) -> Iterator[None]:
    """Let symbols be where the numbers are, while the step is captured."""
    values = [place.value for place in places]
    try:
        for place, symbol in zip(places, symbols, strict=True):
            place.put(symbol)
        yield
    finally:
        for place, value in zip(places, values, strict=True):
            place.put(value)


def changed(places: Sequence[Site], values: Sequence[Any]) -> list[Site]:
    """Where there is another number than this now."""
    return [
        place
        for place, value in zip(places, values, strict=True)
        if (now := place.value) is not value
        and (isinstance(now, torch.SymInt | torch.SymFloat) or type(now) in (int, float))
        and not (type(now) is type(value) and type(now) in (int, float) and now == value)
    ]


def _told(value: Any, depth: int = 0) -> Hashable:
    """What counts of a value: all of plain ones and functions, the items of lists and arrays."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple) and depth < _DEEPEST:
        items = tuple([_told(item, depth + 1) for item in value[:_ITEMS]])
        return MISSING if MISSING in items else (type(value), len(value), items)
    if isinstance(value, set | frozenset) and len(value) <= _ITEMS:
        return frozenset([_told(item, _DEEPEST) for item in value])
    if isinstance(value, np.generic):
        return (value.dtype, value.item())
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _BYTES and value.dtype != object
        return (value.shape, value.dtype, value.tobytes() if small else None)
    return value if isinstance(value, _CALLABLE) else MISSING
