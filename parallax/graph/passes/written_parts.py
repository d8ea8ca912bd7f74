"""Tensors of a step's own that it writes to, as the values that they have one after another.

What a loss is made of is read from the graph, where a tensor that changes is several, and what is
written to a part of it, as in ``out[:, t] = h``, is no input of what reads the whole. Here the
parts are put together where they are read, which costs one copy as writing them did.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from parallax.graph.common.aliases import memory_of
from parallax.graph.common.operations import (
    add_call,
    is_random,
    is_view_of_torch,
    is_write,
    returned_input,
    written_inputs,
)
from parallax.graph.common.sizes import same_shape

aten: Any = torch.ops.aten

_SCATTERED = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
"""By view, what gives the tensor that it is of, with another value there."""
_FILLED = {
    aten.zero.default: aten.zeros_like.default,
    aten.fill.Scalar: aten.full_like.default,
}
_COPIES = {aten.copy.default, aten.fill.Tensor}
_TURNED = {aten.transpose.int, aten.t.default}
"""Views whose inverse is the same."""


class _UnknownError(Exception):
    """A tensor is used in a way that is not followed."""


@dataclass(frozen=True)
class _Part:
    """What a tensor has from one place of a dimension to another.

    Args:
        low, high: the places, the second one excluded.
        value: what has them.
        offset: the first one's place there; None if it has one alone, without the dimension.
    """

    low: int
    high: int
    value: Node
    offset: int | None = 0

    def cut(self, low: int, high: int) -> list[_Part]:
        """What of it lies between two places."""
        low, high = max(low, self.low), min(high, self.high)
        offset = None if self.offset is None else self.offset + low - self.low
        return [_Part(low, high, self.value, offset)] if low < high else []


def as_values(graph: Graph, base: Node, first: Node, changing: Collection[Node]) -> bool:
    """Compute anew what a step changes in place, from one write on.

    Args:
        graph: the step's.
        base: a tensor that the step computes, which is no view.
        first: the write.
        changing: all tensors that the step changes in place.

    Returns:
        Whether this was done; else the graph is as it was.
    """
    aliases = _aliases(base)
    users = {user for alias in (base, *aliases) for user in alias.users}
    later = sorted(one for one in users if not one < first)  # as in the graph
    memory = _Memory(graph, base, aliases, changing)
    try:
        for user in later:
            memory.run(user)
    except _UnknownError:
        memory.forget()
        return False
    memory.keep()
    return True


def functional(node: Node) -> Any:
    """The operation that gives what one in place changes its first argument to; None if there is
    none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("_") or node.args[:1] != (returned_input(node),) or is_random(node):
        return None
    packet: Any = getattr(torch.ops.aten, name[:-1], None)
    names = [] if packet is None else packet.overloads()
    found = [getattr(packet, one) for one in names]
    # Not all have the same name: that of pow_.Scalar is pow.Tensor_Scalar.
    return next((one for one in found if _arguments(one) == _arguments(target)), None)


def _arguments(target: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(one.name, str(one.type)) for one in target._schema.arguments]


def _aliases(base: Node) -> dict[Node, Node]:
    """The views of a tensor, and what operations in place return, each with what it is of."""
    found: dict[Node, Node] = {}
    queue = [base]
    for alias in queue:
        for user in alias.users:
            if user not in found and _is_alias(user, alias):
                found[user] = alias
                queue.append(user)
    return found


def _is_alias(user: Node, alias: Node) -> bool:
    if returned_input(user) is not None:
        return returned_input(user) is alias
    if user.target is operator.getitem:  # of a split
        return True
    return is_view_of_torch(user)


class _Memory:
    """What a tensor's memory has, as operations change it."""

    def __init__(
        self, graph: Graph, base: Node, aliases: dict[Node, Node], changing: Collection[Node]
    ) -> None:
        self._graph = graph
        self._changing = changing
        self._base = base
        self._aliases = aliases
        self._of = {base, *aliases}
        self._whole: Node | None = base
        """What the tensor has; None if it has to be put together."""
        self._dim = 0
        self._parts: list[_Part] = []
        """What it is put together of, along a dimension."""
        self._known: dict[Node, Node] = {}
        """Of views, what they have at present."""
        self._new: list[Node] = []
        self._replaced: list[tuple[Node, dict[Node, Node]]] = []
        """What uses views, and what instead of each."""
        self._writes: set[Node] = set()
        self._notes = base.meta
        """Of the last write."""

    def run(self, user: Node) -> None:
        """Follow one more operation that uses the tensor."""
        if user.op != "output" and not isinstance(user.target, torch._ops.OpOverload):
            if user.target is operator.getitem:
                return
            raise _UnknownError
        changes = any(one in self._of for one in written_inputs(user))
        if user in self._aliases and not changes:
            return  # taken where it is read
        with self._graph.inserting_before(user):
            if changes:
                self._write(user)
            else:
                inputs = [one for one in user.all_input_nodes if one in self._of]
                self._replaced.append((user, {one: self._now(one) for one in inputs}))

    def keep(self) -> None:
        """Let the operations use the values."""
        for user, now in self._replaced:
            for alias, value in now.items():
                user.replace_input_with(alias, value)
        for node in reversed([one for one in self._graph.nodes if one in self._aliases]):
            if node in self._writes or not (node.users or is_write(node)):
                self._graph.erase_node(node)

    def forget(self) -> None:
        """Remove what was added to the graph."""
        for node in reversed(self._new):
            self._graph.erase_node(node)

    def _add(self, target: Any, *args: Any, **named: Any) -> Node:
        try:
            node = add_call(self._graph, target, *args, **named)
        except RuntimeError as error:  # a view of what has other strides
            raise _UnknownError from error
        self._new.append(node)
        own = ("val", "detached")
        node.meta.update({key: note for key, note in self._notes.items() if key not in own})
        return node

    def _write(self, user: Node) -> None:
        target = functional(user)
        written: Any = user.args[0]
        if target is None:
            raise _UnknownError
        args: Any = map_arg(user.args[1:], self._in_place_of)
        named = map_arg(user.kwargs, self._in_place_of)
        detached = user.meta.get("detached", frozenset())
        self._notes = user.meta
        if target in _COPIES and isinstance(args[0], Node):
            value = self._copied(args[0], 1 in detached)
        elif target is aten.index_put.default and (mask := _only_mask(*args)) is not None:
            value = self._where(mask, args[1], self._now(written))
        elif target in _FILLED:
            value = self._add(_FILLED[target], self._now(written), *args)
        else:
            value = self._add(target, self._now(written), *args, **named)
            value.meta["detached"] = detached
        if value.target is target and is_view_of_torch(value):  # as squeeze_(): another shape
            if self._origin(written) is not self._base:
                raise _UnknownError
        else:
            value = self._like(value, written)
        self._set(written, value)
        self._writes.add(user)

    def _in_place_of(self, node: Node) -> Node:
        return self._now(node) if node in self._of else node

    def _copied(self, value: Node, detached: bool) -> Node:
        """A value that does not change later on, and to which gradients flow as to the copy."""
        if not detached and memory_of(value) not in self._changing:
            return value
        copy = self._add(aten.clone.default, value)
        copy.meta["detached"] = frozenset({0} if detached else ())
        return copy

    def _where(self, mask: Node, value: Node, other: Node) -> Node:
        for _ in range(other.meta["val"].dim() - mask.meta["val"].dim()):
            mask = self._add(aten.unsqueeze.default, mask, -1)
        if value.meta["val"].dtype is not other.meta["val"].dtype:
            value = self._add(aten._to_copy.default, value, dtype=other.meta["val"].dtype)
        return self._add(aten.where.self, mask, value, other)

    def _like(self, value: Node, written: Node) -> Node:
        """A value, with the type and shape of what it is written to."""
        own, whole = value.meta["val"], written.meta["val"]
        if own.dtype is not whole.dtype or own.device != whole.device:
            value = self._add(aten._to_copy.default, value, dtype=whole.dtype, device=whole.device)
        if not same_shape(own.shape, whole.shape):
            zeros = self._add(aten.zeros_like.default, self._now(written))
            value = self._add(aten.add.Tensor, zeros, value)
            if not same_shape(value.meta["val"].shape, whole.shape):  # which the write changes
                raise _UnknownError
        return value

    def _set(self, alias: Node, value: Node) -> None:
        """Note that the tensor, or a view of it, has another value."""
        self._known = {}
        alias = self._origin(alias)
        if alias is self._base:
            self._whole, self._parts = value, []
            return
        parent = self._origin(self._aliases[alias])
        places = self._places(alias) if parent is self._base else None
        if places is None:
            self._set(parent, self._with(alias, value, self._now(parent)))
            return
        dim, low, high, is_one = places
        if self._dim != dim or not self._parts:
            self._parts = [_Part(0, _size(self._base, dim), self._now(self._base))]
            self._dim = dim
        self._put(_Part(low, high, value, None if is_one else 0))
        self._whole = None

    def _put(self, new: _Part) -> None:
        before = [one for part in self._parts for one in part.cut(0, new.low)]
        after = [one for part in self._parts for one in part.cut(new.high, part.high)]
        self._parts = [*before, new, *after]

    def _with(self, alias: Node, value: Node, parent: Node) -> Node:
        """What a view is of, where the view has another value."""
        if alias.target in _SCATTERED:
            return self._add(_SCATTERED[alias.target], parent, value, *alias.args[1:])
        if alias.target in _TURNED:
            return self._add(alias.target, value, *alias.args[1:])
        if alias.target is aten.unsqueeze.default:
            return self._add(aten.squeeze.dim, value, alias.args[1])
        raise _UnknownError

    def _origin(self, alias: Node) -> Node:
        """The tensor or the view that an operation in place has returned."""
        while alias is not self._base and returned_input(alias) is not None:
            alias = self._aliases[alias]
        return alias

    def _places(self, alias: Node) -> tuple[int, int, int, bool] | None:
        """Which places of which dimension a view of the tensor has, and whether it is one without
        that dimension; None if that is not known as numbers."""
        if alias.target not in (aten.select.int, aten.slice.Tensor):
            return None
        arguments: Any = alias.args
        dim = (arguments[1] if len(arguments) > 1 else 0) % self._base.meta["val"].dim()
        size = self._base.meta["val"].shape[dim]
        bounds = (*arguments[2:], None, None, None)[:3]
        if not isinstance(size, int) or not all(one is None or type(one) is int for one in bounds):
            return None
        if alias.target is aten.select.int:
            return dim, bounds[0] % size, bounds[0] % size + 1, True
        low, high, step = slice(*bounds).indices(size)
        return (dim, low, high, False) if step == 1 and low < high else None

    def _now(self, alias: Node) -> Node:
        """What the tensor, or a view of it, has at present."""
        alias = self._origin(alias)
        if alias is self._base:
            if self._whole is None:
                self._whole = self._between(0, _size(self._base, self._dim))
            return self._whole
        if alias not in self._known:
            self._known[alias] = self._view(alias)
        return self._known[alias]

    def _view(self, alias: Node) -> Node:
        parent = self._origin(self._aliases[alias])
        places = self._places(alias) if parent is self._base and self._whole is None else None
        if places is not None and places[0] == self._dim:
            _, low, high, is_one = places
            if not is_one:
                return self._between(low, high)
            part = next(part for part in self._parts if part.low <= low < part.high)
            if part.value is self._base:
                return alias
            if part.offset is None:
                return part.value
            return self._add(aten.select.int, part.value, self._dim, part.offset + low - part.low)
        now = self._now(parent)
        if alias.target is aten.as_strided.default and now is not alias.args[0]:
            raise _UnknownError  # by places in memory, where values may lie otherwise
        return alias if now is alias.args[0] else self._add(alias.target, now, *alias.args[1:])

    def _between(self, low: int, high: int) -> Node:
        """What is from one place to another, as one tensor; it is one part from now on."""
        parts = [one for part in self._parts for one in part.cut(low, high)]
        if len(parts) == 1:
            return self._taken(parts[0])
        if all(part.offset is None for part in parts):
            value = self._add(aten.stack.default, [part.value for part in parts], self._dim)
        else:
            value = self._add(aten.cat.default, [self._taken(part) for part in parts], self._dim)
        self._put(_Part(low, high, value))
        return value

    def _taken(self, part: _Part) -> Node:
        if part.offset is None:
            return self._add(aten.unsqueeze.default, part.value, self._dim)
        size, taken = _size(part.value, self._dim), part.high - part.low
        if size == taken:
            return part.value
        low = part.offset
        return self._add(aten.slice.Tensor, part.value, self._dim, low, low + taken)


def _only_mask(indices: Sequence[Node | None], value: Node, adds: bool = False) -> Node | None:
    """The mask that chooses where a number is written, if this is all that does."""
    first = indices[0]
    if len(indices) > 1 or first is None or value.meta["val"].dim() or adds:
        return None
    return first if first.meta["val"].dtype is torch.bool else None


def _size(node: Node, dim: int) -> int:
    return int(node.meta["val"].shape[dim])
