"""Copy what cannot be viewed as the capture believes, since an operation lies about its layout.

A step is captured on tensors without storage. Of some operations these get other strides than the
operation's kernel gives the real ones: where the input does not lie in order, kernels write their
result in order all the same. A view that is possible of the one is not possible of the other then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.operations import add_call, is_view

aten: Any = torch.ops.aten

_MISJUDGED = {
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.softplus_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.hardsigmoid_backward.default,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
    aten._log_softmax_backward_data.default,
    aten.roll.default,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
}


def copy_before_views(graph: Graph) -> None:
    """Put what follows from such operations in order before it is viewed as another shape."""
    doubtful: set[Node] = set()
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload):
            if node.op == "call_function" and any(one in doubtful for one in node.all_input_nodes):
                doubtful.add(node)  # one of several results
            continue
        follows = [source for source in node.all_input_nodes if source in doubtful]
        if node.target is aten.view.default and follows:
            source = follows[0]
            with graph.inserting_before(node):
                copy = add_call(
                    graph, aten.clone.default, source, memory_format=torch.contiguous_format
                )
            node.replace_input_with(source, copy)
        elif node.target in _MISJUDGED:
            if not _in_order(node):
                doubtful.add(node)
        elif follows and (is_view(node) or torch.Tag.pointwise in node.target.tags):
            doubtful.add(node)


def _in_order(node: Node) -> bool:
    """Whether all that it gives is believed to lie in order, as kernels write it."""
    given = node.meta.get("val")
    values = given if isinstance(given, list | tuple) else [given]
    return all(v.is_contiguous() for v in values if isinstance(v, torch.Tensor))
