"""What a step makes of the tensors that containers, objects and names hold: hidden states, moving
averages, memories.

A container that the step puts there (a tuple of hidden states, a list of memories) is made anew
after each step, like the one that was captured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.holders import Binding, is_container, members
from parallax.graph.objects.paths import Key, child, get_at, put_at, top, tuple_like
from parallax.graph.objects.snapshot import Place, Snapshot
from parallax.graph.objects.state import Leaf, held_tensors

Put = Callable[[Any], None]
Positions = dict[tuple[str, Key], torch.Tensor]


def positions(objects: StepObjects) -> Positions:
    """Every place of a holder that has a tensor: the holder's name, and the way from there."""
    return {
        (root, key): tensor
        for root, holder in objects.holders.items()
        for key, tensor in held_tensors(holder)
    }


class Made:
    """What a step has changed in what holders hold, found while it is captured.

    Args:
        objects: with the holders.
        snapshot: what was there before the step.
        before: the tensors of the holders before it.
        leaves: all leaves before it.
        after: all leaves now.
    """

    def __init__(
        self,
        objects: StepObjects,
        snapshot: Snapshot,
        before: Positions,
        leaves: Mapping[str, Leaf],
        after: Mapping[str, Leaf],
    ) -> None:
        self.puts: dict[str, Put] = {}
        """Where the new values of leaves go, by name."""
        self.kept: set[Place] = set()
        """Places of containers and names whose contents are state."""
        self.numbers: dict[str, Any] = {}
        """By name, numbers of the step that are in containers with tensors."""
        self.number_puts: dict[str, Put] = {}
        """Where they go."""
        self._objects, self._snapshot, self._before = objects, snapshot, before
        self._leaves = leaves
        self._names = {id(leaf.value): leaf.name for leaf in after.values()}
        self._variables = {
            memory
            for leaf in leaves.values()
            if leaf.kind != "tensor" and (memory := _memory(leaf.value)) is not None
        }
        groups: dict[tuple[str, Key], list[Key]] = {}
        for (root, key), tensor in positions(objects).items():
            slot = self._slot(root, key)
            if slot is None:
                continue
            if slot != key:
                groups.setdefault((root, slot), []).append(key)
            elif before.get((root, key)) is tensor:
                self._keep(root, key)
            elif self._is_state(root, key, tensor):
                self._put(self._names[id(tensor)], _putter(objects.holders[root], key))
                self._keep(root, key)
        for (root, slot), keys in groups.items():
            self._make(root, slot, keys)

    def _put(self, name: str, put: Put) -> None:
        known = self.puts.get(name)
        self.puts[name] = put if known is None else _both(known, put)

    def _keep(self, root: str, key: Key) -> None:
        holder = self._objects.holders[root]
        if isinstance(holder, Binding):
            self.kept.add((id(holder.home), holder.name))
        container = top(holder)
        for part in key:
            self.kept.add((id(container), part))
            container = child(container, part)

    def _slot(self, root: str, key: Key) -> Key | None:
        """The way to the outermost container that the step made, or to the tensor; None for what it
        has appended to a list."""
        holder = self._objects.holders[root]
        container = top(holder)
        if isinstance(holder, Binding) and key and not self._snapshot.held(container):
            return ()
        for index, part in enumerate(key):
            size = self._snapshot.size(container)
            if size is not None and isinstance(part, int) and part >= size:
                return None
            inner = child(container, part)
            is_new = is_container(inner) and not self._snapshot.held(inner)
            if is_new and not isinstance(container, tuple):
                return key[: index + 1]
            container = inner
        return key

    def _is_state(self, root: str, key: Key, tensor: torch.Tensor) -> bool:
        """Whether a tensor that the step put there is its own, rather than a part of a model."""
        known = self._leaves.get(self._names[id(tensor)])
        if known is not None and known.value is tensor and known.kind != "tensor":
            return False
        return (root, key) in self._before or _memory(tensor) not in self._variables

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether the step has computed it, in memory that is not a variable's."""
        known = self._leaves.get(self._names.get(id(tensor), ""))
        is_leaf = known is not None and known.value is tensor
        return not is_leaf and _memory(tensor) not in self._variables

    def _make(self, root: str, slot: Key, keys: list[Key]) -> None:
        holder = self._objects.holders[root]
        skeleton = Skeleton(get_at(holder, slot), self._hole, self._snapshot.held)
        if skeleton.is_fixed:
            return
        for key in keys:
            self._keep(root, key)
        if not skeleton.names:  # of parameters alone
            return
        made = _Making(holder, slot, skeleton)
        for name in skeleton.names:
            if name in self.numbers:
                self.number_puts[name] = made.putter(name)
            else:
                self._put(name, made.putter(name))

    def _hole(self, tensor: Any) -> Hole | Same | None:
        """What stands for a tensor or a number of a container: the leaf of its value, a parameter,
        or None if it is neither."""
        if is_symbol(tensor):
            number = f"number {len(self.numbers)}"
            self.numbers[number] = tensor
            return Hole(number)
        name = self._names.get(id(tensor))
        known = self._leaves.get(name) if name is not None else None
        if known is not None and known.value is tensor and known.kind != "tensor":
            return Same(tensor) if known.kind == "parameter" else None
        if name is None or (known is None and _memory(tensor) in self._variables):
            return None
        return Hole(name)


def is_symbol(value: Any) -> bool:
    """Whether a number is only known when the step runs."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


@dataclass(frozen=True)
class Hole:
    """Where the value of a leaf, or a number, goes."""

    name: str


@dataclass(frozen=True, eq=False)
class Same:
    """What every copy has."""

    value: Any


_INSIDE = object()


class Skeleton:
    """A container without the values of tensors and numbers.

    Args:
        container: what the step has made.
        hole: what stands for a tensor or a symbol; None if that cannot be made anew.
        is_old: whether something was there before the step.
    """

    def __init__(
        self,
        container: Any,
        hole: Callable[[Any], Hole | Same | None],
        is_old: Callable[[Any], bool],
    ) -> None:
        self.names: dict[str, None] = {}
        self.is_fixed = False
        """It has what cannot be made anew."""
        self._hole, self._is_old = hole, is_old
        self._form = _copied(container, self._emptied, {})

    def _emptied(self, value: Any) -> Any:
        if is_container(value):
            if isinstance(value, tuple) or not self._is_old(value):
                return _INSIDE
            self.is_fixed |= any(True for _ in held_tensors(value))
            return Same(value)
        if not isinstance(value, torch.Tensor) and not is_symbol(value):
            return Same(value)
        hole = self._hole(value)
        self.is_fixed |= hole is None
        if isinstance(hole, Hole):
            self.names[hole.name] = None
        return hole or Same(None)

    def filled(self, values: Mapping[str, Any]) -> Any:
        """A new container with these values."""

        def fill(item: Any) -> Any:
            if isinstance(item, Hole):
                return values[item.name]
            return item.value if isinstance(item, Same) else _INSIDE

        return _copied(self._form, fill, {})


def _copied(value: Any, replace: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """A copy, container by container, with other items in it; ``replace`` gives what is put instead
    of one, or that its inside is to be copied."""
    if id(value) in memo:
        return memo[id(value)]
    if (other := replace(value)) is not _INSIDE:
        return other
    if isinstance(value, tuple):
        items = [_copied(item, replace, memo) for item in value]
        return tuple_like(value, items)
    made = memo[id(value)] = copy.copy(value)
    for key, item in members(value):
        new = _copied(item, replace, memo)
        if isinstance(made, MutableMapping | list):
            made[key] = new
        else:
            object.__setattr__(made, key, new)
    return made


class _Making:
    """Makes a container when all its values are there."""

    def __init__(self, holder: Any, path: Key, skeleton: Skeleton) -> None:
        self._holder, self._path, self._skeleton = holder, path, skeleton
        self._values: dict[str, Any] = {}

    def putter(self, name: str) -> Put:
        def put(value: Any) -> None:
            self._values[name] = value
            if len(self._values) == len(self._skeleton.names):
                values, self._values = self._values, {}
                put_at(self._holder, self._path, self._skeleton.filled(values))

        return put


def _putter(holder: Any, key: Key) -> Put:
    return lambda value: put_at(holder, key, value)


def _both(one: Put, other: Put) -> Put:
    def put(value: Any) -> None:
        one(value)
        other(value)

    return put


def _memory(value: Any) -> int | None:
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if is_strided else None
