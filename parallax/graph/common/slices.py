"""The part of a graph that computes a number, and what enters it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.common.aliases import memory_of, writes_to
from parallax.graph.common.guards import CHANGES
from parallax.graph.common.operations import is_random, is_view, is_write, written_inputs
from parallax.ops import marks

aten: Any = torch.ops.aten


def masks_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What chooses the elements that a node selects; nothing if it does not select by masks."""
    arguments: Any = node.args
    if node.target is aten.nonzero.default:
        return [arguments[0]]
    if node.target is aten.masked_select.default:
        return [arguments[1]]
    if node.target is not aten.index.Tensor:
        return []
    return [
        one
        for one in arguments[1]
        if isinstance(one, torch.fx.Node) and one.meta["val"].dtype in (torch.bool, torch.uint8)
    ]


def needed_by(nodes: Iterable[Node]) -> set[Node]:
    """What nodes follow from, with what was changed in place on the way: not further than to
    synchronised gradients."""
    nodes = list(nodes)
    order = {node: number for number, node in enumerate(nodes[0].graph.nodes)} if nodes else {}
    found: set[Node] = set()
    queue = nodes
    while queue:
        node = queue.pop()
        if node in found:
            continue
        found.add(node)
        if node.target is marks.GRADIENT:
            continue
        for source in node.all_input_nodes:
            queue.append(source)
            queue += [one for one in writes_to(memory_of(source)) if order[one] < order[node]]
    return found


def is_common(nodes: Sequence[Node], of_batch: frozenset[str]) -> bool:
    """Whether numbers are the same on all workers.

    Args:
        nodes: that compute them.
        of_batch: the names of inputs that are the batch's.
    """
    return not any(
        is_random(node)
        or (node.op == "placeholder" and not of_batch.isdisjoint(map(node.meta.get, _NAMES)))
        for node in needed_by(nodes)
    )


_NAMES = ("given", "leaf")
"""Where placeholders have what they stand for, while a step is captured."""


def slice_program(
    nodes: tuple[torch.fx.Node, ...],
    values: Mapping[str, Any],
    root: Any,
    counts: bool = True,
    settled: Collection[str] = (),
) -> tuple[torch.fx.GraphModule, tuple[str, ...]] | None:
    """The part of a graph that computes ``nodes``, or None if more enters it than known numbers and
    the batch.

    Args:
        nodes: numbers, or tensors.
        values: what is known, by the inputs' names.
        root: has the graph's constants.
        counts: of tensors, give how many elements are not zero.
        settled: names of tensors of the state that may enter as the batch's may.
    """
    order = {node: index for index, node in enumerate(nodes[0].graph.nodes)}
    last = max(order[node] for node in nodes)
    needed: set[torch.fx.Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node in needed:
            continue
        needed.add(node)
        if node.op == "placeholder":
            name = _name_of(node)
            value = values.get(name)
            is_given = "given" in node.meta or name in settled
            if value is None or not (is_number(value) or is_given):
                return None
        elif node.op not in ("call_function", "get_attr") or is_random(node):
            return None
        # A counter is counted in place: what was written earlier belongs to the slice.
        queue += [user for user in _writes(node) if order[user] < last]
        queue += node.all_input_nodes
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    names: list[str] = []
    for node in sorted(needed, key=order.__getitem__):
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        if node.op == "placeholder":
            names.append(_name_of(node))
    found = [_number(graph, n, copies[n]) if counts else copies[n] for n in nodes]
    graph.output(tuple(found))
    fixed = {str(n.target): getattr(root, str(n.target)) for n in needed if n.op == "get_attr"}
    program = torch.fx.GraphModule(fixed, graph)
    program.meta[CHANGES] = any(map(is_write, needed))
    return program, tuple(names)


def _writes(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What changes a tensor, or a view of it, in place."""
    aliases = [node]
    for alias in aliases:
        for user in alias.users:
            if not isinstance(user.target, torch._ops.OpOverload):
                continue
            if alias in written_inputs(user):
                yield user
            if user.args[:1] == (alias,) and is_view(user):
                aliases.append(user)


def _name_of(node: torch.fx.Node) -> str:
    """The input that a placeholder stands for."""
    return str(node.meta.get("leaf") or node.meta.get("given") or "")


def _number(graph: torch.fx.Graph, node: torch.fx.Node, copy: torch.fx.Node) -> torch.fx.Node:
    if not isinstance(node.meta["val"], torch.Tensor):
        return copy
    count = graph.call_function(torch.ops.aten.count_nonzero.default, (copy,))
    return graph.call_function(torch.ops.aten._local_scalar_dense.default, (count,))


def is_number(value: Any) -> bool:
    """Whether it is a number, or a tensor of the state is: of no dimension, or a whole one in a
    list (the pointer of a queue)."""
    if not isinstance(value, torch.Tensor):
        return True
    return value.dim() == 0 or (value.numel() == 1 and not value.is_floating_point())
