"""What a step can write to from Python, kept while it is captured and put back afterwards."""

from __future__ import annotations

import collections
import linecache
import operator
import re
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from parallax.errors import SourceLine
from parallax.graph.objects.discovery import GlobalName, Root, StepObjects
from parallax.graph.objects.holders import Attributes, Binding, is_container, is_user_object
from parallax.graph.objects.sites import MISSING, content_of
from parallax.graph.objects.state import held_tensors

_MAX_ITEMS, _MOST_APPENDED = 100_000, 64
"""Of a container; of those that a step appends to a deque which is full."""
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
APPENDED = object()
"""Stands for the key of what has been appended to a list."""
Place = tuple[int, Any]
"""A key of a container, or a name of a cell or of globals, by the identity of these."""
_CHANGES = (
    r"\b[^=\n]*(\.(append|appendleft|extend|insert|add|update|pop|popleft|clear|remove|setdefault)"
    r"\(|[-+*/|&@]?=(?!=))"
)


class Change(NamedTuple):
    """What a step has changed from Python, besides tensors: ``item`` names it as the user would,
    ``name`` the container, and ``value`` is there now: of items that were appended, a tuple."""

    item: str
    name: str
    container: Any
    key: Any
    value: Any

    @property
    def place(self) -> Place:
        """As what is kept is told."""
        container = self.container
        return id(container.home if isinstance(container, GlobalName) else container), self.key


class _Named(NamedTuple):
    """A place of plain Python values, with what it contained."""

    name: str
    container: Any
    copy: Any
    root: Root

    def new(self) -> Iterator[Any]:
        """What it contains now that it did not contain then, but for items of a longer list."""
        if isinstance(self.container, GlobalName | types.CellType):
            content = content_of(self.container)
            if content is not self.copy:
                yield content
        elif isinstance(self.copy, dict):
            for key, value in list(_items_of(self.container).items()):
                if value is not self.copy.get(key, MISSING) and key not in _MODULE_PARTS:
                    yield value
        elif isinstance(self.copy, list):
            pairs = zip(self.container, self.copy, strict=False)
            yield from (new for new, old in pairs if new is not old)


class Snapshot:
    """The contents of everything a step can write to from Python, to be put back after capture.

    Capture runs the step's Python once; its appends, counters and assignments must not show.
    """

    def __init__(self, objects: StepObjects) -> None:
        self._objects = objects
        self._saved: list[tuple[Any, Any]] = []
        self._lone: list[tuple[Binding, Any]] = []
        self._names: list[_Named] = []
        self._holders: set[int] = set()
        """Containers whose new tensors are new state."""
        self._seen: set[int] = set()
        self.counted: list[str] = []
        self.counters: list[str] = []
        for model_name, model in objects.models.items():
            for path, module in model.named_modules():
                name = f"{model_name}.{path}" if path else model_name
                self._keep_module(name, module, objects.attributes_of(name, module))
        self._counters = list(_counters(objects))
        for name, optimizer in objects.optimizers.items():
            self._keep_attributes(name, optimizer, objects.attributes_of(name, optimizer))
            self._walk(optimizer.state, 0)
            self._walk(optimizer.param_groups, 0)
        for holder in objects.holders.values():
            if isinstance(holder, Binding):
                content = holder.current()
                self._lone.append((holder, content))
                self._walk(content, 0)
            elif isinstance(holder, Attributes):  # whose owner is kept already
                for _, value in holder.items():
                    self._walk(value, 0)
            else:
                self._walk(holder, 0)
        for scheduler in objects.schedulers.values():
            self._keep(vars(scheduler))
        self._holders.update(self._seen)
        for name, container, root in objects.containers:
            self._keep_named(name, container, root)
        contents = [*(one for pair in self._saved for one in pair), *(n.copy for n in self._names)]
        self._before = {id(one) for one in contents}
        self._before |= {id(item) for one in contents for item in _values(one)}
        self._before |= {id(one.container) for one in self._names}
        self._sizes = {id(one): len(copy) for one, copy in self._saved if isinstance(one, list)}

    def _keep(self, container: Any) -> None:
        if id(container) not in self._seen:
            self._seen.add(id(container))
            self._saved.append((container, container.copy()))

    def _keep_module(self, name: str, module: torch.nn.Module, root: Root) -> None:
        self._keep_attributes(name, module, root)
        for part in _MODULE_PARTS:
            self._keep(vars(module)[part])

    def _keep_attributes(self, name: str, owner: torch.nn.Module | Optimizer, root: Root) -> None:
        attributes = vars(owner)
        self._keep(attributes)
        self._names.append(_Named(name, owner, attributes.copy(), root))
        for key, value in attributes.items():
            is_plain = isinstance(value, dict | list | set | collections.deque)
            if is_plain and not _is_known(owner, key):
                self._keep_named(f"{name}.{key}", value, root)

    def _keep_named(self, name: str, container: Any, root: Root) -> None:
        if isinstance(container, GlobalName | types.CellType):
            self._names.append(_Named(name, container, content_of(container), root))
            return
        items = _items_of(container)
        if items is None or len(items) > _MAX_ITEMS:
            return
        self._names.append(_Named(name, container, items.copy(), root))
        self._keep(items)

    def _walk(self, value: Any, depth: int) -> None:
        if depth > 6 or id(value) in self._seen:
            return
        items: Iterable[Any]
        if isinstance(value, dict | list | collections.deque):
            self._keep(value)
            items = value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            items = value
        elif (
            hasattr(value, "__dict__")
            and not isinstance(value, type | torch.Tensor | torch.nn.Module | Optimizer)
            and (is_user_object(value) or not callable(value))
        ):
            self._keep(vars(value))
            items = vars(value).values()
        else:
            return
        for item in list(items):
            self._walk(item, depth + 1)

    # -- Afterwards -------------------------------------------------------------------------

    def hold_new(self) -> None:
        """Let what the step has put tensors into hold state from now on."""
        for one in self._names:
            if any(_holds(value) for value in one.new()):
                self._objects.hold(one.root)

    def held(self, container: Any) -> bool:
        """Whether a container was there before the step."""
        return id(container) in self._before

    def size(self, container: Any) -> int | None:
        """How many items a list had before the step; None for others, and new ones."""
        return self._sizes.get(id(container))

    def restore(self, kept: Collection[Place]) -> list[str]:
        """Put everything back.

        Args:
            kept: places whose contents are state, accounted for by the graph.

        Returns:
            For each plain Python value that the step changed, its name and the line of the change;
            ``counted`` are those that an optimizer keeps, which its updates follow, and
            ``counters`` those in its groups.
        """
        changed = self._changed(kept)
        before = {name: number for name, _, number in self._counters}
        for name, in_group, number in _counters(self._objects):
            if before.get(name) == number or name in self._objects.counters:
                continue
            if in_group:
                self.counters.append(name)
            else:
                self.counted.append(self._with_line(name, name))
        for container, copy in self._saved:
            _put_back(container, copy)
        for holder, value in self._lone:
            if holder.current() is not value:
                holder.rebind(value)
        for _, container, copy, _ in self._names:
            if isinstance(container, GlobalName):
                if copy is not container.home.get(container.name, MISSING):
                    container.home[container.name] = copy
            elif isinstance(container, types.CellType) and content_of(container) is not copy:
                container.cell_contents = copy
        return changed

    def _changed(self, kept: Collection[Place]) -> list[str]:
        changes = self.changes(kept)
        return list(dict.fromkeys(self._with_line(one.item, one.name) for one in changes))

    def changes(self, kept: Collection[Place]) -> Iterator[Change]:
        """What the step has changed, but for tensors and what is in places that are kept."""
        lone = {holder.name for holder, value in self._lone if isinstance(value, torch.Tensor)}
        for name, container, copy, _ in self._names:
            if isinstance(container, GlobalName | types.CellType):
                change = Change(name, name, container, name, content_of(container))
                if name not in lone and change.place not in kept and change.value is not copy:
                    yield change
                continue
            holder = id(_items_of(container)) in self._holders
            for item, key, value in _differences(name, container, copy, holder, kept):
                yield Change(item, name, container, key, value)

    def _with_line(self, item: str, name: str) -> str:
        where = self._line(item) or self._line(name)
        return f"{item} ({where})" if where is not None else item

    def _line(self, name: str) -> SourceLine | None:
        """The first line of the user's functions that looks like a change of ``name``."""
        pattern = re.compile(r"\b" + re.escape(name.rpartition(".")[2]) + _CHANGES)
        for function in self._objects.functions:
            code = function.__code__
            lines = {line for _, _, line in code.co_lines() if line is not None}
            for number in sorted(lines):
                text = linecache.getline(code.co_filename, number)
                if pattern.search(text):
                    return SourceLine(code.co_filename, number, text.strip())
        return None


def _counters(objects: StepObjects) -> Iterator[tuple[str, bool, int]]:
    """Whole numbers of optimizers, whose name does not say that they are nobody's business, and
    whether they are in a group; those with a point are state."""
    for name, optimizer in objects.optimizers.items():
        homes = [(name, vars(optimizer), False)]
        groups = enumerate(optimizer.param_groups)
        homes += [(f"{name}.group{i}", group, True) for i, group in groups]
        for label, home, in_group in homes:
            for key, value in home.items():
                if type(value) is int and not key.startswith("_"):
                    yield f"{label}.{key}", in_group, value


def _is_known(owner: Any, key: Any) -> bool:
    """Whether an attribute is known for what it is, and so are changes of it."""
    if isinstance(owner, Optimizer):
        return key.startswith("_") or key in ("state", "param_groups", "defaults")
    return isinstance(owner, torch.nn.Module) and key.startswith("_")


def _holds(value: Any) -> bool:
    held = isinstance(value, torch.Tensor) or is_container(value)
    return held and any(True for _ in held_tensors(value))


def _values(content: Any) -> Iterable[Any]:
    if isinstance(content, dict):
        return content.values()
    return content if isinstance(content, list | tuple) else ()


def _items_of(container: Any) -> Any:
    if isinstance(container, dict | list | set | collections.deque):
        return container
    return getattr(container, "__dict__", None)


def _differences(
    name: str, container: Any, copy: Any, holder: bool, kept: Collection[Place]
) -> Iterator[tuple[str, Any, Any]]:
    """What changed in a container, by name, key and present value; of lists and sets as a whole.
    Tensors are state and accounted for by the graph."""
    if isinstance(copy, dict):
        is_dict = isinstance(container, dict)
        now = container if is_dict else vars(container)
        for key in dict.fromkeys([*now, *copy]):
            new, old = now.get(key, MISSING), copy.get(key, MISSING)
            is_state = isinstance(new, torch.Tensor) and (holder or isinstance(old, torch.Tensor))
            if new is old or is_state or _is_known(container, key):
                continue
            if (id(container), key) in kept:
                continue
            if _is_number(old) and type(new) is type(old) and new == old:
                continue
            yield f"{name}[{key!r}]" if is_dict else f"{name}.{key}", key, new
    elif isinstance(copy, set):
        if container != copy:
            yield name, None, container
    elif (items := _appended(container, copy)) is not None:
        if (id(container), APPENDED) not in kept:
            yield name, APPENDED, items
    elif len(container) != len(copy) or any(
        new is not old and not isinstance(new, torch.Tensor) and (id(container), index) not in kept
        for index, (new, old) in enumerate(zip(container, copy, strict=True))
    ):
        yield name, None, container


def _appended(container: Any, copy: Any) -> tuple[Any, ...] | None:
    """What was appended to a list or a deque, which may have lost as many of its first items."""
    now, old = tuple(container), tuple(copy)
    more = len(now) - len(old)
    room = getattr(container, "maxlen", None)
    for count in range(max(more, 1), (_MOST_APPENDED if room == len(now) else more) + 1):
        left = old[count - more :]
        if len(left) + count == len(now) and all(map(operator.is_, now, left)):
            return now[-count:]
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | str)


def _put_back(container: Any, copy: Any) -> None:
    if isinstance(container, dict):
        if container.keys() != copy.keys() or any(container[key] is not copy[key] for key in copy):
            container.clear()
            container.update(copy)
    elif isinstance(container, set):
        container.clear()
        container.update(copy)
    elif isinstance(container, collections.deque):
        container.clear()
        container.extend(copy)
    else:
        container[:] = copy
