"""What a captured step computes with autograd on, but no gradient flows through."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.analysis.loss_terms import losses
from parallax.graph.common.operations import with_gradient


def cut_off(graph: Graph) -> set[Node]:
    """What is detached after it was made, or by what follows from it: ``(e / e.max()).detach()``.

    Nothing is found where gradients are differentiated further: what they are computed with has
    gradients, too.
    """
    nodes = list(graph.nodes)
    backward = {node for node in nodes if _mode(node) == "backward"}
    if any(_mode(node) == "on" and not backward.isdisjoint(node.all_input_nodes) for node in nodes):
        return set()
    reached = {node.meta["backward_of"][0] for node in backward if "backward_of" in node.meta}
    flows = {loss for loss, _ in losses(graph)}
    for node in reversed(nodes):
        if any(_takes_gradient(user, node, reached, flows) for user in node.users):
            flows.add(node)
    return {node for node in nodes if _mode(node) == "on" and node not in flows}


def _takes_gradient(user: Node, node: Node, reached: set[Any], flows: set[Node]) -> bool:
    """Whether what is computed of a node may have a gradient, and hand it on to that."""
    mode = _mode(user)
    if mode in ("off", "backward") or user.op == "output" or node not in with_gradient(user):
        return False
    if not all(map(_may_have_gradient, (node, user))):
        return False
    # That of a sum is handed on without an operation. What is not known may be anything.
    return mode != "on" or user in flows or user.meta["forward"] in reached


def _may_have_gradient(node: Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return isinstance(value, tuple | list) or value is None  # several results


def _mode(node: Node) -> Any:
    return node.meta.get("autograd")
