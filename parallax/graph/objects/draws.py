"""Random numbers that a step draws from generators of Python and NumPy.

Those of a first capture are inputs of a second one. Before each step the same calls draw them anew,
so that a program decides by them, and computes with them, as the step would.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallax.errors import UnsupportedError
from parallax.graph.common.replaced import replaced
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.values import reached_values

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_MODULES = {"Python's random module": random, "NumPy's random module": np.random}
_NO_DRAWS = {"seed", "getstate", "setstate", "get_state", "set_state", "default_rng"}


@dataclass(frozen=True, eq=False)
class Draw:
    """A random number that the step draws from Python's or NumPy's generators.

    Args:
        name: of the graph's input that it is.
        generator: whose number it is.
        value: what it was when the step was captured.
        function: draws it.
    """

    name: str
    generator: Any
    value: float | int
    function: Callable[[], Any]

    def __call__(self) -> float | int:
        return type(self.value)(self.function())


def drawn(draws: Sequence[Draw]) -> tuple[list[float | int], Callable[[], None]]:
    """The next numbers, and what puts the generators back."""
    states = {id(one.generator): (one.generator, _state(one.generator)) for one in draws}

    def put_back() -> None:
        for generator, state in states.values():
            _put_state(generator, state)

    return [draw() for draw in draws], put_back


class Streams:
    """Where steps draw from: the script's generators, or, of several workers, common ones.

    Workers read other data, for which they may draw from the modules' generators; a step that draws
    a number for its whole batch must draw the same one on all.
    """

    def __init__(self) -> None:
        self._common: dict[int, Any] = {}

    def of(self, module: Any) -> Any:
        """What has the functions of a module."""
        return self._common.get(id(module), module)

    def states(self, objects: StepObjects) -> list[Any]:
        """Of the modules' generators, and of those that the step reaches."""
        return [_state(one) for one in (*_MODULES.values(), *_own_generators(objects).values())]

    def share(self, objects: StepObjects, states: Sequence[Any]) -> None:
        """Go on from another worker's states."""
        self._common = {id(random): random.Random(), id(np.random): np.random.RandomState()}
        own = [*self._common.values(), *_own_generators(objects).values()]
        for generator, state in zip(own, states, strict=False):
            _put_state(generator, state)


def _own_generators(objects: StepObjects) -> dict[str, Any]:
    return {repr(n): v for n, v, _ in reached_values(objects) if isinstance(v, _GENERATORS)}


class Draws:
    """What a step draws while it is captured.

    Args:
        objects: what the step reaches.
        streams: where it draws from.
        known: the numbers that are inputs of the graph, in the order in which they are drawn.
    """

    def __init__(self, objects: StepObjects, streams: Streams, known: Sequence[Draw]) -> None:
        self.found: list[Draw] = []
        self.told: list[str] = []
        """The generators whose numbers are no inputs of the graph."""
        self._objects, self._known = objects, known
        self._symbols: Sequence[Any] = ()
        self._thread = threading.get_ident()
        self._streams = streams
        modules = {name: streams.of(module) for name, module in _MODULES.items()}
        generators = modules | _own_generators(objects)
        self._before = {name: (one, _state(one)) for name, one in generators.items()}
        self._names = {id(one): name for name, one in generators.items()}
        self._other: set[str] = set()

    @contextlib.contextmanager
    def recorded(self, symbols: Sequence[Any]) -> Iterator[None]:
        """Let the step get these instead of the numbers that are known."""
        self._symbols = symbols
        changes = []
        for module in _MODULES.values():
            generator = self._streams.of(module)
            for name in module.__all__:
                function: Any = getattr(generator, name, None)
                is_draw = callable(function) and not isinstance(function, type)
                if is_draw and name not in _NO_DRAWS:
                    changes.append((module, name, self._recording(generator, function)))
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(*changes))
            for _, value, put in list(reached_values(self._objects)):
                if isinstance(value, _GENERATORS):
                    put(_Recording(value, self._recording))
                    stack.callback(put, value)
            yield

    def _recording(self, generator: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            if threading.get_ident() != self._thread:  # that reads data, say
                return value
            kind = _kind(value)
            if kind is None or not all(map(_is_plain, (*args, *kwargs.values()))):
                self._other.add(self._names[id(generator)])
                return value
            again = functools.partial(function, *args, **kwargs)
            place = len(self.found)
            self.found.append(Draw(f"drawn{place}", generator, kind(value), again))
            if not self._known:
                return kind(value)
            if place >= len(self._known) or self._known[place].value != value:
                raise UnsupportedError("The step draws other numbers when it is captured again.")
            return self._symbols[place]

        return draw

    def put_back(self) -> None:
        """Put generators back, and see which were drawn from."""
        for name, (generator, before) in self._before.items():
            if not _equal(_state(generator), before):
                _put_state(generator, before)
                recorded = any(one.generator is generator for one in self.found)
                if not (recorded and self._known) or name in self._other:
                    self.told.append(name)


class _Recording:
    """Stands for a generator of the step's own."""

    def __init__(self, generator: Any, recording: Callable[..., Any]) -> None:
        self._generator, self._recording = generator, recording

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._generator, name)
        if callable(value) and name not in _NO_DRAWS:
            return self._recording(self._generator, value)
        return value


def _kind(value: Any) -> type | None:
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, float | np.floating):
        return float
    return int if isinstance(value, int | np.integer) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | np.generic)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState) or generator is np.random:
        return generator.get_state(legacy=False)
    return generator.getstate()


def _put_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState) or generator is np.random:
        generator.set_state(state)
    else:
        generator.setstate(state)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_equal(value, other[key]) for key, value in one.items())
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)
