"""Operations that reduce a batch to numbers, and what kinds of numbers these are."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.divided_by import SUMS
from parallax.ops.statistics import Kind

aten: Any = torch.ops.aten

_KINDS: dict[Any, Kind] = {
    aten.mean.default: "mean",
    aten.mean.dim: "mean",
    aten.var.correction: "variance",
    aten.std.correction: "deviation",
    aten.max.default: "largest",
    aten.amax.default: "largest",
    aten.min.default: "smallest",
    aten.amin.default: "smallest",
    aten.logsumexp.default: "logsumexp",
    **dict.fromkeys(SUMS, "sum"),
}
_OF_SEVERAL: dict[Any, tuple[Kind, ...]] = {
    aten.var_mean.correction: ("variance", "mean"),
    aten.std_mean.correction: ("deviation", "mean"),
    aten.max.dim: ("largest",),
    aten.min.dim: ("smallest",),
}
"""What gives several results, of which the first are such numbers."""
_NORM = aten.linalg_vector_norm.default
OTHERS = {_NORM, aten.median.default, aten.prod.default, aten.bincount.default}
"""Numbers of the whole batch that cannot be put together of those of its parts, or are not yet."""
BY_ROWS_BESIDE = {
    aten.topk.default,
    aten.kthvalue.default,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.cumsum.default,
    aten.logcumsumexp.default,
    aten._softmax.default,
    aten._log_softmax.default,
}
"""Operations along a dimension of which each result follows from all that lies along it. Rows that
are put in order, by ``sort``, stay the same rows."""


def kind_of(node: Node) -> tuple[Kind | None, Node]:
    """What number of the batch a node may be, and what computes it."""
    if node.target is _NORM:
        order = node.args[1] if len(node.args) > 1 else node.kwargs.get("ord", 2)
        return ("norm" if order == 2 else None), node
    if node.target is not operator.getitem:
        return _KINDS.get(node.target), node
    made: Any
    made, place = node.args
    kinds = _OF_SEVERAL.get(made.target, ())
    return (kinds[place] if isinstance(place, int) and place < len(kinds) else None), made


def dim_of(node: Node) -> int | None:
    """Along which dimension an operation is that has one."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index("dim")
    default = node.target._schema.arguments[place].default_value  # type: ignore[union-attr]
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dim", default)
    return given if isinstance(given, int) else None


def reduced_dims(made: Node) -> tuple[tuple[int, ...], tuple[Any, ...]] | None:
    """Of a reduction, over which dimensions it is, and how large the others are; nothing if it is
    of no tensor that has some."""
    source: Any = made.args[0] if made.args else None
    value = source.meta.get("val") if isinstance(source, Node) else None
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    place = 2 if made.target is _NORM else 1
    given: Any = made.args[place] if len(made.args) > place else made.kwargs.get("dim")
    several = given if isinstance(given, list | tuple) else [] if given is None else [given]
    dims = tuple(sorted(one % value.dim() for one in several)) or tuple(range(value.dim()))
    return dims, tuple(size for dim, size in enumerate(value.shape) if dim not in dims)
