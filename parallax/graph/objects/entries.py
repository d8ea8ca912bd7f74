"""Entries of optimizers' state and groups that are more than tensors and numbers.

None, texts, flags, and what lists, tuples, dicts and deques of tensors look like. What a step makes
of these while it is captured is put there again when its graph has run.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.paths import Key, dotted, tuple_like
from parallax.graph.objects.state import is_number, named, parameter_names

READ = (bool, str, int, type(None))
"""Of the values of an optimizer's groups, those that calls are told apart by."""
_HOLE = object()
"""Stands for a tensor or a number, which is a leaf of its own."""


class Entry(NamedTuple):
    """One entry, as ``form``: itself, with holes in it. ``home`` is the mapping that it is in now,
    that of a parameter's state, of an optimizer's or of a group."""

    home: Callable[[], dict[Any, Any]]
    key: Any
    form: Any
    is_read: bool = False
    """Calls are told apart by it anyway."""

    def put(self, form: Any) -> None:
        """Put it there again; leaves that are there already stay."""
        home = self.home()
        home[self.key] = _filled(form, home.get(self.key))

    def told(self) -> Hashable:
        """What it is now, but for leaves: steps may decide by it."""
        return _told(self.home().get(self.key))


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
        for index, group in enumerate(optimizer.param_groups):
            home = functools.partial(_group, optimizer, index)
            for key, value in group.items():
                if key != "params":
                    name = dotted(f"{root}.group{index}", (key,))
                    counts = functools.partial(_counts, objects, name, names)
                    yield name, Entry(home, key, _form(value, counts), isinstance(value, READ))
        kept: dict[Any, Any] = {**optimizer.state}
        for key, value in kept.items():
            if not isinstance(key, torch.Tensor):
                entry = Entry(functools.partial(_state, optimizer), key, _form(value))
                yield dotted(f"{root}.state", (key,)), entry
                continue
            if not isinstance(value, dict) or id(key) not in names:
                continue
            home = functools.partial(_state_of, optimizer, key)
            for inner, item in value.items():
                name = dotted(f"{root}.{names[id(key)]}", (inner,))
                yield name, Entry(home, inner, _form(item))


def _counts(objects: StepObjects, name: str, names: dict[int, str], path: Key) -> bool:
    """Whether a whole number in a group is one that the step counts on."""
    return bool(objects.counters) and dotted(name, named(path, names)) in objects.counters


def _group(optimizer: Optimizer, index: int) -> dict[Any, Any]:
    return optimizer.param_groups[index]


def _state(optimizer: Optimizer) -> dict[Any, Any]:
    return optimizer.state


def _state_of(optimizer: Optimizer, parameter: torch.Tensor) -> dict[Any, Any]:
    kept: dict[Any, Any] = optimizer.state[parameter]
    return kept


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


def _form(value: Any, is_leaf: Callable[[Key], bool] = lambda _: True, path: Key = ()) -> Any:
    """A value with holes in it.

    Args:
        is_leaf: whether a whole number is a leaf, by where it is.
        path: where ``value`` is.
    """
    if isinstance(value, torch.Tensor) or is_number(value):
        return value if type(value) is int and not is_leaf(path) else _HOLE
    if isinstance(value, torch.SymBool):
        return bool(value)  # which the graph is for
    return _rebuilt(value, lambda key, item: _form(item, is_leaf, (*path, key)))


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
    return isinstance(left, str | bytes | int) and bool(left == right)
