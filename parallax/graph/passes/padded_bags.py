"""Bags that leave out a padding row, as bags of which those rows weigh nothing.

``nn.EmbeddingBag(padding_idx=...)`` tells its kernels one row of the table. Where they are given
rows that a batch needs, in place of the table, that row has another number in each batch, or none.
Weights of the rows say the same, whatever numbers these have: zero for padding, else one; in a
mean, one over how many ids of a bag are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.analysis.lookups import OF_WEIGHTS
from parallax.graph.common.operations import add_call

aten: Any = torch.ops.aten

_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
_SUM, _MEAN = 0, 1


@dataclass(frozen=True)
class _Places:
    """Where an operation on bags has its arguments."""

    mode: int
    padding: int
    weights: int | None
    bag_of_each: int = 0
    """Of each id, which is a result of the forward pass."""

    def pads(self, node: Node) -> bool:
        """Whether it leaves out a row, and adds up the others."""
        arguments = node.args
        padded = len(arguments) > self.padding and arguments[self.padding] != -1
        return bool(padded and arguments[self.mode] in (_SUM, _MEAN))

    def weigh(self, node: Node, weights: Node) -> None:
        """Let it leave out none, and add up all by weights."""
        arguments = list(node.args)
        arguments[self.mode], arguments[self.padding] = _SUM, -1
        if self.weights is not None:
            arguments[self.weights] = weights
        node.args = tuple(arguments)


_FORWARD = _Places(mode=4, padding=8, weights=6)
_BACKWARD = {
    aten._embedding_bag_backward.default: _Places(8, 11, 10, 3),
    aten._embedding_bag_dense_backward.default: _Places(7, 9, 8, 2),
    OF_WEIGHTS: _Places(5, 6, None, 4),
}


def weigh_padding(graph: Graph) -> None:
    """Let all bags of a step that leave out a row have weights instead."""
    weighed: dict[Any, tuple[Node, Node]] = {}
    for node in list(graph.nodes):
        if node.target in _BAGS and _FORWARD.pads(node):
            with graph.inserting_before(node):
                weighed[node] = kept, weights = _weights(graph, node)
            _FORWARD.weigh(node, weights)
        elif (places := _BACKWARD.get(node.target)) is not None and places.pads(node):
            bag_of_each: Any = node.args[places.bag_of_each]
            kept, weights = weighed[bag_of_each.args[0]]
            places.weigh(node, weights)
            if node.target is OF_WEIGHTS:
                _leave_out(graph, node, kept)


def _weights(graph: Graph, node: Node) -> tuple[Node, Node]:
    """Of each id, whether it counts, and how much; at the graph's insertion point."""
    table, ids, offsets = node.args[:3]
    assert isinstance(table, Node)
    mode, given, padding = (node.args[place] for place in (4, 6, 8))
    kept = add_call(graph, aten.ne.Scalar, ids, padding)
    kept = add_call(graph, aten._to_copy.default, kept, dtype=table.meta["val"].dtype)
    if mode == _SUM:
        return kept, kept if given is None else add_call(graph, aten.mul.Tensor, given, kept)
    place = add_call(graph, aten.cumsum.default, add_call(graph, aten.ones_like.default, ids), 0)
    before = add_call(graph, aten.searchsorted.Tensor, offsets, place)
    bags = add_call(graph, aten.sub.Tensor, before, 1)
    none = add_call(graph, aten.zeros_like.default, offsets, dtype=table.meta["val"].dtype)
    counts = add_call(graph, aten.index_add.default, none, 0, bags, kept)
    count = add_call(graph, aten.index_select.default, counts, 0, bags)
    some = add_call(graph, aten.clamp_min.default, count, 1)
    return kept, add_call(graph, aten.div.Tensor, kept, some)


def _leave_out(graph: Graph, gradient: Node, kept: Node) -> None:
    """Let weights of padding have no gradient."""
    with graph.inserting_after(gradient):
        product = graph.call_function(aten.mul.Tensor, (gradient, kept))
    product.meta = dict(gradient.meta)
    gradient.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)
