"""Add up gradients in place, as autograd does.

While a step is captured the tracer holds every tensor, so autograd adds two gradients into a third
tensor. Once captured, it is known that the first is used by nothing else: the sum is taken in
place, and a matrix product is added to it as it is computed (``addmm``). A recurrent layer adds up
the gradients of its weights once for each time step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.common.operations import is_view, is_write
from parallax.graph.common.sizes import same_shape
from parallax.graph.passes.products import is_written_after
from parallax.rewrite.context import Rewriting

aten: Any = torch.ops.aten


def sum_in_place(work: Rewriting) -> None:
    """The pass: :func:`accumulate_in_place` on the worker's graph."""
    accumulate_in_place(work.graph)


def accumulate_in_place(graph: Graph) -> None:
    """Rewrite sums whose first operand is theirs alone. Equal up to rounding."""
    fresh: set[Node] = set()
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in order:
        if node.op != "call_function":
            continue
        if node.target is aten.add.Tensor and not node.kwargs and _is_alike(node):
            left, right = node.args[0], node.args[1]
            if not _is_own(left, node, fresh) and _is_own(right, node, fresh):
                left, right = right, left
            if _is_own(left, node, fresh):
                _add_to(graph, node, left, right, order)
                fresh.add(node)
                continue
        if _makes_new(node):
            fresh.add(node)


def _makes_new(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not (is_view(node) or is_write(node) or node.target is aten._unsafe_view.default)


def _is_alike(node: Node) -> bool:
    """Whether the sum is a tensor like its first operand could be, and laid out in order: what
    views it later does so for the layout that the sum of two layouts has."""
    values = [a.meta.get("val") if isinstance(a, Node) else None for a in node.args[:2]]
    left, right = values
    return (
        isinstance(left, torch.Tensor)
        and isinstance(right, torch.Tensor)
        and same_shape(left.shape, right.shape)
        and left.dtype is right.dtype
        and left.layout is right.layout is torch.strided
        and left.dtype.is_floating_point
        and left.device == right.device
        and node.meta["val"].is_contiguous()
    )


def _is_own(value: Any, user: Node, fresh: set[Node]) -> bool:
    """Whether a tensor was made here, densely, and is used by ``user`` only, and once."""
    return (
        isinstance(value, Node)
        and value in fresh
        and list(value.users) == [user]
        and list(user.args).count(value) == 1
        and value.meta["val"].is_contiguous()
    )


def _add_to(graph: Graph, node: Node, target: Any, other: Any, order: Mapping[Node, int]) -> None:
    is_product = (
        isinstance(other, Node)
        and other.target is aten.mm.default
        and list(other.users) == [node]
        and not any(is_written_after(source, other, order) for source in other.all_input_nodes)
    )
    if is_product:
        node.target = aten.addmm_.default
        node.args = (target, *other.args)
        graph.erase_node(other)
    else:
        node.target = aten.add_.Tensor
        node.args = (target, other)
