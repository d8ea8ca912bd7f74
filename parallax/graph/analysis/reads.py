"""What of the rows of a table is read, and as what: the rest need not travel.

An operation with light computation that stands between a lookup and all that uses its rows, such as
a cast to a half type under autocast or a slice of some columns, can run at the rows' owner just as
well; it does where that sends fewer bytes (Parallax paper, section 5.4, Figure 10). The rows arrive
as they would be after it, so that the numbers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.lookups import Lookup, gradient_values
from parallax.graph.common.sizes import same_shape, same_size, size_of

aten: Any = torch.ops.aten

# Of views with as many columns as before, more than one, those whose columns are the same.
_KEEP_LAST = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.slice.Tensor,
    aten.expand.default,
    aten.detach.default,
    aten.alias.default,
}
_VIEWS = _KEEP_LAST | {
    aten.transpose.int,
    aten.permute.default,
    aten.t.default,
    aten.select.int,
}
_COPIES = {aten._to_copy.default, aten.clone.default}
_SHAPE_ONLY = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_empty.default,
}


@dataclass(frozen=True)
class RowsRead:
    """What all reads of a table need of a row.

    Args:
        columns: the first value of it, and the one after the last; None for the whole row.
        dtype: as which it is read; None for the table's own.
    """

    columns: tuple[int, int] | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class _Use:
    start: int
    end: int
    dtype: torch.dtype | None


def rows_read(
    lookups: Iterable[Lookup], terms: Iterable[Node], row_shape: tuple[int, ...]
) -> RowsRead:
    """What the lookups of a table read of its rows.

    Args:
        lookups: of one table.
        terms: of its gradients, see :class:`RowGradient`.
        row_shape: of one row; columns are told apart where it has one dimension.
    """
    found = list(lookups)
    if not found or any(lookup.bag or lookup.gathers_elements for lookup in found):
        return RowsRead()
    width = math.prod(row_shape)
    uses: list[_Use] = []
    for lookup in found:
        uses += _uses(lookup.node, 0, width, len(row_shape) == 1)
    if not uses:
        return RowsRead()
    start, end = min(use.start for use in uses), max(use.end for use in uses)
    dtypes = {use.dtype for use in uses}
    some = 0 < end - start < width and all(
        (values := gradient_values(term)) is not None and _within(_nonzero(values), start, end)
        for term in terms
    )
    return RowsRead((start, end) if some else None, dtypes.pop() if len(dtypes) == 1 else None)


def _uses(node: Node, start: int, end: int, in_columns: bool) -> list[_Use]:
    """What each user of rows, or of a view of them, reads of their columns from start to end.

    Args:
        in_columns: the last dimension is that of the columns.
    """
    found: list[_Use] = []
    value = node.meta["val"]
    for user in node.users:
        own: Any = user.meta.get("val")
        if user.target in _SHAPE_ONLY:
            continue
        if user.target is aten._to_copy.default and _is_narrower(own, value):
            found.append(_Use(start, end, own.dtype))
        elif user.target not in _VIEWS or user.args[0] is not node:
            found.append(_Use(start, end, None))
        elif in_columns and _slices_columns(user, value.dim()):
            first, last = _bounds(user, end - start)
            found += _uses(user, start + first, start + last, True)
        else:
            same = user.target in _KEEP_LAST and _as_many_columns(user, node)
            found += _uses(user, start, end, in_columns and same)
    return found


def _nonzero(values: Node) -> tuple[int, int]:
    """The first column of rows that may be other than zero, and the one after the last."""
    arguments: tuple[Any, ...] = values.args
    shape = values.meta["val"].shape
    if values.target in (aten.add.Tensor, aten.add_.Tensor):
        parts = [_nonzero(one) for one in arguments[:2] if isinstance(one, Node)]
        if len(parts) == 2 and all(
            same_shape(one.meta["val"].shape, shape) for one in arguments[:2]
        ):
            return min(start for start, _ in parts), max(end for _, end in parts)
    elif values.target is aten.slice_backward.default:
        gradient, sizes, dimension, *bounds = arguments
        start, end = _nonzero(gradient)
        if dimension % len(sizes) < len(sizes) - 1:
            return start, end
        if any(isinstance(bound, Node) for bound in bounds):
            return 0, shape[-1]
        chosen = range(sizes[-1])[slice(*bounds)]
        if chosen.step == 1:
            return chosen.start + start, chosen.start + end
    elif values.target in (*_KEEP_LAST, *_COPIES) and _as_many_columns(values, arguments[0]):
        return _nonzero(arguments[0])
    return 0, shape[-1] if shape else 1


def _within(columns: tuple[int, int], start: int, end: int) -> bool:
    return start <= columns[0] and columns[1] <= end


def _as_many_columns(one: Node, other: Node) -> bool:
    first, second = one.meta["val"].shape, other.meta["val"].shape
    return bool(
        first and second and same_size(first[-1], second[-1]) and (size_of(first[-1]) or 0) > 1
    )


def _is_narrower(made: Any, value: torch.Tensor) -> bool:
    return (
        isinstance(made, torch.Tensor)
        and made.dtype.is_floating_point
        and made.dtype.itemsize < value.dtype.itemsize
    )


def _slices_columns(node: Node, dimensions: int) -> bool:
    """Whether a view is of some columns, the same in every step."""
    if node.target is not aten.slice.Tensor:
        return False
    dimension: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    step: Any = node.args[4] if len(node.args) > 4 else node.kwargs.get("step", 1)
    fixed = not any(isinstance(bound, Node) for bound in (*node.args[2:], *node.kwargs.values()))
    return bool(dimension % dimensions == dimensions - 1 and step == 1 and fixed)


def _bounds(node: Node, width: int) -> tuple[int, int]:
    """First column and one past the last that a slice takes of so many."""
    start: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("start")
    end: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("end")
    chosen = range(width)[slice(start, end)]
    return (chosen.start, chosen.stop) if chosen else (0, 0)
