"""Operations that reduce a batch to numbers, and what kinds of numbers these are."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.divided_by import SUMS
from parallax.graph.analysis.loss_terms import REDUCTIONS
from parallax.graph.analysis.row_matrices import MATRIX_PRODUCTS
from parallax.ops.statistics import Kind, told_of

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
ALONG_ALL = {
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
BY_LABEL = {
    aten.index_add.default,
    aten.index_add_.default,
    aten.scatter_add.default,
    aten.scatter_add_.default,
}
"""Sums of rows for each label."""
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
ROWS = "rows"
"""In the place of a count: as many as the batch has rows."""


@dataclass(eq=False, frozen=True)
class Statistic:
    """A number of the whole batch, or one of each column.

    Args:
        value: the number, as it is on this worker.
        kind: what it is.
        source: what it is of.
        made: what computes it.
        dims: of the source, over which.
        shape: of the source's other dimensions: the columns. Of a number, nothing.
        count: of how many elements, where that is not the size of ``source``.
        is_gradient: it is that of another one, of which workers have parts.
    """

    value: Node
    kind: Kind
    source: Node
    made: Node
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    count: Any = None
    is_gradient: bool = False

    @property
    def sources(self) -> list[Node]:
        """Of what it is computed."""
        if self.made.target in BY_LABEL and not self.is_gradient:
            return [one for one in self.made.args[2:4] if isinstance(one, Node)]
        of_all = self.is_gradient or self.made.target in MATRIX_PRODUCTS | {*REDUCTIONS}
        return self.made.all_input_nodes if of_all else [self.source]

    @property
    def length(self) -> int:
        """How many numbers are told of one for each column; zero if it is one alone."""
        return told_of(self.kind, math.prod(self.shape)) if self.shape else 0

    @property
    def correction(self) -> float:
        """Of a variance, what is taken from the number of elements."""
        given: Any = self.made.kwargs.get("correction")
        return 1.0 if given is None else float(given)

    @property
    def key(self) -> Any:
        """What tells a number apart from others of a graph: sums are told by what is summed."""
        own = self.value if self.count is not None or self.kind == "sum" else None
        return self.kind, self.source, self.correction, self.dims, own


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


def are_zeros(node: Node) -> bool:
    """Whether a tensor is nothing but zeros when it is made."""
    made: Any = node
    while made.target in (aten._to_copy.default, aten.clone.default):
        made = made.args[0]
    return made.target in _ZEROS


def is_bounded(labels: Any, count: int) -> bool:
    """Whether the step itself keeps whole numbers below one, as where it counts labels."""
    return (
        isinstance(labels, Node)
        and labels.target is aten.clamp.default
        and labels.args[1:] == (None, count - 1)
    )


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
