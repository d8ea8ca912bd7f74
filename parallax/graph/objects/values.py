"""Every Python value that a step reaches besides tensors, and what puts another in its place."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from parallax.graph.objects.discovery import GlobalName, StepObjects

_MOST_ITEMS = 1000
"""Of a list or a dict that is looked into."""
Put = Callable[[Any], None]


def reached_values(objects: StepObjects) -> Iterator[tuple[str, Any, Put]]:
    """By name, the value, and what puts another there."""
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


def _cell_putter(cell: types.CellType) -> Put:
    def put(value: Any) -> None:
        cell.cell_contents = value

    return put


def _item_putter(items: Any, key: Any) -> Put:
    def put(value: Any) -> None:
        items[key] = value

    return put
