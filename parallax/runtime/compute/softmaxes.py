"""Let a cross entropy over many classes write its softmax where the scores lie.

Capture has written its gradient as ``c (softmax - onehot)`` (:mod:`parallax.graph.passes.losses`).
The logarithms of the softmax are then needed for one number a row, and for the softmax itself. If
nobody reads the scores later, :mod:`parallax.ops.softmax` makes both in one pass over memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.common.aliases import base_of, uses_of
from parallax.graph.common.operations import add_call, is_view, is_write
from parallax.ops.softmax import WRITE_SOFTMAX

aten: Any = torch.ops.aten
_IGNORED = -100
"""In place of a class: PyTorch's own default."""


@dataclass(frozen=True)
class _CrossEntropy:
    """The nodes of one."""

    logarithms: Node
    loss: Node
    softmax: Node

    @property
    def scores(self) -> Node:
        found = self.logarithms.args[0]
        assert isinstance(found, Node)
        return found


def write_softmaxes_in_place(graph: Graph) -> int:
    """Replace the cross entropies of a graph that can be made so. Equal up to rounding.

    Args:
        graph: of one worker; its nodes carry example values in ``meta["val"]``. It knows of no
            kernels yet that are functions, which could return a view of anything.

    Returns:
        How many were replaced.
    """
    found = graph.find_nodes(op="call_function", target=aten._log_softmax.default)
    if not found:
        return 0
    order = {node: place for place, node in enumerate(graph.nodes)}
    replaced = 0
    for node in found:
        one = _cross_entropy(node)
        if one is not None and _is_last_reader(node, order):
            classes = one.loss.args[1]
            assert isinstance(classes, Node)
            if order[classes] < order[node]:
                _replace(graph, one)
                replaced += 1
    return replaced


def _cross_entropy(node: Node) -> _CrossEntropy | None:
    """What the logarithms of a softmax are computed for, if that is a loss and its gradient."""
    value = node.meta.get("val")
    _, dimension, widened = node.args
    if not isinstance(value, torch.Tensor) or widened or value.dim() != 2:
        return None
    if value.device.type != "cpu" or value.dtype not in (torch.float32, torch.float64):
        return None
    if dimension not in (1, -1):
        return None
    users = {user.target: user for user in node.users}
    if len(node.users) != 2 or set(users) != {aten.nll_loss_forward.default, aten.exp_.default}:
        return None
    loss = users[aten.nll_loss_forward.default]
    if loss.args[0] is not node or loss.args[2] is not None:
        return None
    return _CrossEntropy(node, loss, users[aten.exp_.default])


def _is_last_reader(node: Node, order: dict[Node, int]) -> bool:
    """Whether the scores lie in memory of their own that nothing reads or changes later."""
    scores = node.args[0]
    assert isinstance(scores, Node)
    base = base_of(scores)
    if base.op != "call_function" or not scores.meta["val"].is_contiguous():
        return False
    return all(
        order[user] <= order[node]
        for _, user in uses_of(base)
        if user.op == "output" or is_write(user) or not is_view(user)
    )


def _replace(graph: Graph, one: _CrossEntropy) -> None:
    _, classes, _, reduction, ignored = one.loss.args
    with graph.inserting_before(one.logarithms):
        shares = add_call(graph, WRITE_SOFTMAX, one.scores, classes, ignored)
    with graph.inserting_before(one.loss):
        left_out = add_call(graph, aten.eq.Scalar, classes, ignored)
        nothing = add_call(graph, aten.zeros_like.default, classes)
        places = add_call(graph, aten.masked_fill.Scalar, nothing, left_out, _IGNORED)
    one.loss.args = (shares, places, None, reduction, _IGNORED)
    one.softmax.replace_all_uses_with(one.scores)
    graph.erase_node(one.softmax)
    graph.erase_node(one.logarithms)
