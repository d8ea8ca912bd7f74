"""What gives another value each time it is asked: data that a step would take by itself.

A captured step's Python runs once, so an iterator's next batch would be that of all steps. It is
refused where it is asked for, before it gives anything. Random numbers of Python and NumPy would be
the same in all steps, too; that is noted, and their generators are put back.
"""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader

from parallax.errors import UnsupportedError
from parallax.graph.discovery import GlobalName, StepObjects
from parallax.graph.holders import is_users_class
from parallax.graph.replaced import replaced
from parallax.graph.user_code import user_line

_MOST_ITEMS = 1000
"""Of a list or a dict that is looked into."""


def refused(name: str, value: Any) -> NoReturn:
    """Say that the step takes the next of something's values."""
    raise UnsupportedError(
        f"The step takes a value from {name!r} ({type(value).__name__}): that would happen at "
        "capture only, and all steps would get the same one.",
        hint="take it outside of the step, and pass it: runner.run(next(batches)), or "
        "for batch in loader: runner.run(batch).",
        where=user_line(),
    )


class _Untouched:
    """Stands for an iterator while the step is captured: whatever it has, but no next value."""

    def __init__(self, name: str, value: Iterator[Any]) -> None:
        self._name, self._value = name, value

    def __iter__(self) -> _Untouched:
        return self

    def __next__(self) -> NoReturn:
        refused(self._name, self._value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)


@contextlib.contextmanager
def untouched_iterators(objects: StepObjects) -> Iterator[None]:
    """Refuse to go on with iterators that were there before the step, and to begin with loaders.

    An iterator of the user's own class is gone through: what it does is Python like any other.
    """
    found = [place for place in _places(objects) if _gives_values(place[1])]
    stand_ins = {id(value): _Untouched(name, value) for name, value, _ in reversed(found)}
    with contextlib.ExitStack() as stack:
        for _, value, put in found:
            put(stand_ins[id(value)])
            stack.callback(put, value)
        stack.enter_context(_no_epochs())
        yield


def _no_epochs() -> contextlib.AbstractContextManager[None]:
    def begin(self: DataLoader[Any]) -> NoReturn:
        refused("iter(loader)", self)

    return replaced((DataLoader, "__iter__", begin))


class Generators:
    """Generators of random numbers that are not PyTorch's, as they were before the step."""

    def __init__(self, objects: StepObjects) -> None:
        found = {"Python's random module": random, "NumPy's random module": np.random}
        reached = {repr(n): v for n, v, _ in _places(objects) if isinstance(v, _GENERATORS)}
        self._found = {name: (one, _state(one)) for name, one in (found | reached).items()}

    def put_back(self) -> list[str]:
        """The names of those that have been drawn from since."""
        drawn = [n for n, (one, before) in self._found.items() if not _equal(_state(one), before)]
        for name in drawn:
            _put_state(*self._found[name])
        return drawn


_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


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


Put = Callable[[Any], None]


def _places(objects: StepObjects) -> Iterator[tuple[str, Any, Put]]:
    """What the step reaches besides tensors: its name, the value, and what puts another there."""
    for name, container, _ in objects.containers:
        if isinstance(container, types.CellType):
            with contextlib.suppress(ValueError):
                yield name, container.cell_contents, _cell_putter(container)
        elif isinstance(container, GlobalName):
            value = container.home.get(container.name)
            yield name, value, _item_putter(container.home, container.name)
        else:
            yield from _in_items(name, container)
    for name, model in objects.models.items():
        for path, module in model.named_modules():
            yield from _in_items(f"{name}.{path}" if path else name, module)


def _in_items(name: str, container: Any) -> Iterator[tuple[str, Any, Put]]:
    is_plain = isinstance(container, dict | list)
    items = container if is_plain else getattr(container, "__dict__", ())
    if len(items) > _MOST_ITEMS:
        return
    for key, value in items.items() if isinstance(items, dict) else enumerate(items):
        yield f"{name}[{key!r}]" if is_plain else f"{name}.{key}", value, _item_putter(items, key)


def _gives_values(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(kind, "__next__")
        and not isinstance(value, torch.Tensor | torch.nn.Module | type)
        and not is_users_class(kind)
    )


def _cell_putter(cell: types.CellType) -> Put:
    def put(value: Any) -> None:
        cell.cell_contents = value

    return put


def _item_putter(items: Any, key: Any) -> Put:
    def put(value: Any) -> None:
        items[key] = value

    return put
