"""Python values that a step reads besides its batch: its graph takes them for granted.

An attribute of a trainer, an entry of a configuration, a global name: what the step's Python does
follows from them, and the script may change them between steps. They are read before each step and
are part of what a graph is valid for; a number of which several values were seen becomes an input
of graphs instead, as a learning rate is. Which of them the step reads is told by names: those that
code loads which the step can reach.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import operator
import pathlib
import types
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parallax.errors import UnsupportedError
from parallax.graph.objects.discovery import GlobalName, StepObjects
from parallax.graph.objects.reached import reached_code
from parallax.graph.objects.sites import MISSING, Site, has_settings, sites

DIFFERENT = 3
"""Values of a number with which it becomes an input of graphs."""

_DEEPEST, _ITEMS, _BYTES, _SIZED = 4, 64, 4096, 256
"""Of lists in lists, of the items of each, of an array, and of containers for another size, how
much is looked at."""
PLAIN = (
    *(bool, int, float, complex, str, bytes, range, enum.Enum, torch.dtype, torch.device),
    *(fractions.Fraction, decimal.Decimal, pathlib.PurePath),
    *(datetime.date, datetime.time, datetime.timedelta),
)
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


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
        self._objects = objects
        self._seen: dict[str, set[float]] = {}
        self._constant: set[str] = set()
        self._counted: set[str] = set()
        self._first: dict[str, Any] = {}
        self._watched: dict[str, Site] = {}
        self._sites: list[Site] = []
        self._build()

    def _build(self) -> None:
        """Look for the sites, now that there may be others."""
        self._homes: list[tuple[int, Any]] = []
        while True:  # for what is found may have methods that read more
            homes = [home for _, home in self._homes]
            self._sites = sites(self._objects, reached_code(self._objects, homes))
            values = [site.value for site in self._sites]
            self._homes = [(i, value) for i, value in enumerate(values) if has_settings(value)]
            if len(self._homes) <= len(homes):
                break
        known = {site.name for site in self._sites}
        more = [site for site in self._watched.values() if site.name not in known]
        self._sites += more
        values += [site.value for site in more]
        self._getters = [site.source for site in self._sites]
        self._last: list[Any] = []
        self._inputs: dict[int, type] = {}
        self._owned = [
            (index, self._first.setdefault(self._sites[index].name, value))
            for index, value in enumerate(values)
            if isinstance(value, torch.nn.Module | Optimizer | LRScheduler)
            and not has_settings(value)
        ]
        contents = [_content(container) for _, container, _ in self._objects.containers]
        self._sized = [(one, len(one)) for one in contents if one is not None][:_SIZED]
        self.version = hash(tuple(self.names))
        """Of the list of sites."""

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
        if any(values[index] is not home for index, home in self._homes) or any(
            len(one) != size for one, size in self._sized
        ):
            self._build()
            values = [get() for get in self._getters]
        for index, first in self._owned:
            if values[index] is not first:
                raise UnsupportedError(
                    f"{self._sites[index].name!r} is another {type(first).__name__} than in the "
                    "first step.",
                    hint="change it in place (its parameter groups, load_state_dict()), or make "
                    "another runner for what comes then.",
                )
        if any(map(operator.is_not, values, self._last)) or not self._last:
            self._look(values)
        told: list[Hashable] = [_told(value) for value in values]
        for index, home in self._homes:
            if told[index] is MISSING:
                told[index] = (type(home),)
        for index, kind in self._inputs.items():
            told[index] = (kind, id(self._sites[index].source.home))
        return tuple(told)

    def _look(self, values: list[Any]) -> None:
        """Which numbers are inputs, now that values have changed."""
        self._last = values
        self._inputs.clear()
        for index, name in self._numbers():
            seen = self._seen.setdefault(name, set())
            if len(seen) < DIFFERENT:
                seen.add(values[index])
            if len(seen) >= DIFFERENT or name in self._counted:
                self._inputs[index] = type(values[index])

    def _numbers(self) -> Iterator[tuple[int, str]]:
        """The places and names of values that can be inputs."""
        for index, value in enumerate(self._last):
            site = self._sites[index]
            number = type(value) in (int, float) and site.name not in self._constant
            if number and site.source.writable:
                yield index, site.name

    def inputs(self) -> tuple[list[Site], list[Site]]:
        """Where the numbers are that were inputs when values were read last, and the others."""
        found: tuple[list[Site], list[Site]] = ([], [])
        for index, _ in self._numbers():
            found[index not in self._inputs].append(self._sites[index])
        return found

    def count(self, names: Collection[str]) -> bool:
        """Let numbers that a captured step changes be inputs from now on; whether any is new."""
        inputs = {self._sites[index].name for index in self._inputs}
        new = set(names) - self._counted - inputs
        if new:
            self._counted |= new
            self._last = []
        return bool(new)

    def watch(self, places: Collection[Site]) -> bool:
        """Read these from now on as well, which a captured step sets; whether any is new."""
        new = {site.name: site for site in places if site.name not in self._watched}
        self._watched |= new
        if new:
            self._build()
        return bool(new)

    def keep_constant(self) -> list[str]:
        """A graph could not be made with them as inputs; those that the step changes stay inputs.

        Returns:
            The names of the others.
        """
        found = {self._sites[index].name for index in self._inputs} - self._counted
        self._constant |= found
        self._last = []
        return sorted(found)


def _content(container: Any) -> dict[Any, Any] | None:
    """The entries or attributes of a container, to which others may be added."""
    if isinstance(container, GlobalName):
        return None
    content = container if isinstance(container, dict) else getattr(container, "__dict__", None)
    return content if isinstance(content, dict) else None


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
        if (now := place.value) is not value and (_is_symbol(now) or _is_other(now, value))
    ]


def _is_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat)


def _is_other(now: Any, value: Any) -> bool:
    """Whether it is a number, and not the same; symbols are not asked, since that is a guard."""
    return type(now) in (int, float) and (type(now) is not type(value) or now != value)


def _told(value: Any, depth: int = 0) -> Hashable:
    """What counts of a value: all of plain ones and functions, the items of lists and arrays."""
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple | collections.deque) and depth < _DEEPEST:
        items = tuple([_told_item(item, depth + 1) for item in itertools.islice(value, _ITEMS)])
        return MISSING if MISSING in items else (type(value), len(value), items)
    if isinstance(value, set | frozenset) and len(value) <= _ITEMS:
        return frozenset([_told(item, _DEEPEST) for item in value])
    if isinstance(value, np.generic):
        return (value.dtype, value.item())
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _BYTES and value.dtype != object
        return (value.shape, value.dtype, value.tobytes() if small else None)
    if isinstance(value, functools.partial) and depth < _DEEPEST:
        settings = (value.args, tuple(value.keywords.items()))
        return (_told(value.func, depth + 1), _told(settings, depth + 1))
    return value if isinstance(value, _CALLABLE) else MISSING


def _told_item(item: Any, depth: int) -> Hashable:
    """Of a tensor, that it is one: a memory of three is another than one of two."""
    return torch.Tensor if isinstance(item, torch.Tensor) else _told(item, depth)
