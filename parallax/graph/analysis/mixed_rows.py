"""What may be the first of a step to compare rows of the batch with each other, or order them."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.compute import computes_much
from parallax.graph.analysis.degrees import is_pointwise
from parallax.graph.analysis.divided_by import SUMS
from parallax.graph.analysis.how_many import expression
from parallax.graph.analysis.kept_rows import has_row_places, kept_rows, may_keep_rows
from parallax.graph.analysis.loss_terms import SHAPES, from_batch, losses, made_of
from parallax.graph.analysis.reductions import dim_of, reduced_dims
from parallax.graph.analysis.row_places import (
    PARTS,
    VIEWS,
    RowSizes,
    is_narrow,
    is_tensor,
    shape_of,
)
from parallax.graph.analysis.totals import own_numbers
from parallax.graph.common.operations import (
    gradient_of,
    is_call,
    is_random,
    is_view_of_torch,
)
from parallax.graph.common.sizes import LEAST
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks

aten: Any = torch.ops.aten

_PRODUCTS = {aten.mm.default, aten.bmm.default, aten._cdist_forward.default, aten.addmm.default}
_WIDENED = {aten.expand.default, aten.repeat.default}
_CHOSEN = {aten.index.Tensor, aten.index_select.default, aten._pdist_forward.default}
_IN_ORDER = {
    aten.cumsum.default,
    aten.cumprod.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.logcumsumexp.default,
    aten._logcumsumexp.default,
}
"""Operations along a dimension of which each result follows from those in front of it."""
_SOFTMAX = {aten._softmax.default, aten._log_softmax.default}
_ALONG_ALL = {
    aten.topk.default,
    aten.kthvalue.default,
    aten.median.dim,
    aten.nanmedian.dim,
    *_SOFTMAX,
    *_IN_ORDER,
}
"""Those of which each follows from all."""
_EXTREMES = {
    aten.max.default,
    aten.min.default,
    aten.amax.default,
    aten.amin.default,
    aten.max.dim,
    aten.min.dim,
    aten.prod.default,
}
"""Numbers of all rows, which are told otherwise if no gradient flows through them."""
_MEDIANS = {aten.median.default, aten.nanmedian.default}
_TAKEN = {aten.gather.default, aten.index.Tensor, aten.index_select.default, aten.take.default}
"""What takes some by their places: of rows in order, such as a quantile."""
_DISTINCT = {aten._unique2.default, aten.unique_dim.default}
_COUNTS = 2
"""Of their results, how often each is there."""
_COMPARISONS = {
    getattr(getattr(aten, name), kind)
    for name in ("lt", "le", "gt", "ge")
    for kind in ("Scalar", "Tensor")
}
_SORTS = {aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable}


def may_compare_rows(step: StepGraph) -> bool:
    """Whether a step may compare rows, or keep them for later steps, as far as it is known.

    Args:
        step: as it was captured. If that is for one size of batch, sizes may be equal by chance.
    """
    if not all(isinstance(one, int) for one in step.rows):
        return True
    if len({*step.rows}) != 1:
        return False
    sizes, follows = RowSizes(step.rows[0]), following(step)
    own = own_numbers(step, by_rows=True)
    if own.left or compared_first(step) is not None:
        return True
    return may_keep_rows(step, sizes, follows, own.known)


def confuses_rows(step: StepGraph) -> bool:
    """Whether a step is computed with numbers of the batch, and it cannot be told for certain which
    sizes of its graph are how many rows the batch has.

    Args:
        step: as it was captured. With a symbol for them, it can.
    """
    counts = {*step.rows}
    if len(counts) != 1 or not isinstance(rows := counts.pop(), int):
        return False
    follows = following(step)
    several = (shape_of(node)[1:] for node in follows if is_tensor(node))
    given = (
        shape_of(node)
        for node in step.own_placeholders()
        if is_tensor(node) and node not in follows
    )
    known = {rows, *_joined_rows(step, follows, rows)}
    is_clear = rows >= LEAST and all(rows not in map(expression, shape) for shape in several)
    if is_clear and all(known.isdisjoint(map(expression, shape)) for shape in given):
        return False
    own = own_numbers(step, by_rows=True)
    return bool(own.left or own.known)


def _joined_rows(step: StepGraph, follows: Collection[Node], rows: int) -> set[int]:
    """How many rows tensors have that views of the batch are put together to."""
    joined = step.graph.find_nodes(op="call_function", target=aten.cat.default)
    sizes = {expression(shape_of(one)[0]) for one in joined if one in follows and shape_of(one)}
    return {size for size in sizes if isinstance(size, int) and size % max(rows, 1) == 0}


def compared_first(step: StepGraph) -> Node | None:
    """What may be the first of a step to compare rows, by the sizes of one batch.

    Args:
        step: captured for these.
    """
    if len({expression(one) for one in step.rows}) != 1:
        return None
    sizes = RowSizes(step.rows[0])
    follows = following(step)
    relevant = made_of(loss for loss, _ in losses(step.graph))
    nodes = [node for node in step.graph.nodes if node in relevant and node in follows]
    of_all = Mixing(step, sizes, follows)
    groups = {count for node in nodes for count in _groups(node, sizes)}
    counts = [sizes, *map(RowSizes, sorted(groups))]
    return next(
        (n for n in nodes if any(_widens(n, one, follows) for one in counts) or of_all.mixes(n)),
        None,
    )


def kept_first(step: StepGraph) -> Node | None:
    """The same of what keeps rows of the batch for later steps."""
    if len({expression(one) for one in step.rows}) != 1:
        return None
    sizes, follows = RowSizes(step.rows[0]), following(step)
    kept = kept_rows(step, sizes, follows, lambda _: False, follows)
    return next((node for node in kept if not has_row_places(node, sizes)), None)


def _widens(node: Node, sizes: RowSizes, follows: Collection[Node]) -> bool:
    """Whether a node may be the first to have an element for each two rows."""
    of_batch = (one for one in node.args if isinstance(one, Node) and one in follows)
    given = [one for one in of_batch if is_tensor(one)]
    if not is_tensor(node) or not given:
        return False
    if node.target in _PRODUCTS:
        count = len(shape_of(node))
        return len(given) > 1 and sizes.dims(node) == [count - 2, count - 1]
    if node.target in _CHOSEN:  # by a list of all pairs
        count = sizes.count
        pairs = {count * count, count * (count - 1), count * (count - 1) // 2} - {0, 1, count}
        size = next(map(expression, shape_of(node)), None)
        return size in pairs or node.target is aten._pdist_forward.default
    if node.target in _WIDENED:
        return sizes.are_pairs(node) and not sizes.are_pairs(given[0])
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        missing = [_missing(one, node, sizes) for one in given]
        return any(one - other and other - one for one in missing for other in missing)
    return False


def _groups(node: Node, sizes: RowSizes) -> set[int]:
    """How many groups of rows a view has in place of rows, in the graph of one size of batch."""
    source: Any = node.args[0] if node.target in VIEWS else None
    if source is None or sizes.dims(source)[:1] != [0] or sizes.dims(node):
        return set()
    return {size for size in shape_of(node)[:2] if isinstance(size, int) and size > 1}


def _counts_up_to(node: Node) -> bool:
    """Whether a node adds up whole numbers by column, and the sums are compared with a number: an
    expert takes so many rows. Others are mostly where something begins."""
    if node.target is not aten.cumsum.default or node.meta["val"].dim() < 2:
        return False
    seen, left = {node}, [node]
    while left:
        for user in left.pop().users:
            if user.target in _COMPARISONS:
                return True
            if user not in seen and (is_pointwise(user) or user.target in SUMS):
                seen.add(user)
                left.append(user)
    return False


def _missing(one: Node, node: Node, sizes: RowSizes) -> set[int]:
    """The dimensions that grow, from the last on, and along which a tensor is broadcast."""
    own, count = shape_of(one), len(shape_of(node))
    lacking = (dim - count for dim in sizes.dims(node))
    return {dim for dim in lacking if len(own) < -dim or expression(own[dim]) == 1}


def following(step: StepGraph) -> set[Node]:
    """What follows from values of the batch, up to gradients of variables."""
    return from_batch(step, {*SHAPES, marks.GRADIENT})


class Mixing:
    """What follows from all rows of the batch without having an element for each two of them."""

    def __init__(self, step: StepGraph, sizes: RowSizes, follows: Collection[Node]) -> None:
        self._sizes = sizes
        self._follows = follows
        calls = filter(None, map(gradient_of, step.graph.nodes))
        self._calls = dict(calls)
        """Operations through which gradients flow, by PyTorch's number."""
        trained = {
            node
            for node, item in zip(step.own_placeholders(), step.inputs, strict=True)
            if item.kind == "state" and item.differentiated
        }
        self.of_model = trained
        """What follows from parameters: of data alone, nobody wants gradients."""
        self.ordered: set[Node] = set()
        """What follows from the order of all rows, by numbers that have fractions."""
        self._ranks: set[Node] = set()
        """Of it, which row is where, and what is computed with that in whole numbers."""
        for node in step.graph.nodes:
            inputs = node.all_input_nodes
            if any(one in trained for one in inputs):
                trained.add(node)
            is_forward = node in follows and node.meta.get("autograd") != "backward"
            if is_forward and (self._sorts(node) or any(one in self.ordered for one in inputs)):
                self.ordered.add(node)
                if self._is_rank(node):
                    self._ranks.add(node)

    def mixes(self, node: Node) -> bool:
        """Whether a node is such."""
        if self._uses_rank(node):
            return True
        made: Any = node.args[0] if node.target is operator.getitem else node
        source: Any = made.args[0] if made.args else None
        if not is_tensor(source) or source not in self._follows:
            return False
        if made.target in _DISTINCT:  # each row follows from how many there are like it
            counts = node is not made and bool(node.args[1] == _COUNTS)
            return counts and bool(self._sizes.dims(source))
        if made.target in _SORTS and made is not node:
            is_value = bool(node.args[1] == 0) and self._sorts(made) and self._has_gradient(made)
            return is_value and is_narrow(source, self._sizes)
        value = source.meta["val"]
        dims = self._sizes.dims(source)
        is_in_order = source in self.ordered and made.target in PARTS
        if not dims or not (value.dtype.is_floating_point or is_in_order or _counts_up_to(made)):
            return False
        if made.target in _ALONG_ALL:
            # Softmax is mostly over classes, or words, which may be as many as rows by chance.
            along = dims[:1] if made.target in _SOFTMAX else self._row_dims(source)
            return self._along(made, source) in along and is_narrow(source, self._sizes)
        if made.target in _EXTREMES and self._has_gradient(made):
            reduced = reduced_dims(made)
            return reduced is not None and dims[0] in reduced[0] and is_narrow(source, self._sizes)
        if made.target in _MEDIANS:
            return is_narrow(source, self._sizes)
        if source not in self.ordered or not is_narrow(source, self._sizes):
            return False
        if made.target in PARTS:
            return self._along(made, source) in self._row_dims(source)
        return made.target in _TAKEN and not self._sizes.dims(made)

    def _is_rank(self, node: Node) -> bool:
        """Whether what follows from an order are places in it, as whole numbers."""
        made: Any = node.args[0] if node.target is operator.getitem else node
        if not is_tensor(node) or node.meta["val"].dtype not in (torch.int64, torch.int32):
            return False
        is_order = self._sorts(made) and (made is node or bool(node.args[1] == 1))
        return is_order or any(one in self._ranks for one in made.all_input_nodes)

    def _uses_rank(self, node: Node) -> bool:
        """Whether a node computes with a place: as a number, or by comparing it with one. To take
        rows by their places is something else."""
        ranks = [one for one in node.all_input_nodes if one in self._ranks]
        is_computed = is_pointwise(node) and not is_view_of_torch(node)
        if not ranks or not is_computed or not is_narrow(ranks[0], self._sizes):
            return False
        is_number = bool(node.meta["val"].dtype.is_floating_point)
        return is_number or node.target in _COMPARISONS

    def _has_gradient(self, node: Node) -> bool:
        number = node.meta.get("forward", -1)
        if node not in self.of_model or number not in self._calls:
            return False
        return is_call(node, number, self._calls[number])

    def needs_order(self, node: Node) -> bool:
        """Whether it makes a difference for a node in which order the rows are."""
        return node.target in _IN_ORDER | _TAKEN | PARTS

    def is_light(self, node: Node) -> bool:
        """Whether a node in the order of all rows may be computed once more, of all of them."""
        queue, seen = [node], set()
        while queue:
            one = queue.pop()
            if one in seen or one not in self.ordered:
                continue
            seen.add(one)
            if computes_much(one) or is_random(one):
                return False
            queue += one.all_input_nodes
        return True

    def _sorts(self, node: Node) -> bool:
        if node.target not in _SORTS:
            return False
        source: Any = node.args[0]
        # Whole numbers are mostly lengths, by which texts are packed.
        if source not in self._follows or not source.meta["val"].dtype.is_floating_point:
            return False
        return self._along(node, source) in self._row_dims(source)

    def _row_dims(self, node: Node) -> list[int]:
        """Along which dimensions rows may lie: of several that grow for certain, the first."""
        dims = self._sizes.dims(node)
        return dims[:1] if self._sizes.are_certain else dims

    @staticmethod
    def _along(node: Node, source: Node) -> int | None:
        count, dim = len(shape_of(source)), dim_of(node)
        return None if dim is None or not count else dim % count
