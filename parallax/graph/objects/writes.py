"""Python values that a step sets besides its tensors: flags, texts, numbers of its results, and new
containers of them (``self.metrics = {"loss": loss.item()}``). They are set after each step, too.

What it sets follows from what its graph is valid for, or is an output of the graph.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallax.graph.common.interface import Written
from parallax.graph.objects.discovery import GlobalName, StepObjects
from parallax.graph.objects.holders import is_container, is_user_object, members
from parallax.graph.objects.made import Hole, Made, Skeleton, is_symbol
from parallax.graph.objects.outside import PLAIN
from parallax.graph.objects.paths import child
from parallax.graph.objects.reached import reached_code
from parallax.graph.objects.sites import MISSING, CellSource, ItemSource, KindSource, Site
from parallax.graph.objects.snapshot import APPENDED, Change, Place, Snapshot

_MOST_ITEMS = 1000
"""Of a list or a dict, in which containers are looked for."""


@dataclass(frozen=True, eq=False)
class _Entry:
    """An entry of a container, or an attribute of an object, which the script may exchange."""

    container: Callable[[], Any]
    key: Any
    writable: bool = True

    @property
    def home(self) -> Any:
        return self.container()

    @property
    def place(self) -> Hashable:
        return id(self.container()), self.key

    def __call__(self) -> Any:
        return _contents(self.container()).get(self.key, MISSING)

    def put(self, value: Any) -> None:
        _contents(self.container())[self.key] = value

    def remove(self) -> None:
        _contents(self.container()).pop(self.key, None)


def _contents(container: Any) -> dict[Any, Any]:
    return container if isinstance(container, dict) else vars(container)


class _Ways:
    """How containers are found again, from the names of the step, since a script may exchange them
    (``self.losses = []`` in each epoch)."""

    def __init__(self, objects: StepObjects) -> None:
        self._found: dict[int, Callable[[], Any]] = {}
        for _, container, _ in objects.containers:
            if isinstance(container, types.CellType):
                self._add(CellSource(container)(), CellSource(container))
            elif isinstance(container, GlobalName):
                source = ItemSource(container.home, container.name)
                self._add(source(), source)
            else:
                self._add_inside(container)
        for model in objects.models.values():
            for module in model.modules():
                self._add_inside(module)
        for optimizer in objects.optimizers.values():
            self._add_inside(optimizer)

    def to(self, container: Any) -> Callable[[], Any]:
        """What gives the container that is now where this one was."""
        return self._found.get(id(container), lambda: container)

    def _add_inside(self, container: Any) -> None:
        items = list(members(container))
        if len(items) <= _MOST_ITEMS:
            own = self.to(container)
            for key, value in items:
                self._add(value, functools.partial(_inside, own, key))

    def _add(self, value: Any, way: Callable[[], Any]) -> None:
        if isinstance(value, dict | list | collections.deque) or is_user_object(value):
            self._found.setdefault(id(value), way)


def _inside(container: Callable[[], Any], key: Any) -> Any:
    return child(container(), key)


_Source = CellSource | ItemSource | _Entry


@dataclass(frozen=True)
class Write:
    """A place that the step sets, and what to.

    Args:
        put: sets it.
        numbers: the symbols of the step that it needs, and tensors that are appended, by name.
        place: whose value is to be read before each step, since it tells whether the step changes
            it; None where every step does.
        key: the place, as snapshots know it.
    """

    put: Written
    numbers: Mapping[str, Any]
    place: Site | None
    key: Place


def writes(objects: StepObjects, snapshot: Snapshot, made: Made) -> Iterator[Write]:
    """What the step has set, but for state and what cannot be set again: objects, items of sets.

    Args:
        objects: what the step reaches.
        snapshot: what was there before the step.
        made: what is known of the tensors that it has put somewhere.
    """
    changes = list(snapshot.changes(made.kept))
    if not changes:
        return
    ways, logged = _Ways(objects), reached_code(objects).loads.logged
    for change in changes:
        found: Write | None = None
        if change.key is APPENDED:
            if change.name.rpartition(".")[2] in logged:
                found = _append(change, ways, snapshot, made)
        elif (source := _source(change, ways)) is not None:
            found = _write(change, source, snapshot)
        if found is not None:
            yield found


def _append(change: Change, ways: _Ways, snapshot: Snapshot, made: Made) -> Write | None:
    """Append to a list that the step does not read: no graph depends on what is in it."""
    if (anew := _anew(change, snapshot, made.is_new)) is None:
        return None
    skeleton, values = anew
    way = ways.to(change.container)
    return Write(lambda found: way().extend(skeleton.filled(found)), values, None, change.place)


def _source(change: Change, ways: _Ways) -> _Source | None:
    container, key = change.container, change.key
    if isinstance(container, types.CellType):
        return CellSource(container) if change.value is not MISSING else None
    if isinstance(container, GlobalName):
        return ItemSource(container.home, container.name)
    return None if key is None else _Entry(ways.to(container), key)


def _write(change: Change, source: _Source, snapshot: Snapshot) -> Write | None:
    value, place = change.value, Site(change.item, source)
    if value is MISSING:
        if not isinstance(source, _Entry):
            return None
        return Write(lambda _: source.remove(), {}, place, change.place)
    if is_symbol(value):
        return Write(
            lambda found: source.put(found[change.item]), {change.item: value}, None, change.place
        )
    if value is None or isinstance(value, PLAIN):
        is_mode = isinstance(change.container, torch.nn.Module) and change.key == "training"
        # Whether modules train is read before each step anyway.
        return Write(lambda _: source.put(value), {}, None if is_mode else place, change.place)
    if not is_container(value) or snapshot.held(value):
        return None
    if (anew := _anew(change, snapshot, lambda tensor: False)) is None:
        return None
    skeleton, values = anew
    kind = Site(f"type of {change.item}", KindSource(source))
    return Write(lambda found: source.put(skeleton.filled(found)), values, kind, change.place)


def _anew(
    change: Change, snapshot: Snapshot, may_have: Callable[[torch.Tensor], bool]
) -> tuple[Skeleton, dict[str, Any]] | None:
    """How to make a container anew, and what of the step that needs, by name; None if it has
    tensors that it may not have."""
    values: dict[str, Any] = {}

    def hole(item: Any) -> Hole | None:
        if isinstance(item, torch.Tensor):
            if not may_have(item):
                return None
            item = item.detach()
        name = f"{change.item}: {len(values)}"
        values[name] = item
        return Hole(name)

    skeleton = Skeleton(change.value, hole, snapshot.held)
    return None if skeleton.is_fixed else (skeleton, values)
