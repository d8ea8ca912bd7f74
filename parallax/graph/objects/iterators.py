"""Iterators and loaders of outside: data that a step would take by itself.

A captured step's Python runs once, so the next batch would be that of all steps. It is refused
where it is asked for, before anything is taken.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from parallax.errors import UnsupportedError
from parallax.graph.common.replaced import replaced
from parallax.graph.common.user_code import is_users_class, user_line
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.values import reached_values


def _refuse(name: str, value: Any) -> NoReturn:
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
        self._thread = threading.get_ident()

    def __iter__(self) -> _Untouched:
        return self

    def __next__(self) -> Any:
        if threading.get_ident() != self._thread:  # that reads batches ahead, say
            return next(self._value)
        _refuse(self._name, self._value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)


@contextlib.contextmanager
def untouched_iterators(objects: StepObjects) -> Iterator[None]:
    """Refuse to go on with iterators that were there before the step, and to begin with loaders.

    An iterator of the user's own class is gone through: what it does is Python like any other.
    """
    found = [place for place in reached_values(objects) if _gives_values(place[1])]
    stand_ins = {id(value): _Untouched(name, value) for name, value, _ in reversed(found)}
    with contextlib.ExitStack() as stack:
        for _, value, put in found:
            put(stand_ins[id(value)])
            stack.callback(put, value)
        stack.enter_context(_no_epochs())
        yield


def _no_epochs() -> contextlib.AbstractContextManager[None]:
    original, thread = DataLoader.__iter__, threading.get_ident()

    def begin(self: DataLoader[Any]) -> Any:
        if threading.get_ident() != thread:
            return original(self)
        _refuse("iter(loader)", self)

    return replaced((DataLoader, "__iter__", begin))


def _gives_values(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(kind, "__next__")
        and not isinstance(value, torch.Tensor | torch.nn.Module | type)
        and not is_users_class(kind)
    )
