"""Entries of optimizers' state that are more than tensors and numbers.

None, texts, flags, and what lists, tuples, dicts and deques of tensors look like. What a step makes
of these while it is captured is put there again when its graph has run.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from parallax.graph.discovery import StepObjects
from parallax.graph.paths import dotted, tuple_like
from parallax.graph.state import is_number, parameter_names

_HOLE = object()
"""Stands for a tensor or a number, which is a leaf of its own."""


class Entry(NamedTuple):
    """One entry, as ``form``: itself, with holes in it. ``parameter`` is that of whose state it is,
    if of one."""

    optimizer: Optimizer
    parameter: torch.Tensor | None
    key: Any
    form: Any

    def put(self, form: Any) -> None:
        """Put it there again; leaves that are there already stay."""
        kept: dict[Any, Any] = self.optimizer.state
        home = kept if self.parameter is None else kept[self.parameter]
        home[self.key] = _filled(form, home.get(self.key))

    def told(self) -> Hashable:
        """What it is now, but for leaves: steps may decide by it."""
        kept: dict[Any, Any] = self.optimizer.state
        home = kept if self.parameter is None else kept.get(self.parameter, {})
        return _told(home.get(self.key))


def entries(objects: StepObjects) -> dict[str, Entry]:
    """All entries by name."""
    return dict(_entries(objects))


def is_new(entry: Entry, before: Mapping[str, Entry], name: str) -> bool:
    """Whether it must be put there before its leaves are."""
    if entry.form is _HOLE:
        return False
    old = before.get(name)
    return old is None or not _same(entry.form, old.form)


def is_plain(form: Any) -> bool:
    """Whether it has more in it than leaves and containers of them."""
    if isinstance(form, dict):
        return any(map(is_plain, form.values()))
    if isinstance(form, tuple | list | collections.deque):
        return any(map(is_plain, form))
    return form is not _HOLE


def _entries(objects: StepObjects) -> Iterator[tuple[str, Entry]]:
    names = parameter_names(objects)
    for root, optimizer in objects.optimizers.items():
        kept: dict[Any, Any] = {**optimizer.state}
        for key, value in kept.items():
            if not isinstance(key, torch.Tensor):
                entry = Entry(optimizer, None, key, _form(value))
                yield dotted(f"{root}.state", (key,)), entry
                continue
            if not isinstance(value, dict) or id(key) not in names:
                continue
            for inner, item in value.items():
                name = dotted(f"{root}.{names[id(key)]}", (inner,))
                yield name, Entry(optimizer, key, inner, _form(item))


def _told(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor) or is_number(value):
        return ()
    if isinstance(value, dict):
        return tuple((str(key), _told(item)) for key, item in value.items())
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, tuple | list | collections.deque):
        return tuple(map(_told, value))
    return value if value is None or isinstance(value, str | bytes | bool) else id(value)


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor) or is_number(value):
        return _HOLE
    if isinstance(value, torch.SymBool):
        return bool(value)  # which the graph is for
    return _rebuilt(value, lambda _, item: _form(item))


def _filled(form: Any, present: Any) -> Any:
    if form is _HOLE:
        return present

    def fill(key: Any, item: Any) -> Any:
        try:
            return _filled(item, present[key])
        except (LookupError, TypeError):
            return _filled(item, None)

    return _rebuilt(form, fill)


def _rebuilt(value: Any, inside: Callable[[Any, Any], Any]) -> Any:
    """A container with other items; anything else as it is."""
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, dict):
        made = value.copy()
        made.update({key: inside(key, item) for key, item in value.items()})
        return made
    if isinstance(value, tuple | list | collections.deque):
        items = [inside(index, item) for index, item in enumerate(value)]
        if isinstance(value, collections.deque):
            return collections.deque(items, value.maxlen)
        return tuple_like(value, items) if isinstance(value, tuple) else items
    return value


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list | collections.deque):
        return len(left) == len(right) and all(map(_same, left, right))
    return isinstance(left, str | bytes | bool) and bool(left == right)
