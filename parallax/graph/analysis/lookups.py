"""Operations that read rows of a table, and the forms that their gradients take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.common.sizes import same_shape

aten: Any = torch.ops.aten

OF_WEIGHTS = aten._embedding_bag_per_sample_weights_backward.default
"""Reads the rows of bags once more, for the gradients of what they were weighted by."""
_IDS_ARGUMENT = {
    aten.embedding.default: 1,
    aten._embedding_bag.default: 1,
    aten._embedding_bag_forward_only.default: 1,
    OF_WEIGHTS: 2,
    aten.index_select.default: 2,
    aten.gather.default: 2,
    aten.index.Tensor: 1,
}
_TABLE_ARGUMENT = {OF_WEIGHTS: 1}
"""Where it is not the first."""
WRAPPING = {aten.index.Tensor}
"""Lookups in which negative ids count from the end."""
_INTEGERS = (torch.int64, torch.int32)

# What turns row gradients into a gradient of the whole table:
# target -> positions of (ids, size or zeros).
_GRADIENT_IDS = {
    aten.embedding_dense_backward.default: 1,
    aten._embedding_bag_dense_backward.default: 1,
    aten._embedding_bag_backward.default: 1,
    aten.index_add.default: 2,
    aten.index_add_.default: 2,
    aten.index_put.default: 1,
    aten.index_put_.default: 1,
    aten._unsafe_index_put.default: 1,
    aten.scatter_add.default: 2,
    aten.scatter_add_.default: 2,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: 3,
}
# ... and of the rows' values.
_GRADIENT_VALUES = {
    aten.embedding_dense_backward.default: 0,
    aten.index_add.default: 3,
    aten.index_add_.default: 3,
    aten.index_put.default: 2,
    aten.index_put_.default: 2,
    aten._unsafe_index_put.default: 2,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: 4,
}
_BAG_GRADIENTS = (
    aten._embedding_bag_backward.default,
    aten._embedding_bag_dense_backward.default,
)
_ADD = (aten.add.Tensor, aten.add_.Tensor)
_ZEROS = (
    aten.new_zeros.default,
    aten.zeros.default,
    aten.full.default,
    aten.zero_.default,
    aten.new_full.default,
)
SHAPE_ONLY = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.flatten.using_ints,
    aten.slice.Tensor,
    aten.select.int,
    aten.contiguous.default,
    aten.index.Tensor,
)


@dataclass(frozen=True)
class Lookup:
    """One read of rows: ``node`` reads table ``variable`` at ``ids``."""

    variable: str
    node: Node
    ids: Node

    @property
    def gathers_elements(self) -> bool:
        """Whether ids choose single elements instead of rows."""
        return self.node.target is aten.gather.default

    @property
    def bag(self) -> bool:
        """Whether it sums, or otherwise takes together, the rows of several ids."""
        return "embedding_bag" in str(self.node.target)

    @property
    def is_again(self) -> bool:
        """Whether it reads, for a gradient, what another lookup has read."""
        return self.node.target is OF_WEIGHTS


def lookup_of(node: Node, table: Node, variable: str) -> Lookup | None:
    """``node`` as a lookup of ``table``, or None if it reads it in another way."""
    position = _IDS_ARGUMENT.get(node.target)
    if position is None or node.args[_TABLE_ARGUMENT.get(node.target, 0)] is not table:
        return None
    if node.target in (aten.index_select.default, aten.gather.default) and node.args[1] != 0:
        return None
    ids = node.args[position]
    if "embedding_bag" in str(node.target) and _is_special_bag(node):
        return None
    if node.target is aten.index.Tensor:
        assert isinstance(ids, list | tuple)
        if not ids or any(i is not None for i in ids[1:]):
            return None
        ids = ids[0]
    value = ids.meta.get("val") if isinstance(ids, Node) else None
    if not isinstance(ids, Node) or value is None or value.dtype not in _INTEGERS:
        return None
    return Lookup(variable, node, ids)


def _is_special_bag(node: Node) -> bool:
    """A bag that takes maxima and remembers which ids they are."""
    mode = 5 if node.target is OF_WEIGHTS else 4
    return bool(len(node.args) > mode and node.args[mode] == 2)


def is_plain_bag(node: Node) -> bool:
    """Whether a lookup sums or averages bags, without weights of the rows."""
    if node.target is OF_WEIGHTS:
        return False
    weights = node.args[6] if len(node.args) > 6 else None
    return "embedding_bag" in str(node.target) and weights is None and not _is_special_bag(node)


def bag_of(term: Node) -> Node | None:
    """The lookup in bags that a term of a row gradient belongs to: it says where each id is."""
    if term.target not in _BAG_GRADIENTS:
        return None
    bags = term.args[3] if term.target is aten._embedding_bag_backward.default else term.args[2]
    source = bags.args[0] if isinstance(bags, Node) and bags.args else None
    return source if isinstance(source, Node) else None


def with_rows(lookup: Lookup, rows: Node, positions: Node) -> tuple[Any, ...]:
    """The arguments of a lookup that reads ``rows`` (unique) at ``positions`` instead."""
    args = list(lookup.node.args)
    args[_TABLE_ARGUMENT.get(lookup.node.target, 0)] = rows
    index = _IDS_ARGUMENT[lookup.node.target]
    args[index] = [positions] if lookup.node.target is aten.index.Tensor else positions
    if lookup.node.target is aten.embedding.default and len(args) > 2:
        args[2] = -1  # the padding row is an ordinary row of the forward pass
    return tuple(args)


def scales_by_frequency(node: Node) -> bool:
    """Whether a lookup weighs gradients by how often an id occurs in the (local) batch."""
    position = {aten.embedding.default: 3, aten._embedding_bag.default: 3}.get(node.target)
    return position is not None and len(node.args) > position and bool(node.args[position])


@dataclass(frozen=True)
class RowGradient:
    """A gradient of a whole table as a sum of scattered rows.

    ``terms`` scatter rows by ids, ``sums`` add them; ``zeros`` are the tables scattered into.
    """

    terms: tuple[Node, ...]
    sums: tuple[Node, ...]
    zeros: tuple[Node, ...]
    coo: bool


def row_gradient(node: Any, shape: torch.Size) -> RowGradient | None:
    """How ``node`` is made of scattered rows, or None if other operations take part."""
    terms: list[Node] = []
    sums: list[Node] = []
    zeros: list[Node] = []
    coo: set[bool] = set()

    def visit(n: Any) -> bool:
        if not isinstance(n, Node) or not same_shape(n.meta["val"].shape, shape):
            return False
        if n.target in _ADD and not n.kwargs and all(isinstance(a, Node) for a in n.args[:2]):
            sums.append(n)
            return visit(n.args[0]) and visit(n.args[1])
        if n.target in (aten.clone.default,):
            sums.append(n)
            return visit(n.args[0])
        if n.target in _GRADIENT_IDS:
            terms.append(n)
            coo.add(n.meta["val"].layout is torch.sparse_coo)
            if n.target in (
                aten.embedding_dense_backward.default,
                aten._embedding_bag_dense_backward.default,
                aten._embedding_bag_backward.default,
                aten._sparse_coo_tensor_with_dims_and_tensors.default,
            ):
                return True
            base = n.args[0]
            if isinstance(base, Node) and base.target in _ZEROS and _is_zero(base):
                zeros.append(base)
                return True
            return visit(base)
        return False

    if not visit(node) or len(coo) != 1:
        return None
    return RowGradient(tuple(terms), tuple(dict.fromkeys(sums)), tuple(zeros), coo.pop())


def _is_zero(node: Node) -> bool:
    if node.target in (aten.full.default, aten.new_full.default):
        return bool(node.args[-1] == 0)
    return True


def gradient_ids(node: Node) -> Node:
    """The ids that a term of a row gradient scatters by."""
    ids: Any = node.args[_GRADIENT_IDS[node.target]]
    if isinstance(ids, list | tuple):
        ids = ids[0]
    assert isinstance(ids, Node)
    return ids


def gradient_values(node: Node) -> Node | None:
    """The rows that a term of a row gradient scatters; None for bags and elements."""
    place = _GRADIENT_VALUES.get(node.target)
    values = None if place is None else node.args[place]
    return values if isinstance(values, Node) else None


def set_gradient_ids(node: Node, positions: Node, rows: Any) -> None:
    """Let a term scatter by ``positions`` into ``rows`` rows instead of the whole table."""
    args = list(node.args)
    index = _GRADIENT_IDS[node.target]
    args[index] = [positions] if isinstance(args[index], list | tuple) else positions
    if node.target is aten.embedding_dense_backward.default:
        args[2] = rows
        args[3] = -1
    elif node.target is aten._embedding_bag_dense_backward.default:
        args[5] = rows
    elif node.target is aten._embedding_bag_backward.default:
        args[6] = rows
    elif node.target is aten._sparse_coo_tensor_with_dims_and_tensors.default:
        args[2] = [rows, *_tail(args[2])]
    node.args = tuple(args)


def padding_id(node: Node) -> int | None:
    """The id whose gradient a term leaves out."""
    if node.target is aten.embedding_dense_backward.default:
        value = node.args[3]
        return int(value) if isinstance(value, int) and value >= 0 else None
    return None


def resize_zeros(node: Node, rows: Any) -> None:
    """Let a table of zeros have ``rows`` rows."""
    args = list(node.args)
    position = 1 if node.target in (aten.new_zeros.default, aten.new_full.default) else 0
    args[position] = [rows, *_tail(args[position])]
    node.args = tuple(args)


def _tail(size: Any) -> list[Any]:
    return list(size)[1:]
