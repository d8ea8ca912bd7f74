"""Numbers that a step changes in place, such as ``loss /= n``: computed anew.

What a loss is made of is read from the graph, where a tensor that changes is several.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.analysis.loss_terms import backward_passes
from parallax.graph.common.aliases import tensor_of
from parallax.graph.common.operations import (
    add_call,
    ancestors,
    has_one_element,
    is_view,
    returned_input,
)

aten: Any = torch.ops.aten


def compute_anew(graph: Graph) -> None:
    """Let what changes tensors of one element in place, or divides and multiplies others by such
    one, make others, where losses follow from them and the step has no views of them."""
    order: dict[Node, int] = {}
    leading = ancestors(loss for _, loss in backward_passes(graph))
    for node in list(graph.nodes):
        written = returned_input(node)
        if written is None or (target := _anew(node)) is None:
            continue
        changed = tensor_of(written)
        if changed not in leading or not _is_own(changed):
            continue
        if not has_one_element(changed) and not _scales(node):
            continue
        order = order or {one: place for place, one in enumerate(graph.nodes)}
        others = [one for one in changed.users if order[one] > order[node]]
        with graph.inserting_before(node):
            new = add_call(graph, target, changed, *node.args[1:], **node.kwargs)
        if not _is_alike(new, changed):
            graph.erase_node(new)
            continue
        new.meta = {**node.meta, "val": new.meta["val"]}
        order[new] = order[node]
        leading.add(new)
        for user in others:
            user.replace_input_with(changed, new)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _anew(node: Node) -> Any:
    """The operation that gives what one in place changes its first argument to."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("_") or node.args[:1] != (returned_input(node),):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, target._overloadname, None)


def _is_own(node: Node) -> bool:
    """Whether it is a tensor that the step computes and has no views of."""
    made: Any = node.args[0] if node.target is operator.getitem else node
    if not isinstance(made.target, torch._ops.OpOverload) or made.target.namespace != "aten":
        return False
    return not is_view(made) and not any(map(_is_alias, node.users))


def _scales(node: Node) -> bool:
    return node.target in (aten.div_.Tensor, aten.mul_.Tensor) and has_one_element(node.args[1])


def _is_alias(user: Node) -> bool:
    return user.op == "call_function" and is_view(user) and returned_input(user) is None


def _is_alike(new: Node, old: Node) -> bool:
    one, other = new.meta["val"], old.meta["val"]
    return one.dtype is other.dtype and one.shape == other.shape
