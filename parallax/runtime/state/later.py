"""State that steps make later: hidden states that begin as None, moving averages in a new dict.

It is saved container by container, so that a run that has not made it yet can take it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from parallax.graph.objects.discovery import Root, StepObjects
from parallax.graph.objects.holders import is_container
from parallax.graph.objects.paths import Key, dotted, get_at, put_at, top, tuple_like
from parallax.runtime.state.state_table import StateTable

_CONTAINERS = (dict, list, tuple)
_PLAIN = (str, int, float, bool, bytes, type(None))


def saved_later(state: StateTable) -> dict[str, Any]:
    """What steps have made and read, by name: tensors, and plain containers of them."""
    return {name: value for name, (value, _) in _later(state).items() if _is_plain(value)}


def needed_later(state: StateTable) -> set[str]:
    """Those that a step is known to read."""
    return {name for name, (_, is_read) in _later(state).items() if is_read}


def _later(state: StateTable) -> dict[str, tuple[Any, bool]]:
    """By name, what is there, and whether a step reads it."""
    found: dict[str, tuple[Any, bool]] = {}
    later = [leaf for leaf in state.leaves.values() if state.is_later(leaf)]
    others = [leaf for leaf in state.leaves.values() if not state.is_later(leaf)]
    first = {(leaf.root, leaf.key[:1]) for leaf in others}
    for leaf in later:
        if state.is_state(leaf) is False:
            continue
        shared = (leaf.root, leaf.key[:1]) in first
        path = leaf.key if shared else _saved_path(state.objects.holders[leaf.root], leaf.key)
        name = dotted(leaf.root, path)
        was_read = name in found and found[name][1]
        value = get_at(state.objects.holders[leaf.root], path)
        found[name] = value, was_read or state.is_read(leaf)
    return found


def _saved_path(holder: Any, key: Key) -> Key:
    """The way to the outermost container of a tensor that can be saved as a whole: not to an object
    of the user's, which has it."""
    lengths = range(1, len(key))
    return next((key[:n] for n in lengths if _is_plain(get_at(holder, key[:n]))), key)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (torch.Tensor, *_PLAIN))


class GivenLater:
    """What a saved state has besides models, optimizers and the tensors that were there at first.

    Args:
        given: such entries, by name.
        known: the names of leaves that values are copied to.
    """

    def __init__(self, objects: StepObjects, given: Mapping[Any, Any], known: set[str]) -> None:
        self.flat: dict[str, Any] = {}
        """The entries, or their items, that are known leaves."""
        self.unexpected: list[Any] = []
        self._objects = objects
        self._places: list[tuple[Root, Key, Any]] = []
        for name, value in given.items():
            items = dict(_items(name, value))
            if items and items.keys() <= known:
                self.flat |= items
            elif (
                isinstance(name, str)
                and holds_tensors(value)
                and (place := _place(objects, name)) is not None
            ):
                self._places.append((*place, value))
            else:
                self.unexpected.append(name)

    def take(self) -> None:
        """Put what no leaf is there for."""
        for root, path, value in self._places:
            try:
                there = get_at(root.holder, path)
            except (LookupError, AttributeError):
                there = None
            if not _merged(there, value):
                put_at(root.holder, path, _copied(value))
            self._objects.hold(root)  # it may have held a number until now


def holds_tensors(value: Any) -> bool:
    """Whether something can be what steps made: tensors, or plain containers with some."""
    items = [item for _, item in _items("", value)]
    return _is_plain(value) and any(isinstance(item, torch.Tensor) for item in items)


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _CONTAINERS):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from _items(f"{name}.{key}", item)
    else:
        yield name, value


def _merged(there: Any, value: Any) -> bool:
    """Put the entries of a dict into one that is there; False if it is none."""
    if not isinstance(there, dict) or not isinstance(value, dict):
        return False
    for key, item in value.items():
        if not _merged(there.get(key), item):
            there[key] = _copied(item)
    return True


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_copied(item) for item in value]
        return tuple_like(value, items) if isinstance(value, tuple) else type(value)(items)
    return value


def _place(objects: StepObjects, name: str) -> tuple[Root, Key] | None:
    """Where a step would put what has this name: an attribute or an entry of something that is
    there, or what a name is bound to."""
    roots = [
        *(Root(root, holder) for root, holder in objects.holders.items()),
        *objects.attributes.values(),
        *(one.root for one in objects.containers),
    ]
    for root in roots:
        if name == root.name:
            return root, ()
        begins = name.startswith(f"{root.name}.")
        if begins and (way := _way(top(root.holder), name[len(root.name) + 1 :])):
            return root, way
    return None


def _way(container: Any, name: str) -> Key | None:
    first, _, rest = name.partition(".")
    if rest:
        key, inner = _inner(container, first)
        if is_container(inner) and (way := _way(inner, rest)):
            return (key, *way)
    return (name,) if _has(container, name) else None


def _inner(container: Any, name: str) -> tuple[Any, Any]:
    """What a name is of in a container, and by which key; None if it is of nothing."""
    if isinstance(container, list | tuple):
        place = int(name) if name.isdecimal() else len(container)
        return place, container[place] if place < len(container) else None
    if isinstance(container, dict):
        return name, container.get(name)
    return name, getattr(container, name, None)


def _has(value: Any, key: str) -> bool:
    """Whether a mapping can get an entry, or an object has the attribute or may get it."""
    if isinstance(value, dict):
        return True
    return hasattr(value, "__dict__") and "." not in key and key.isidentifier()
