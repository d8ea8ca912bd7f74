"""Compute ids early, so that rows travel while the model computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from parallax.graph.compute import computes_much
from parallax.graph.operations import is_write, must_stay
from parallax.rewrite.context import Rewriting


def known_early(work: Rewriting, ids: Sequence[Node], first: Node) -> Node:
    """Compute ``ids`` before the first operation of weight if they do not depend on it.

    Returns:
        The node in front of which they are known: that operation, or the lookup ``first``.
    """
    order = work.order()
    needed: set[Node] = set()
    queue = list(ids)
    while queue:
        node = queue.pop()
        if node.op != "placeholder" and node not in needed:
            needed.add(node)
            queue += node.all_input_nodes
    heavy = next((node for node in order if computes_much(node)), first)
    between = [node for node in order if order[heavy] <= order[node] < order[first]]
    if between and not any(
        _changes_ids(node) or (node in needed and (computes_much(node) or must_stay(node)))
        for node in between
    ):
        first = heavy
    hoist(work, ids, first)
    return first


def _changes_ids(node: Node) -> bool:
    """Whether a node writes to integers, which could be ids."""
    return is_write(node) and any(
        isinstance(value := source.meta.get("val"), torch.Tensor)
        and not value.dtype.is_floating_point
        for source in node.all_input_nodes[:1]
    )


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
