"""Where a piece of state is: a way from what the step has a name for, key by key.

The way is gone anew each time, so that a container may be replaced between two steps; a tuple is
made anew where an item of it changes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from parallax.graph.objects.holders import Attributes, Binding

Key = tuple[str | int, ...]
Access = tuple[Callable[[], Any], Callable[[Any], None]]
"""How something is read from, and put to, its place in the user's objects."""


def access(holder: Any, path: Key) -> Access:
    """Access to what is at the end of a way that begins in ``holder``."""

    def put(value: Any) -> None:
        put_at(holder, path, value)

    if len(path) == 1 and isinstance(holder, dict):
        head = path[0]
        return lambda: holder[head], put
    return lambda: get_at(holder, path), put


def get_at(holder: Any, path: Key) -> Any:
    """What is there.

    Raises:
        LookupError, AttributeError, TypeError: the way leads nowhere now.
    """
    value = top(holder)
    for key in path:
        value = child(value, key)
    return value


def put_at(holder: Any, path: Key, value: Any) -> None:
    """Put something there; a mapping at the end but one may be missing so far."""
    if isinstance(holder, Binding):
        old = holder.current()
        new = _with(old, path, value)
        if new is not old:
            holder.rebind(new)
    else:
        _with(top(holder), path, value)


def top(holder: Any) -> Any:
    """What a way begins at."""
    if isinstance(holder, Binding):
        return holder.current()
    return holder.owner if isinstance(holder, Attributes) else holder


def child(container: Any, key: str | int) -> Any:
    """An item of a container, or an attribute of an object."""
    if isinstance(container, MutableMapping | list | tuple | collections.deque):
        return container[key]  # type: ignore[index]
    return getattr(container, str(key))


def dotted(root: str, path: Key) -> str:
    """The name of what is at the end of a way."""
    return ".".join([root, *map(str, path)])


def tuple_like(value: tuple[Any, ...], items: Sequence[Any]) -> Any:
    """A tuple of the same kind with other items."""
    return type(value)(items) if type(value) is tuple else type(value)(*items)


def _with(container: Any, path: Key, value: Any) -> Any:
    """The container with a value at the end of a way; a tuple becomes another one."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(container, tuple):
        items = list(container)
        items[int(head)] = _with(items[int(head)], rest, value)
        return tuple_like(container, items)
    if rest:
        if isinstance(container, MutableMapping) and head not in container:
            container[head] = {}
        inner = child(container, head)
        value = _with(inner, rest, value)
        if value is inner:
            return container
    if isinstance(container, MutableMapping | list | collections.deque):
        container[head] = value  # type: ignore[index]
    else:
        setattr(container, str(head), value)
    return container
