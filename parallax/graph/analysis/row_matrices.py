"""Which matrices a product adds up the rows of: ``x.t() @ y``, as ``einsum`` writes it, too."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from parallax.graph.common.operations import is_view_of_torch
from parallax.graph.common.sizes import same_shape

aten: Any = torch.ops.aten

MATRIX_PRODUCTS = {aten.mm.default, aten.bmm.default}


def matrices_of(product: Node, scaled: Node) -> tuple[Node, Node] | None:
    """The two matrices of which a product adds up the rows; None if it does not, or is of several.

    Args:
        product: the operation.
        scaled: its first factor, without numbers that multiply it.
    """
    if product.target not in MATRIX_PRODUCTS or not isinstance(product.args[1], Node):
        return None
    first, second = _matrix(scaled, True), _matrix(product.args[1], False)
    return (first, second) if first is not None and second is not None else None


def _matrix(factor: Node, is_transposed: bool) -> Node | None:
    """The matrix that a factor is, or is the transpose of, whatever views it was made by."""
    value = factor.meta["val"]
    shape, strides = value.shape, value.stride()
    if value.dim() == 3:
        if not same_shape(shape[:1], (1,)):
            return None
        shape, strides = shape[1:], strides[1:]
    elif not is_transposed:
        return factor
    if is_transposed:
        shape, strides = shape[::-1], strides[::-1]
    node: Node = factor
    while is_view_of_torch(node):
        source: Any = node.args[0]
        node = source
        whole = node.meta["val"]
        if same_shape(whole.shape, shape) and same_shape(whole.stride(), strides):
            return node
    return None
