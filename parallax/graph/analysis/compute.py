"""How much a graph's operations compute: matrix products and convolutions, in operations; and what
others take as long as."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from parallax.graph.common.sizes import size_of, sizes_of

aten: Any = torch.ops.aten

_ALIKE = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operations without a formula of torch's, and those that have theirs."""
_FUNCTIONS = frozenset(
    (
        *("exp", "log", "tanh", "sigmoid", "erf", "sin", "cos", "pow", "softplus", "mish", "elu"),
        *("gelu", "gelu_backward", "silu", "silu_backward"),
        *("_softmax", "_log_softmax", "logsumexp", "write_softmax"),
    )
)
FUNCTION = 150
"""A function of one number takes as long as so many operations of large products."""
_STEPPED = frozenset(
    f"{name}{way}" for name in ("lstm", "gru", "rnn", "onednn_lstm") for way in ("", "_backward")
)
STEPPED = 1.6
"""Layers that take one step after another have products of few rows, and functions in between: so
many times as long as large products."""


def operations(graph: Graph) -> dict[Node, int]:
    """Multiplications and additions of each node that has many; others are left out.

    Counted by torch's own formulas, from the shapes that were captured; 0 for an empty batch.
    """
    return {node: _count(node) for node in graph.nodes if computes_much(node)}


def efforts(graph: Graph) -> dict[Node, int]:
    """Of each node that has many, operations of large products that take as long; of what else a
    node takes, bytes that it reads and writes tell more."""
    found = {}
    for node, count in operations(graph).items():
        found[node] = round(STEPPED * count) if _name(node) in _STEPPED else count
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and _name(node) in _FUNCTIONS:
            found[node] = FUNCTION * max(map(_elements, (node, *node.all_input_nodes)))
    return found


def _name(node: Node) -> str:
    target: Any = node.target
    return str(target.overloadpacket.__name__).removesuffix("_")


def _elements(node: Node) -> int:
    value = node.meta.get("val")
    return math.prod(sizes_of(value)) if isinstance(value, torch.Tensor) else 0


def computes_much(node: Node) -> bool:
    """Whether a node is a matrix product, a convolution or the like."""
    return _formula(node) is not None


def _formula(node: Node) -> Any:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    packet = node.target.overloadpacket
    return flop_registry.get(_ALIKE.get(packet, packet))


def _count(node: Node) -> int:
    if any("val" not in source.meta for source in node.all_input_nodes):
        return 0  # of what rewriting put in its place nothing is known
    value: Any = lambda n: n.meta.get("val")  # noqa: E731
    args = map_arg(node.args, value)
    kwargs = map_arg(node.kwargs, value)
    return size_of(_formula(node)(*args, **kwargs, out_val=node.meta.get("val"))) or 0


def work_between(
    nodes: Sequence[Node], order: Iterable[Node], counts: Mapping[Node, int]
) -> list[int]:
    """Operations that are computed from each of ``nodes`` to the next.

    Args:
        nodes: in their order.
        order: all nodes of the graph in their order.
        counts: operations by node.
    """
    wanted = set(nodes)
    done: dict[Node, int] = {}
    total = 0
    for node in order:
        total += counts.get(node, 0)
        if node in wanted:
            done[node] = total
    return [done[later] - done[node] for node, later in pairwise(nodes)]


def split_by_compute(
    nodes: Iterable[Node], order: Iterable[Node], counts: Mapping[Node, int], least: int
) -> list[list[Node]]:
    """Group ``nodes`` such that at least ``least`` operations lie between two groups.

    Args:
        nodes: what to group.
        order: all nodes of the graph in their order.
        counts: operations by node.
        least: how much computation is worth a message of its own.
    """
    wanted = set(nodes)
    groups: list[list[Node]] = []
    between = least
    for node in order:
        between += counts.get(node, 0)
        if node not in wanted:
            continue
        if between >= least or not groups:
            groups.append([])
        groups[-1].append(node)
        between = 0
    return groups
