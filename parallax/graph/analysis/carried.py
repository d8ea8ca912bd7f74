"""Gradients that one call of the step leaves for the next: whether the step reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from parallax.graph.common.aliases import memory_of, tensor_of
from parallax.graph.common.operations import is_view, returned_input
from parallax.graph.common.torch_internals import get_proxy_mode, node_of
from parallax.ops import marks

aten: Any = torch.ops.aten

_OVERWRITES = (aten.zero_.default, aten.fill_.Scalar, aten.copy_.default)
_ADDS = (aten.add_.Tensor,)


def is_cleared(gradient: torch.Tensor) -> bool:
    """Whether, while the step is captured, a gradient was set to zero last (``grad.zero_()``)."""
    mode = get_proxy_mode()
    node = None if mode is None else node_of(mode.tracer, gradient)
    return node is not None and node.target is aten.zero_.default


def read_by_step(module: GraphModule, left: Mapping[str, torch.Tensor]) -> list[str]:
    """Which gradients of an earlier call a tidied graph reads, other than to add to them.

    Args:
        left: the gradients that the capture put in their places, by variable.
    """
    places = {tensor.untyped_storage()._cdata: name for name, tensor in left.items()}
    found = []
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            name = places.get(value.untyped_storage()._cdata)
            if name is not None and _is_read(node):
                found.append(name)
    return found


def _is_read(left: Node) -> bool:
    for node in left.graph.nodes:
        if not any(memory_of(source) is left for source in node.all_input_nodes):
            continue
        own = node.args[0] if node.args else None
        into = isinstance(own, Node) and memory_of(own) is left
        if node.target in _OVERWRITES and into and tensor_of(own) is left:  # type: ignore[arg-type]
            return False
        adds = node.target in _ADDS and into and memory_of(node.args[1]) is not left
        if not adds and (not is_view(node) or returned_input(node) is not None):
            return True
    return False


def used_gradients(graph: Graph) -> set[str]:
    """The variables whose gradients something in a tidied graph uses."""
    found = graph.find_nodes(op="call_function", target=marks.GRADIENT)
    return {str(node.args[1]) for node in found}
