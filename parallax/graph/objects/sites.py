"""Where Python values are that a step reads besides its batch.

Which of them it reads is told by names (``reached``). Beside the objects in which state is looked
for, classes, modules and objects with slots are looked into, since people keep settings there.
"""

from __future__ import annotations

import argparse
import collections
import dis
import enum
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parallax.graph.common.user_code import (
    is_internal,
    is_library_class,
    is_users_class,
    is_users_module,
)
from parallax.graph.objects.discovery import GlobalName, StepObjects
from parallax.graph.objects.holders import slots_of
from parallax.graph.objects.reached import Code, Loads

_DEEPEST, _MOST_KEYS = 4, 1000
"""Of objects in objects, and of the keys of a dict that is read as a whole."""
_GOES_THROUGH = {"items", "values"}
_COUNTS, _RATES = {"last_epoch", "_step_count"}, {"get_last_lr", "_last_lr"}
"""What schedulers of torch change."""
MISSING = object()
"""What is read where there is no such value now."""


@dataclass(frozen=True)
class Site:
    """Where a value is, and how the user would name it."""

    name: str
    source: Source

    @property
    def value(self) -> Any:
        return self.source()

    def put(self, value: Any) -> None:
        self.source.put(value)


def sites(objects: StepObjects, code: Code) -> list[Site]:
    """Where the values are that code reads, each once."""
    loads = code.loads
    found = dict.fromkeys((*_in_objects(objects, loads), *_in_functions(code)))
    if texts := {one.value for one in found if isinstance(one.value, str)} - loads.read:
        # A key that has a name.
        loads.read |= texts
        found = dict.fromkeys((*_in_objects(objects, loads), *_in_functions(code)))
    known = {id(container) for _, container, _ in objects.containers}
    queue = [(site, 0) for site in found]
    while queue:
        site, depth = queue.pop()
        value = site.value
        if id(value) in known or depth == _DEEPEST or not has_settings(value):
            continue
        known.add(id(value))
        inner = dict.fromkeys(_members(site.name, value, loads))
        found |= inner
        queue += [(one, depth + 1) for one in inner]
    return list(_told_apart(found))


def _told_apart(found: Iterable[Site]) -> Iterator[Site]:
    """Sites of which those that have one name, and are not one place, have another one."""
    places: dict[str, set[Hashable]] = collections.defaultdict(set)
    for site in found:
        place, known = site.source.place, places[site.name]
        if place not in known:
            known.add(place)
            count = len(known)
            yield site if count == 1 else Site(f"{site.name} ({count})", site.source)


def _is_log(name: str, value: Any, loads: Loads) -> bool:
    """Whether a list is only appended to, so that nothing depends on what is in it."""
    return isinstance(value, list | collections.deque) and name in loads.logged


def _in_functions(code: Code) -> Iterator[Site]:
    """Globals and closure cells of methods, which discovery does not go through."""
    for function in code.functions:
        for name in _globals_of(function.__code__):
            value = function.__globals__.get(name, MISSING)
            if value is not MISSING and not _is_log(name, value, code.loads):
                yield Site(name, ItemSource(function.__globals__, name))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        sites = (Site(name, CellSource(cell)) for name, cell in cells)
        yield from (one for one in sites if not _is_log(one.name, one.value, code.loads))


def _globals_of(code: types.CodeType) -> set[str]:
    found = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _globals_of(constant)
    return found


def _in_objects(objects: StepObjects, loads: Loads) -> Iterator[Site]:
    names = loads.read
    for name, container, _ in objects.containers:
        is_name = isinstance(container, GlobalName | types.CellType)
        if is_name and _is_log(name, content_of(container), loads):
            continue
        if isinstance(container, types.CellType):
            yield Site(name, CellSource(container))
        elif isinstance(container, GlobalName):
            yield Site(name, ItemSource(container.home, container.name))
        else:
            yield from _members(name, container, loads)
    for name, optimizer in objects.optimizers.items():
        if not is_library_class(type(optimizer)):
            own = names - vars(Optimizer).keys()
            yield from _attributes(name, optimizer, {n for n in own if not n.startswith("_")})
    for name, scheduler in objects.schedulers.items():
        own = names & _COUNTS
        if not is_library_class(type(scheduler)):
            own |= {n for n in names if not n.startswith("_")}
        yield from _attributes(name, scheduler, own)
        if names & _RATES:
            rates = AttributeSource(scheduler, "_last_lr")
            count = len(rates() if isinstance(rates(), list) else ())
            yield from (Site(f"{name}.get_last_lr()[{i}]", _Part(rates, i)) for i in range(count))
    for root, model in objects.models.items():
        for path, module in model.named_modules():
            yield from _settings_of(f"{root}.{path}" if path else root, module, names)


def content_of(container: GlobalName | types.CellType) -> Any:
    """What a name is bound to; ``MISSING`` if to nothing now."""
    if isinstance(container, types.CellType):
        return CellSource(container)()
    return container.home.get(container.name, MISSING)


def _settings_of(name: str, module: torch.nn.Module, names: set[str]) -> Iterator[Site]:
    known = names - {"training"}
    if is_library_class(type(module)):  # its own code is not read; rates and thresholds
        known = {key for key, value in vars(module).items() if isinstance(value, float)}
    yield from _attributes(name, module, known)


def has_settings(value: Any) -> bool:
    """Whether a value is looked into that is none of the objects in which state is looked for."""
    if isinstance(value, type):
        return is_users_class(value)
    if isinstance(value, types.ModuleType):
        file = getattr(value, "__file__", None)
        return is_users_module(value) and not is_internal(file or "")
    if isinstance(value, Mapping | types.SimpleNamespace | argparse.Namespace):
        return True
    if isinstance(value, torch.nn.Module):  # a criterion
        return not any(True for _ in (*value.parameters(), *value.buffers()))
    is_told = isinstance(value, Optimizer | LRScheduler | torch.Tensor | enum.Enum)
    return not is_told and is_users_class(type(value))


def _members(name: str, container: Any, loads: Loads) -> Iterator[Site]:
    names = loads.read
    if isinstance(container, Mapping):
        last = name.rpartition(".")[2]
        few = len(container) <= _MOST_KEYS  # more are a vocabulary
        whole = few and (last in loads.passed or (names & _GOES_THROUGH and last in names))
        # Which keys are read that are no texts is not told by names.
        others = whole or (few and last in names)
        keys = [
            key for key in container if (key in names if isinstance(key, str) else others) or whole
        ]
        yield from (Site(f"{name}[{key!r}]", ItemSource(container, key)) for key in keys)
    elif isinstance(container, type):
        for key in sorted(names & {key for kind in container.__mro__ for key in vars(kind)}):
            if not _is_code(value := getattr(container, key, None)) or isinstance(value, type):
                yield Site(f"{name}.{key}", AttributeSource(container, key))
    elif isinstance(container, torch.nn.Module):
        yield from _settings_of(name, container, names)
    elif hasattr(container, "__dict__") or slots_of(type(container)):
        yield from _attributes(name, container, names)


def _attributes(name: str, owner: Any, names: set[str]) -> Iterator[Site]:
    """Plain attributes, of an object or of its class."""
    own = {*getattr(owner, "__dict__", ()), *slots_of(type(owner))}
    of_class = {key for kind in type(owner).__mro__ for key in vars(kind)} - own
    for key in sorted(names & {*own, *of_class}):
        if key in own or _is_plain(getattr(type(owner), key, None)):
            yield Site(f"{name}.{key}", AttributeSource(owner, key))


def _is_code(value: Any) -> bool:
    return callable(value) or hasattr(value, "__get__")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)


class Source(Protocol):
    """Reads a value when called, and writes one without the ways of the user's class."""

    @property
    def writable(self) -> bool: ...
    @property
    def home(self) -> Any: ...
    @property
    def place(self) -> Hashable:
        """Which place it is."""

    def __call__(self) -> Any: ...
    def put(self, value: Any) -> None: ...


@dataclass(frozen=True, eq=False)
class CellSource:
    home: types.CellType
    writable: bool = True

    @property
    def place(self) -> Hashable:
        return id(self.home)

    def __call__(self) -> Any:
        try:
            return self.home.cell_contents
        except ValueError:
            return MISSING

    def put(self, value: Any) -> None:
        self.home.cell_contents = value


@dataclass(frozen=True, eq=False)
class ItemSource:
    home: Mapping[Any, Any]
    key: Any

    @property
    def place(self) -> Hashable:
        return id(self.home), self.key

    @property
    def writable(self) -> bool:
        return isinstance(self.home, dict)

    def __call__(self) -> Any:
        return self.home.get(self.key, MISSING)

    def put(self, value: Any) -> None:
        self.home[self.key] = value  # type: ignore[index]


@dataclass(frozen=True, eq=False)
class _Part:
    """An item of a list that is somewhere."""

    of: Source
    index: int

    @property
    def place(self) -> Hashable:
        return self.of.place, self.index

    @property
    def home(self) -> Any:
        return self.of.home

    @property
    def writable(self) -> bool:
        return isinstance(self.of(), list)

    def __call__(self) -> Any:
        items = self.of()
        is_there = isinstance(items, list) and self.index < len(items)
        return items[self.index] if is_there else MISSING

    def put(self, value: Any) -> None:
        self.of()[self.index] = value


@dataclass(frozen=True, eq=False)
class AttributeSource:
    home: Any
    key: str

    @property
    def place(self) -> Hashable:
        return id(self.home), self.key

    @property
    def writable(self) -> bool:
        """A plain attribute of its own, neither of its class nor computed."""
        own = getattr(self.home, "__dict__", None)
        of_class = getattr(type(self.home), self.key, None)
        return isinstance(own, dict) and self.key in own and not hasattr(of_class, "__get__")

    def __call__(self) -> Any:
        return getattr(self.home, self.key, MISSING)

    def put(self, value: Any) -> None:
        vars(self.home)[self.key] = value


@dataclass(frozen=True, eq=False)
class KindSource:
    """Of which type something is that the step makes anew."""

    of: Source
    writable: bool = False

    @property
    def place(self) -> Hashable:
        return self.of.place, type

    @property
    def home(self) -> Any:
        return self.of.home

    def __call__(self) -> Any:
        value = self.of()
        return value if value is MISSING else type(value)

    def put(self, value: Any) -> None:
        raise TypeError("a type is read alone")
