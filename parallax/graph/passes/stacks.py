"""Stack tensors in the order in which they are wanted.

Attention takes queries, keys and values apart from one tensor, whose dimensions it has permuted.
Backward stacks their gradients, permutes the stack back, and copies it once more, so that it can be
the factor of a product. Stacking permuted tensors in another dimension is the same copy at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.common.operations import add_call
from parallax.graph.passes.cleanup import remove_dead

aten: Any = torch.ops.aten


def stack_in_order(graph: Graph) -> None:
    """Rewrite every stack of which nothing but a permuted, contiguous copy is used."""
    for copied in graph.find_nodes(op="call_function", target=aten.clone.default):
        permuted = copied.args[0]
        if copied.kwargs.get("memory_format") is not torch.contiguous_format:
            continue
        if _is_only_for(permuted, copied, aten.permute.default):
            stacked = permuted.args[0]
            if _is_only_for(stacked, permuted, aten.stack.default):
                _rewrite(graph, stacked, permuted, copied)
    remove_dead(graph)


def _is_only_for(node: Any, user: Node, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target and list(node.users) == [user]


def _rewrite(graph: Graph, stacked: Node, permuted: Node, copied: Node) -> None:
    parts: Any = stacked.args[0]
    dimensions = stacked.meta["val"].dim()
    new = (stacked.args[1] if len(stacked.args) > 1 else 0) % dimensions
    order = [one % dimensions for one in permuted.args[1]]  # type: ignore[union-attr]
    # Without the new dimension, those after it are one less.
    inner = [one - (one > new) for one in order if one != new]
    with graph.inserting_before(stacked):
        moved = [add_call(graph, aten.permute.default, part, inner) for part in parts]
        result = add_call(graph, aten.stack.default, moved, order.index(new))
    # Of parts that all have channels last, a stack has them last as well; it is of no use then, and
    # removed.
    if result.meta["val"].is_contiguous():
        copied.replace_all_uses_with(result)
