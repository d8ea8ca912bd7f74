"""Gradients of several backward passes in one step.

Each pass adds to what ``.grad`` holds, and capture marks the sum again. What is marked is
aggregated, so of a sum's marks those remain whose value is used: the last where micro-batches are
added up, the first where an optimizer takes the gradient and another model's backward pass then
leaves one that nobody takes, as the discriminator of a GAN has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.common.aliases import tensor_of
from parallax.graph.common.operations import is_view, returned_input
from parallax.ops import marks

aten: Any = torch.ops.aten

_ADD = (aten.add.Tensor, aten.add_.Tensor)


def keep_marks_in_use(graph: Graph) -> None:
    """Leave one mark for each gradient that is used, on a value of this worker alone."""
    _start_anew_after_zeros(graph)
    _drop_unused(graph)
    for node in list(graph.nodes):
        if not _is_mark(node):
            continue
        total: Any = node.args[0]
        before = _added_to(total, node)
        if before is None:
            continue
        if all(user in (total, node) for user in _users(before)):
            own: Any = before.args[0]
            before.replace_all_uses_with(own)
            graph.erase_node(before)
        else:
            _mark_what_is_added(graph, node, total)


def _mark_what_is_added(graph: Graph, mark: Node, total: Node) -> None:
    """The earlier gradient has been aggregated, and used: only what is added to it is local."""
    mark.replace_all_uses_with(total)
    graph.erase_node(mark)
    added: Any = total.args[1]
    with graph.inserting_before(total):
        own = graph.call_function(marks.GRADIENT, (added, mark.args[1]))
    own.meta = {**mark.meta, "val": added.meta["val"]}
    total.replace_input_with(added, own)


def _start_anew_after_zeros(graph: Graph) -> None:
    """What is added to zeros (``zero_grad(set_to_none=False)``) is a gradient of its own."""
    for node in list(graph.nodes):
        if not _is_mark(node):
            continue
        total = node.args[0]
        if _added_to(total, node) is None or total.args[0].target is not aten.zero_.default:
            continue
        node.replace_input_with(total, total.args[1])
        if not total.users:
            graph.erase_node(total)


def _drop_unused(graph: Graph) -> None:
    """Remove marks that nobody reads, with what was added for them to an earlier gradient."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        if _is_mark(node):
            if not node.users:
                graph.erase_node(node)
        elif not node.users and returned_input(node) is not None:
            gradient = tensor_of(node)
            if _is_mark(gradient) and all(order[u] <= order[node] for u in _users(gradient)):
                graph.erase_node(node)


def _is_mark(node: Node) -> bool:
    return node.target is marks.GRADIENT


def _added_to(total: Any, mark: Node) -> Node | None:
    """The earlier gradient of the same variable that a sum adds another to."""
    if not isinstance(total, Node) or total.target not in _ADD:
        return None
    before = tensor_of(total.args[0]) if isinstance(total.args[0], Node) else None
    return before if before and _is_mark(before) and before.args[1] == mark.args[1] else None


def _users(node: Node) -> Iterator[Node]:
    """All nodes that read or write a tensor, under any of its names."""
    aliases = [node]
    for alias in aliases:
        for user in alias.users:
            yield user
            written = returned_input(user)
            if written is alias or (written is None and user.op != "output" and is_view(user)):
                aliases.append(user)
