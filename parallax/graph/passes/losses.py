"""Write the gradient of a cross entropy over many classes once.

PyTorch's backward fills a matrix [rows, classes] with zeros but for one number a row, and then
subtracts the softmax times the row's sum. With many classes that costs three passes over large
memory. The same gradient is ``c (softmax - onehot)`` with one number ``c`` a row, and can be
written where the logarithms of the softmax lie, if nobody reads these any more.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.common.operations import add_call
from parallax.graph.common.sizes import sizes_of

aten: Any = torch.ops.aten

LEAST = 1 << 16
"""Numbers in a matrix that is worth it."""
_MEAN = 1


def write_softmax_gradients_once(graph: Graph) -> None:
    """Rewrite the gradient of every large cross entropy. Equal up to rounding."""
    for node in graph.find_nodes(
        op="call_function", target=aten._log_softmax_backward_data.default
    ):
        if _is_of_cross_entropy(node):
            _rewrite(graph, node)


def _is_of_cross_entropy(node: Node) -> bool:
    gradient, logarithms, dimension, dtype = node.args
    if not isinstance(gradient, Node) or not isinstance(logarithms, Node):
        return False
    if gradient.target is not aten.nll_loss_backward.default or len(gradient.users) > 1:
        return False
    above, of, _, weight, *_ = gradient.args
    value = logarithms.meta["val"]
    return (
        of is logarithms
        and weight is None
        and isinstance(above, Node)
        and value.dim() == 2
        and dimension in (1, -1)
        and value.dtype is dtype is above.meta["val"].dtype
        and math.prod(sizes_of(value)) >= LEAST
    )


def _rewrite(graph: Graph, node: Node) -> None:
    gradient: Any = node.args[0]
    above, logarithms, classes, _, reduction, ignored, total = gradient.args
    later = {node, gradient}
    is_last = logarithms.target is aten._log_softmax.default and all(
        user in later or user.target is aten.nll_loss_forward.default for user in logarithms.users
    )
    with graph.inserting_before(node):
        if reduction == _MEAN:
            above = add_call(graph, aten.div.Tensor, above, total)
        left_out = add_call(graph, aten.eq.Scalar, classes, ignored)
        # One number a row: none for rows that are left out, whatever the loss was divided by.
        nothing = add_call(graph, aten.zeros_like.default, above)
        factors = add_call(graph, aten.where.self, left_out, nothing, above)
        chosen = add_call(graph, aten.masked_fill.Scalar, classes, left_out, 0)
        column = add_call(graph, aten.unsqueeze.default, factors, 1)
        softmax = add_call(graph, (aten.exp_ if is_last else aten.exp).default, logarithms)
        scaled = add_call(graph, aten.mul_.Tensor, softmax, column)
        result = add_call(
            graph,
            aten.scatter_add_.default,
            scaled,
            1,
            add_call(graph, aten.unsqueeze.default, chosen, 1),
            add_call(graph, aten.neg.default, column),
        )
    result.meta.update({key: value for key, value in node.meta.items() if key != "val"})
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    graph.erase_node(gradient)
