"""Compute early what is to travel while the model computes."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from parallax.graph.analysis.compute import computes_much
from parallax.graph.analysis.loss_terms import losses
from parallax.graph.common.aliases import memory_of
from parallax.graph.common.operations import ancestors, must_stay, written_inputs
from parallax.ops import marks
from parallax.ops.resources import put_gradient
from parallax.rewrite.context import Rewriting


def known_early(
    work: Rewriting, ids: Sequence[Node], first: Node, read: Sequence[Node] = ()
) -> Node:
    """Compute ``ids`` before the first operation of weight if they do not depend on it.

    Args:
        ids: what is to be known.
        first: where it is needed.
        read: tables that are read when the ids are known, as they are then: no write to them is
            gone past.

    Returns:
        The node in front of which they are known: that operation, the first gradient, or the lookup
        ``first``.
    """
    order = work.order()
    needed = ancestors(ids)
    memories = {memory_of(node) for node in (*needed, *read)}
    heavy = next((node for node in order if computes_much(node) or _is_sent(node)), first)
    between = [node for node in order if order[heavy] <= order[node] < order[first]]
    if between and not any(
        any(memory_of(written) in memories for written in written_inputs(node))
        or (node in needed and (computes_much(node) or must_stay(node)))
        for node in between
    ):
        first = heavy
    hoist(work, ids, first)
    return first


def at_the_start(work: Rewriting) -> tuple[Node, Node]:
    """Where a message of nothing is sent that other workers may wait for before they send more, and
    where its answer is awaited."""
    order = work.order()
    computed = [node for node in order if node.op != "placeholder"]
    behind = [node for _, gradients in losses(work.graph) for node in gradients]
    return computed[0], min(behind, key=order.__getitem__, default=computed[-1])


def _is_sent(node: Node) -> bool:
    """Whether a gradient is known: a worker that only has others' may have nothing of weight."""
    return node.target is marks.GRADIENT or node.target is put_gradient


def hoist(work: Rewriting, nodes: Sequence[Node], before: Node) -> None:
    """Move what ``nodes`` are computed from in front of ``before``, in its present order."""
    order = work.order()
    limit = order[before]
    late: set[Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node.op != "placeholder" and order[node] > limit and node not in late:
            late.add(node)
            queue += node.all_input_nodes
    for node in sorted(late, key=order.__getitem__):
        before.prepend(node)
