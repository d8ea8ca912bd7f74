"""Where the rows of the batch lie in tensors: along which dimension, and how often."""

from __future__ import annotations

import collections
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from parallax.graph.analysis.how_many import expression, product
from parallax.graph.common.sizes import size_of, sizes_of
from parallax.graph.step_graph import StepGraph

aten: Any = torch.ops.aten

VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
PARTS = {
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.narrow.default,
    aten.unbind.int,
    aten.select.int,
}
"""What takes a part of a dimension."""
_MOST_BYTES = 2**16
"""Of each row that are sent to all workers to find the largest of all, or the like."""
_LARGE = 10**6
"""Rows by which it is told how a size grows with them."""


class Places(NamedTuple):
    """Where the rows of the batch lie in a tensor.

    Args:
        dim: along which dimension.
        outer, inner: it has so many times all rows, and of each row so many places.
    """

    dim: int
    outer: int
    inner: int


class RowSizes:
    """Which sizes grow with the rows of the batch.

    Args:
        rows: how many these are: a symbol, or the number of one batch, by which it cannot be told
            for certain.
    """

    def __init__(self, rows: int | torch.SymInt) -> None:
        self._rows = expression(rows)
        self.are_certain = not isinstance(self._rows, int)
        """Whether no size is taken for one of these by chance."""
        self.count = size_of(rows) or 0
        """How many rows the batch has that was captured."""
        self._bounded: dict[Any, bool] = {}

    def times(self, size: int | torch.SymInt) -> int | None:
        """How many times as large as the rows a size is; None if it is no multiple of them."""
        one = expression(size)
        if isinstance(one, int) or self._rows not in one.free_symbols:
            return None
        times = one / self._rows
        return int(times) if times.is_Integer else None

    def has_all(self, size: int | torch.SymInt) -> bool:
        """Whether a size is a multiple of the rows."""
        if isinstance(self._rows, int):
            return self.grows(size)
        return self.times(size) is not None

    def grows(self, size: int | torch.SymInt) -> bool:
        """Whether a size follows from the rows, or from values, as that of a selection."""
        one = expression(size)
        if isinstance(self._rows, int):
            return size_of(size) is None or (one > 0 and one % max(self._rows, 1) == 0)
        if isinstance(one, int):
            return False
        if size_of(size) is None or self._rows not in one.free_symbols:
            return size_of(size) is None
        # The number of singular values is a minimum.
        return type(one).__name__ != "Min" or not self._is_bounded(one)

    def _is_bounded(self, size: Any) -> bool:
        """Whether a size grows only with few rows."""
        if size not in self._bounded:
            large, larger = (size.subs(self._rows, rows) for rows in (_LARGE, 2 * _LARGE))
            self._bounded[size] = bool(large == larger)
        return self._bounded[size]

    def dims(self, node: Any) -> list[int]:
        """The dimensions of a tensor that grow."""
        value = tensor_of(node)
        if value is None:
            return []
        return [dim for dim, size in enumerate(value.shape) if self.grows(size)]

    def are_pairs(self, node: Any) -> bool:
        """Whether a tensor has an element for each two rows, or for each two of some of them."""
        value = tensor_of(node)
        return value is not None and sum(map(self._power, value.shape)) > 1

    def _power(self, size: int | torch.SymInt) -> int:
        """By which power of the rows a size grows, about."""
        if not self.grows(size):
            return 0
        if isinstance(self._rows, int) or size_of(size) is None:
            return 1
        one = expression(size)
        values = {symbol: _LARGE if symbol == self._rows else 1 for symbol in one.free_symbols}
        return round(math.log(max(int(one.subs(values)), 1), _LARGE))


def all_places(
    step: StepGraph, sizes: RowSizes, follows: Collection[Node]
) -> dict[tuple[Node, int], int]:
    """By tensor and dimension in which there are places for each row, how many times it has all
    rows.

    Args:
        step: captured with a symbol for how many rows the batch has.
        sizes: of it.
        follows: what follows from values of the batch.
    """
    found: dict[tuple[Node, int], int] = {}
    for node in step.graph.nodes:
        for dim in sizes.dims(node):
            outer = _outer(found, sizes, follows, node, dim)
            if outer is not None:
                found[node, dim] = outer
    # Where nothing tells, as of what is chosen by a mask, they lie as in all others as large.
    known: dict[int | None, set[int]] = collections.defaultdict(set)
    for (node, dim), outer in found.items():
        known[sizes.times(shape_of(node)[dim])].add(outer)
    for node in step.graph.nodes:
        for dim in sizes.dims(node):
            alike = known[sizes.times(shape_of(node)[dim])]
            if (node, dim) not in found and len(alike) == 1:
                found[node, dim] = next(iter(alike))
    return found


def _outer(
    found: dict[tuple[Node, int], int],
    sizes: RowSizes,
    follows: Collection[Node],
    node: Node,
    dim: int,
) -> int | None:
    size = shape_of(node)[dim]
    times = sizes.times(size)
    source: Any = node.args[0] if node.args else None
    is_of_several = isinstance(source, Node) and source.target in PARTS and not is_tensor(source)
    part: Any = source if is_of_several else node
    if part.target in PARTS:
        return _of_part(found, sizes, part.args[0], size)
    if times == 1:
        return 1
    if node.target is aten.cat.default:
        parts: Any = node.args[0]
        along: Any = node.args[1] if len(node.args) > 1 else 0
        if along % len(shape_of(node)) == dim:
            alone = [found.get((one, dim)) == sizes.times(shape_of(one)[dim]) for one in parts]
            return times if all(alone) else None
    if node.target in VIEWS:
        return _merged(found, sizes, source, node, dim)
    if node.target is aten.repeat.default:
        repeats: Any = node.args[1]
        lies = dim - (len(shape_of(node)) - len(shape_of(source)))
        before = found.get((source, lies))
        return before * repeats[dim] if before and isinstance(repeats[dim], int) else None
    outers = {
        found.get((one, place))
        for one in node.all_input_nodes
        if one in follows  # else it has no row of the batch
        for place in sizes.dims(one)
        if _same(shape_of(one)[place], size)
    }
    return outers.pop() if len(outers) == 1 else None


def _of_part(
    found: dict[tuple[Node, int], int], sizes: RowSizes, whole: Any, size: int | torch.SymInt
) -> int | None:
    """The same of what takes a part of some dimension."""
    places = sizes.dims(whole)
    if len(places) != 1:
        return None
    (place,) = places
    outer, times = found.get((whole, place)), sizes.times(shape_of(whole)[place])
    if _same(shape_of(whole)[place], size):  # it is of another dimension
        return outer
    return sizes.times(size) if outer == times else None


def _merged(
    found: dict[tuple[Node, int], int], sizes: RowSizes, source: Node, node: Node, dim: int
) -> int | None:
    """The same of a view, which may put several dimensions into one."""
    given, made = shape_of(source), shape_of(node)
    before = product(made[:dim])
    for first in range(len(given)):
        if product(given[:first]) != before:
            continue
        for last in range(first + 1, len(given) + 1):
            if product(given[first:last]) != expression(made[dim]):
                continue
            growing = [place for place in range(first, last) if sizes.grows(given[place])]
            outer = found.get((source, growing[0])) if len(growing) == 1 else None
            ahead = product(given[first : growing[0]]) if growing else None
            if outer is not None and isinstance(ahead, int):
                return ahead * outer
    return None


def tensor_of(node: Any) -> torch.Tensor | None:
    """The example value of a node, if it is a tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_narrow(node: Node, sizes: RowSizes) -> bool:
    """Whether a tensor has few bytes for each row of the batch."""
    value = node.meta["val"]
    whole: int = value.element_size() * math.prod(sizes_of(value))
    return whole <= _MOST_BYTES * max(sizes.count, 1)


def is_tensor(node: Any) -> bool:
    """Whether a node gives a tensor."""
    return tensor_of(node) is not None


def shape_of(node: Node) -> tuple[int | torch.SymInt, ...]:
    """The sizes of a tensor."""
    return tuple(node.meta["val"].shape)


def _same(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    return bool(expression(one) == expression(other))
