"""Gradients within a model that a hook, or a function's own backward, changes by their size.

On one device the gradient of an activation is that of a mean over the whole batch; on a worker it
is that of its own batch's mean, about as many times as large as there are workers. What is linear
in it (``g * 0.5``), or keeps its sign and scale (``g.clamp(min=0)``), does not mind. What bounds or
normalises it does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.analysis.loss_terms import from_batch, losses
from parallax.graph.common.user_code import line_of
from parallax.graph.step_graph import StepGraph

aten: Any = torch.ops.aten

_CLAMPS = {
    aten.clamp.default: (1, 2),
    aten.clamp_.default: (1, 2),
    aten.clamp_min.default: (1,),
    aten.clamp_max.default: (1,),
    aten.hardtanh.default: (1, 2),
}
"""Where their bounds are."""
_BENT = {
    aten.sign.default,
    aten.sgn.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.exp.default,
    aten.log.default,
    aten.sqrt.default,
    aten.rsqrt.default,
    aten.reciprocal.default,
    aten.round.default,
    aten.floor.default,
    aten.pow.Tensor_Scalar,
}
_SHAPED = {
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
_COMPARED = {getattr(aten, name).Scalar for name in ("gt", "ge", "lt", "le")}
_PRODUCTS = {aten.mul.Tensor, aten.mul_.Tensor}
_QUOTIENTS = {aten.div.Tensor, aten.div_.Tensor}
_BOUNDS = {aten.maximum.default, aten.minimum.default}


def note_bent_gradients(step: StepGraph) -> None:
    """Note gradients that are changed by their size, where they are averaged over workers."""
    own = from_batch(step)  # others are as on one device
    for _, following in losses(step.graph):
        gradients = _by_value(step.graph, following)
        for node in step.graph.nodes:
            if node in gradients and node in own and _bends(node, gradients):
                step.notes.append(
                    "a gradient within the model is bounded or normalised: on several workers it "
                    "is that of each one's own mean, about as many times as large as there are "
                    f"workers; bounds may have to grow as they do ({line_of(node)})"
                )
                return


def _by_value(graph: Graph, following: Collection[Node]) -> set[Node]:
    """What follows from the gradient of a loss, but for what has no more than its shape from it."""
    found: set[Node] = set()
    for node in graph.nodes:
        begins = found.isdisjoint(node.all_input_nodes)
        # A gradient begins as ones that have the shape of the loss.
        if node in following and begins is (node.target in _SHAPED):
            found.add(node)
    return found


def _bends(node: Node, gradients: set[Node]) -> bool:
    inputs = [source in gradients for source in node.all_input_nodes]
    if not any(inputs):
        return False
    arguments: Any = node.args
    target = node.target
    if target in _CLAMPS:
        bounds = [arguments[place] for place in _CLAMPS[target] if place < len(arguments)]
        return any(isinstance(bound, int | float) and bound != 0 for bound in bounds)
    if target in _COMPARED:
        return bool(arguments[1] != 0)
    if target in _PRODUCTS:
        return len(inputs) == 2 and all(inputs)
    if target in _QUOTIENTS:
        return arguments[1] in gradients
    return target in _BENT or (target in _BOUNDS and not all(inputs))
