"""What a loss reduces rows of the batch to, in ways that nothing else knows.

Means and sums that a loss is a sum of are each worker's own, and numbers of known forms are put
together. Whatever else has no rows, but follows from some, is to be of all workers' rows: sums by
group that a product of matrices makes, products of columns that are added up.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.batch_numbers import PRODUCTS, QUOTIENTS, takes_value
from parallax.graph.analysis.coupled import LINEAR
from parallax.graph.analysis.divided_by import SUMS
from parallax.graph.analysis.how_many import expression
from parallax.graph.analysis.loss_terms import REDUCTIONS, SHAPES, from_batch, losses, made_of
from parallax.graph.analysis.reductions import BY_LABEL, kind_of, reduced_dims
from parallax.graph.analysis.row_matrices import MATRIX_PRODUCTS
from parallax.graph.analysis.row_places import PARTS, RowSizes, is_tensor, shape_of
from parallax.graph.common.operations import is_view_of_torch
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks

aten: Any = torch.ops.aten

_TAKEN = {
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.take.default,
    aten.embedding.default,
}
"""What takes some elements as they are."""
_PRODUCTS = MATRIX_PRODUCTS | {aten.mv.default}
_ADDING = {
    aten.mean.default,
    aten.mean.dim,
    aten.dot.default,
    aten.addmm.default,
    aten.baddbmm.default,
    *SUMS,
    *BY_LABEL,
    *_PRODUCTS,
    *REDUCTIONS,
}
"""Sums over rows; of others, such as singular values, an average is none of all rows."""
_FACTORED = {aten._linalg_svd.default, aten.linalg_qr.default, aten._linalg_eigh.default}
"""What has as many results as the smaller side of a matrix is long."""
_AS_THEY_ARE = {aten.detach.default, aten.expand.default, aten.mul.Scalar, aten.div.Scalar}


def reduced_rows(step: StepGraph, known: Collection[Node]) -> Iterator[Node]:
    """What first has no rows, and is no sum that a loss is a sum of.

    Args:
        step: as it was captured. If that is for one size of batch, sizes may be equal by chance.
        known: what is seen to otherwise.
    """
    if len({expression(one) for one in step.rows}) != 1:
        return
    sizes = RowSizes(step.rows[0])
    inner = made_of(loss for loss, _ in losses(step.graph))
    # As against numbers that the batch brings.
    of_rows = from_batch(step, {*SHAPES, marks.GRADIENT}, filter(sizes.dims, step.given()))
    for node in step.graph.nodes:
        if node not in inner or node not in of_rows or node in known:
            continue
        if _reduces(node, sizes, of_rows) and _is_bent(node, inner, of_rows, known):
            yield node


def _reduces(node: Node, sizes: RowSizes, of_rows: Collection[Node]) -> bool:
    is_part = node.target in _TAKEN | PARTS | SHAPES or is_view_of_torch(node)
    if node.op != "call_function" or is_part or not is_tensor(node):
        return False
    made: Any = node.args[0] if node.target is operator.getitem else node
    if made.target in REDUCTIONS:  # losses are means of their own
        return False
    given = [one for one in made.all_input_nodes if one in of_rows and sizes.dims(one)]
    if not given or not sizes.dims(node):
        return bool(given)
    # What is left may be as large as the rows, or a multiple of them, by chance.
    if made.target in _FACTORED and not sizes.are_certain:
        return any(len(shape_of(one)) == 2 for one in given)
    return not sizes.are_certain and sizes.count in _reduced(node, given, sizes.count)


def _reduced(node: Node, given: Sequence[Node], rows: int) -> Collection[Any]:
    """The sizes of the dimensions that a node adds up, or the like, if rows may be one of these."""
    if node.target in _PRODUCTS:
        second = node.args[1]
        if len(given) < 2 or not isinstance(second, Node):
            return ()
        return [*map(expression, shape_of(second)[-2:][:1])]
    if kind_of(node)[0] is None or (reduced := reduced_dims(kind_of(node)[1])) is None:
        return ()
    shape = [*map(expression, shape_of(given[0]))]
    if shape[0] == rows and 0 not in reduced[0]:  # they are mostly the first dimension
        return ()
    return [shape[dim] for dim in reduced[0] if dim < len(shape)]


def _is_bent(
    node: Node, inner: Collection[Node], of_rows: Collection[Node], known: Collection[Node]
) -> bool:
    """Whether a loss is no sum of what a number adds up."""
    if node.target not in _ADDING:
        return True
    queue, seen = [node], {node}
    while queue:
        one = queue.pop()
        for user in one.users:
            if user in seen or user not in inner or user in known or not takes_value(user, one):
                continue
            if not _is_linear(user, one, of_rows):
                return True
            seen.add(user)
            queue.append(user)
    return False


def _is_linear(user: Node, one: Node, of_rows: Collection[Node]) -> bool:
    if user.meta.get("autograd") == "backward":
        return False
    if user.target in LINEAR | _AS_THEY_ARE or is_view_of_torch(user):
        return True
    others = [other for other in user.args if other is not one]
    is_factor = user.target in PRODUCTS or (user.target in QUOTIENTS and user.args[0] is one)
    return is_factor and len(others) == 1 and others[0] not in of_rows
