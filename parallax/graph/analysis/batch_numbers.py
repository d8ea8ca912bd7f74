"""Numbers of the batch in a captured step, which workers can put together of their own ones."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.batch_elements import BatchElements
from parallax.graph.analysis.divided_by import known_number
from parallax.graph.analysis.how_many import expression, how_many
from parallax.graph.analysis.loss_terms import MEAN, NLL, REDUCTIONS, SHAPES, SUM, reduction
from parallax.graph.analysis.reductions import (
    ALONG_ALL,
    BY_LABEL,
    OTHERS,
    ROWS,
    Statistic,
    are_zeros,
    dim_of,
    is_bounded,
    kind_of,
    reduced_dims,
)
from parallax.graph.analysis.row_matrices import MATRIX_PRODUCTS, matrices_of
from parallax.graph.common.aliases import memory_of
from parallax.graph.common.operations import (
    has_one_element,
    is_view,
    with_gradient,
    written_inputs,
)
from parallax.graph.common.sizes import same_shape
from parallax.graph.step_graph import StepGraph
from parallax.ops.statistics import MOST_COLUMNS, VARIANCES, Kind

aten: Any = torch.ops.aten

QUOTIENTS = {aten.div.Tensor, aten.div.Scalar, operator.truediv}
PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, operator.mul}
_DIFFERENCES = {aten.rsub.Scalar, aten.sub.Tensor, operator.sub}
AS_THEY_ARE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.neg.default,
    aten.abs.default,
    aten.expand.default,
    aten._local_scalar_dense.default,
    aten.scalar_tensor.default,
    operator.neg,
    torch.sym_float,
}
_SHIFTS = {aten.sub.Tensor, aten.add.Tensor}


class BatchNumbers:
    """Those of a step.

    Args:
        step: as it was captured.
        of_batch: what of it follows from the batch.
        kept: inputs that the next call trains with, as the step changes them.
    """

    def __init__(self, step: StepGraph, of_batch: BatchElements, kept: Collection[Node]) -> None:
        self._of_batch = of_batch
        self._kept = kept
        self._rows = [expression(one) for one in step.rows]
        self._sizes = {
            size
            for item, node in zip(step.inputs, step.own_placeholders(), strict=True)
            if item.kind == "state" and isinstance(node.meta.get("val"), torch.Tensor)
            for size in node.meta["val"].shape
            if size != 1 and not of_batch.are_sequences(size)
        }
        self._sizes |= {
            len(node.args[0])
            for node in step.graph.find_nodes(op="call_function", target=aten.stack.default)
            if all(map(self._has_rows, node.args[0]))
        }
        self.found: dict[Node, Statistic] = {}
        """What can be put together, by its node."""
        self.follows: set[Node] = set()
        """These, and what follows from one without a gradient."""
        self.alone: set[Node] = set()
        """What follows from them, and from nothing else of the batch."""
        self.others: set[Node] = set()
        """What cannot be put together, and what follows from it."""
        self.writes: list[tuple[Node, Node]] = []
        """What follows from the numbers alone, and by what it is written to what is kept: that is
        as on one device then, and does not follow from them."""
        self.detached: set[Node] = set()
        """Of these, losses and the like that also have gradients."""
        for node in step.graph.nodes:
            if node.op == "call_function":
                if node.meta.get("autograd") != "backward":
                    self._look_at_detached(node)
                if of_batch.is_data(node):
                    self._look_at(node)

    def _has_rows(self, node: Node) -> bool:
        shape = node.meta["val"].shape
        return len(shape) == 1 and self._of_batch.are_rows(shape[0])

    def _look_at_detached(self, user: Node) -> None:
        """Numbers that have gradients, which are not used here."""
        without = self._of_batch.is_data(user)
        for node in user.all_input_nodes:
            if takes_value(user, node) and (without or node not in with_gradient(user)):
                self._is_detached(node)

    def _is_detached(self, node: Node) -> bool:
        """Whether a node is a number of the batch, or follows from such alone."""
        if node in self.alone or node not in self._of_batch.batch:
            return True
        if node.op != "call_function" or self._of_batch.is_data(node):
            return False
        made: Any = node.args[0] if node.target is operator.getitem else node
        is_loss = made.target in REDUCTIONS
        if one := self._statistic(node):
            self._add(one)
        elif not is_loss and _has_few(node) and all(map(self._is_detached, node.all_input_nodes)):
            self.follows.add(node)
            self.alone.add(node)
        else:
            return False
        self.detached.add(node)
        return True

    def _add(self, one: Statistic) -> None:
        self.found[one.value] = one
        self.follows.add(one.value)
        self.alone.add(one.value)

    def _look_at(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if any(memory_of(one) in self._kept for one in written_inputs(node)):
            values = [one for one in inputs if one in self.follows]
            if values and all(one in self.alone for one in values):
                self.writes += [(value, node) for value in values]
                return
        if (one := self._statistic(node)) is not None:
            self._add(one)
        else:
            taken = {takes_value(node, one) for one in inputs if one in self.follows}
            if True in taken:
                self.follows.add(node)
                if all(one in self.alone or one not in self._of_batch.batch for one in inputs):
                    self.alone.add(node)
            if taken == {True, False} or self._is_other(node):
                self.others.add(node)
        if any(one in self.others and takes_value(node, one) for one in inputs):
            self.others.add(node)

    def reduction_of(
        self, node: Node, kinds: Collection[Kind], numbers: Collection[Node]
    ) -> Statistic | None:
        """The number that a node reduces the batch to, if it is one of these kinds.

        Args:
            node: it.
            kinds: those looked for.
            numbers: other numbers of the batch that it may be computed with.
        """
        kind, made = kind_of(node)
        if kind is None or kind not in kinds:
            return None
        return self._reduction(node, kind, made, numbers)

    def is_whole(self, node: Node, numbers: Collection[Node]) -> bool:
        """Whether a node is a number of the whole batch of which no gradient is known.

        Args:
            node: it.
            numbers: other numbers of the batch that it may be computed with.
        """
        if node.target in MATRIX_PRODUCTS:  # of too many columns
            return self.product_of(node, numbers, math.inf) is not None
        extremes: tuple[Kind, ...] = ("largest", "smallest")
        found = self.reduction_of(node, extremes, numbers)
        if kind_of(node)[0] is None:
            return self._is_other(node)
        return found is not None and not found.shape

    def loss_of(self, node: Node, made: Node, numbers: Collection[Node] = ()) -> Statistic | None:
        """The number that a loss function gives.

        Args:
            node: the number.
            made: the function's operation.
            numbers: other numbers of the batch that it may be computed with.
        """
        kind = {MEAN: "mean", SUM: "sum"}.get(reduction(made))
        source: Any = made.args[1]
        known = {*self.alone, *numbers}
        if kind is None or not all(
            isinstance(one, Node) and self._of_batch.adds_up(one, known) for one in made.args[:2]
        ):
            return None
        count = None
        if made.target in NLL:
            if node is made or node.args[1] != 0:
                return None
            weights = [one for one in made.users if one.args[1] == 1]
            count = weights[0] if weights and kind == "mean" else None
        elif not same_shape(source.meta["val"].shape, made.args[0].meta["val"].shape):  # type: ignore[union-attr]
            return None
        dims = tuple(range(source.meta["val"].dim()))
        return Statistic(node, kind, source, made, dims, (), count)  # type: ignore[arg-type]

    def mean_of_sum(self, node: Node, summed: Statistic) -> Statistic | None:
        """The mean that a quotient is, of a sum and how many are summed."""
        is_mean = self._is_size(node.args[1], summed)
        return self._of_sum(node, "mean", summed, node.args[1]) if is_mean else None

    def size_of(self, number: Any, summed: Statistic) -> int | None:
        """What a number is more than how many elements are summed, or how many rows: zero, or one
        less for what is free of them; None if it is neither."""
        size = _whole_number(number)
        if size is None:
            return None
        return next((more for more in (0, -1) if self._counts(size - more, summed)), None)

    def _statistic(self, node: Node) -> Statistic | None:
        kind, made = kind_of(node)
        if kind is not None:
            return self._reduction(node, kind, made)
        if made.target in REDUCTIONS:
            return self.loss_of(node, made)
        if (found := self.sum_of_rows(node)) is not None:
            return found
        arguments = node.args
        if node.target in QUOTIENTS and isinstance(part := arguments[0], Node):
            # A mean by hand.
            if summed := self._sum(part):
                return self.mean_of_sum(node, summed)
        elif node.target in _DIFFERENCES and len(arguments) == 2 and not node.kwargs:
            pair = arguments if node.target is aten.rsub.Scalar else arguments[::-1]
            if (summed := self._sum(pair[0])) and self._is_size(pair[1], summed):
                return self._of_sum(node, "sum", summed)
        return None

    def _reduction(
        self, node: Node, kind: Kind, made: Node, numbers: Collection[Node] = ()
    ) -> Statistic | None:
        source: Any = made.args[0]
        if source in self.alone or (reduced := reduced_dims(made)) is None:
            return None
        dims, shape = reduced
        # Of several dimensions one may be that of rows, where another one lies first.
        if shape and (len(shape) > 1 or not self._are_columns(source, dims, shape)):
            return None
        if not self._of_batch.adds_up(source, {*self.alone, *numbers}):
            return None
        if kind in VARIANCES:
            source = self._unshifted(source, bool(shape))
        return Statistic(node, kind, source, made, dims, shape)

    def sum_of_rows(self, node: Node, numbers: Collection[Node] = ()) -> Statistic | None:
        """The sum over rows that a node is without reducing one tensor.

        Args:
            node: it.
            numbers: other numbers of the batch that it may be computed with.
        """
        if node.target in MATRIX_PRODUCTS:
            return self.product_of(node, numbers)
        return self._sum_by_label(node, numbers) if node.target in BY_LABEL else None

    def product_of(
        self, node: Node, numbers: Collection[Node] = (), most: float = MOST_COLUMNS
    ) -> Statistic | None:
        """The sum over the rows of two tensors, of products of their columns, that a node is.

        Args:
            node: a product of matrices.
            numbers: other numbers of the batch that they may be computed with.
            most: how many elements it may have.
        """
        scaled: Any = node.args[0]
        is_mean = False
        while isinstance(scaled, Node):
            if self._is_mean_of(scaled) and not is_mean:
                is_mean = True
            elif not self._is_scaled(scaled):
                break
            scaled = scaled.args[0]
        matrices = matrices_of(node, scaled)
        if matrices is None:
            return None
        shape = tuple(node.meta["val"].shape[-2:])
        known = {*self.alone, *numbers}
        adds_up = all(
            one in self._of_batch.batch and one not in known and self._of_batch.adds_up(one, known)
            for one in matrices
        )
        second = matrices[1]
        if not adds_up or not _are_few(shape, most) or not self._has_places(second):
            return None
        kind: Kind = "mean" if is_mean else "sum"
        return Statistic(node, kind, second, node, (0,), shape, ROWS if is_mean else None)

    def _sum_by_label(self, node: Node, numbers: Collection[Node]) -> Statistic | None:
        """What a node adds up of the rows of the batch for each label, such as how many it has.

        Args:
            node: an operation that adds to zeros, at places along the first dimension.
            numbers: other numbers of the batch that it may be computed with.
        """
        zeros, dim, labels, rows = node.args[:4]
        shape = tuple(node.meta["val"].shape)
        known = {*self.alone, *numbers}
        if not isinstance(zeros, Node) or not are_zeros(zeros) or len(zeros.users) > 1:
            return None
        adds_up = all(
            isinstance(one, Node) and one not in known and self._of_batch.adds_up(one, known)
            for one in (labels, rows)
        )
        # Rows of the batch may be labels, too, as the nodes of a graph are.
        is_by_row = expression(shape[0]) in self._rows and not is_bounded(labels, shape[0])
        if dim != 0 or not adds_up or node.kwargs or is_by_row:
            return None
        if not self._are_columns(labels, (0,), shape):  # type: ignore[arg-type]
            return None
        return Statistic(node, "sum", labels, node, (0,), shape)  # type: ignore[arg-type]

    def _of_sum(
        self, node: Node, kind: Kind, summed: Statistic, count: Any = None
    ) -> Statistic | None:
        value = node.meta.get("val")
        size = math.prod(value.shape) if isinstance(value, torch.Tensor) else 1
        if not isinstance(size, int) or size != math.prod(summed.shape):
            return None
        return Statistic(node, kind, summed.source, node, summed.dims, summed.shape, count)

    def _are_columns(
        self,
        source: Node,
        dims: Collection[int],
        shape: Collection[Any],
    ) -> bool:
        """Whether what is not reduced are columns of the batch, as many as one number of a model:
        where they lie along another dimension, those of one are none of these."""
        return _are_few(shape) and self._reduces_rows(source, dims, shape)

    def _reduces_rows(self, source: Node, dims: Collection[int], shape: Collection[Any]) -> bool:
        known = any(size in self._sizes for size in shape if isinstance(size, int))
        return known and 0 in dims and self._has_places(source)

    def _has_places(self, source: Node) -> bool:
        """Whether the first dimension is that of rows, or of all their places."""
        return self._of_batch.are_places(source.meta["val"].shape[0])

    def _is_other(self, node: Node) -> bool:
        """Whether a node is a number of the batch, or of its columns, that is not found."""
        if node.target in OTHERS:
            return not self._is_of_row(node)
        if node.target in MATRIX_PRODUCTS:
            return self.product_of(node, most=math.inf) is not None
        kind, made = kind_of(node)
        source: Any = made.args[0] if made.args else None
        if made.target in ALONG_ALL:
            return self._compares_rows(source, made)
        if kind is None:
            return False
        if source in self.alone or (reduced := reduced_dims(made)) is None or not reduced[1]:
            return False
        return self._reduces_rows(source, *reduced) and self._of_batch.adds_up(source, self.alone)

    def _compares_rows(self, source: Node, made: Node) -> bool:
        """Whether an operation puts the rows of the batch in order, or computes each with all."""
        value = source.meta["val"]
        dim = dim_of(made)
        # Whole numbers along the first dimension are mostly places, such as where rows begin.
        is_first = value.dtype.is_floating_point and dim is not None and value.dim() > 0
        is_first = is_first and dim % value.dim() == 0
        rows = is_first and self._of_batch.are_rows(value.shape[0]) and source not in self.alone
        return rows and self._of_batch.adds_up(source, self.alone)

    def _is_of_row(self, node: Node) -> bool:
        """Whether a node reduces each row of the batch, or one alone."""
        value = node.meta.get("val")
        is_number = isinstance(value, torch.Tensor) and value.dim() == 0
        is_whole = is_number or node.target is aten.bincount.default
        return not is_whole or self._of_batch.is_of_item(node.args[0])

    def _is_scaled(self, node: Node) -> bool:
        """Whether a node is a tensor times, or by, a number that is no size of the batch."""
        by = node.args[1] if node.target in PRODUCTS | QUOTIENTS else None
        if by is None or self._is_mean_of(node):
            return False
        return not isinstance(by, Node) or _is_number(by)

    def _is_mean_of(self, node: Node) -> bool:
        """Whether a node is a tensor divided by how many rows the batch has, or several views."""
        size = _whole_number(node.args[1]) if node.target in QUOTIENTS else None
        return size is not None and self._of_batch.are_places(size)

    def _sum(self, node: Any) -> Statistic | None:
        """The sum that a number is."""
        while isinstance(node, Node) and node.target in AS_THEY_ARE - {aten.neg.default}:
            node = node.args[0]
        found = self.found.get(node) if isinstance(node, Node) else None
        return found if found is not None and found.kind == "sum" else None

    def _is_size(self, number: Any, summed: Statistic) -> bool:
        """Whether a number is how many elements are summed, or how many rows."""
        size = _whole_number(number)
        return size is not None and self._counts(size, summed)

    def _counts(self, size: int | torch.SymInt, summed: Statistic) -> bool:
        shape = summed.source.meta["val"].shape
        summed_up = how_many(summed.source) if not summed.shape else expression(shape[0])
        return expression(size) in (summed_up, *self._rows)

    def _unshifted(self, source: Node, of_columns: bool) -> Node:
        """What has the same variance as a tensor: before numbers were taken from it."""
        while source.target in _SHIFTS and isinstance(whole := source.args[0], Node):
            shift: Any = source.args[1]
            # One element alone may be a batch of one row.
            is_alike = not isinstance(shift, Node) or _is_number(shift)
            if shift in self.alone:
                is_alike = of_columns or has_one_element(shift)
            if not is_alike or not _is_as_large(whole, source):
                break
            source = whole
        return source


def takes_value(node: Node, number: Node) -> bool:
    """Whether what a node computes follows from the value of an input, and not only its size, as
    that of a slice does."""
    if node.target in SHAPES:
        return False
    if isinstance(number.meta.get("val"), torch.Tensor):
        return True
    if (
        not isinstance(node.target, torch._ops.OpOverload)
        or node.target is aten.scalar_tensor.default
    ):
        return True
    if node.target is aten.full.default:
        return number is node.args[1] and number not in node.args[0]  # type: ignore[operator]
    return torch.Tag.pointwise in node.target.tags and not is_view(node)


def _are_few(shape: Collection[Any], most: float = MOST_COLUMNS) -> bool:
    """Whether a tensor has no more elements than so many, whatever batch there is."""
    return all(isinstance(size, int) for size in shape) and math.prod(shape) <= most


def _whole_number(number: Any) -> int | torch.SymInt | None:
    size = known_number(number)
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    return size if isinstance(size, int | torch.SymInt) else None


def _has_few(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or _are_few(value.shape)


def _is_number(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or not value.dim()


def _is_as_large(first: Node, second: Node) -> bool:
    one, other = first.meta.get("val"), second.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return same_shape(one.shape, other.shape)
