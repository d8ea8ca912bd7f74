"""The part of a worker's graph that says which rows a batch looks up.

Where ids follow from the batch alone, and not from state or random numbers, they can be computed
for the next batch while the present one is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from parallax.graph.common.aliases import memory_of
from parallax.graph.common.operations import must_stay, written_inputs
from parallax.graph.step_graph import StepGraph
from parallax.ops.resources import pull_bags, pull_rows
from parallax.ops.specs import ResourceSpec, RowsSpec

_PULLS = (pull_rows, pull_bags)


class IdsGraph:
    """Computes what some of a graph's exchanges look up by."""

    def __init__(self, module: GraphModule, exchanges: Sequence[int]) -> None:
        """
        Args:
            module: gives a list of that for the batch's inputs of the graph, in their order.
            exchanges: whose these are, by their numbers among the graph's resources.
        """
        self.exchanges = tuple(exchanges)
        self._module = module

    def __call__(self, batch: Sequence[Any]) -> list[Any]:
        """By exchange, what it looks up by.

        Args:
            batch: the items of a batch that are inputs of the graph.
        """
        with torch.no_grad():
            found: list[Any] = self._module(*batch)
        return found


def ids_graph(step: StepGraph, resources: Sequence[ResourceSpec]) -> IdsGraph | None:
    """What the exchanges of a rewritten step look up by, as far as that follows from the batch.

    Rows in two levels are left out: what crosses to other hosts is known when all workers of a host
    have asked.

    Args:
        step: of a worker; it is left as it is.
        resources: descriptions of its first inputs.

    Returns:
        None if no exchange looks up by the batch alone.
    """
    own = zip(step.inputs, step.own_placeholders(), strict=True) if step.inputs else ()
    batch = {node: item for item, node in own if item.kind == "batch"}
    places = {node: number for number, node in enumerate(step.placeholders())}
    found: list[tuple[int, Any]] = []
    needed: set[Node] = set()
    for node in step.graph.nodes:
        if node.op == "call_function" and node.target in _PULLS:
            number = places[node.args[0]]
            spec = resources[number]
            if isinstance(spec, RowsSpec) and spec.by_host:
                continue
            sources: list[Node] = []
            map_arg(node.args[1], sources.append)
            parts = _made_of(sources, batch)
            if parts is not None:
                found.append((number, node.args[1]))
                needed |= parts
    if not found or _is_changed(step.graph, needed):
        return None
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in batch}
    for node in step.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([map_arg(inputs, copies.__getitem__) for _, inputs in found])
    return IdsGraph(GraphModule(step.graph_module, graph), [number for number, _ in found])


def _made_of(sources: Iterable[Node], batch: Iterable[Node]) -> set[Node] | None:
    """All nodes that these are computed from; None if one of them is not the batch's alone."""
    allowed, found, queue = set(batch), set[Node](), list(sources)
    while queue:
        node = queue.pop()
        if node in found:
            continue
        if node not in allowed and not _is_pure(node):
            return None
        found.add(node)
        queue += node.all_input_nodes
    return found


def _is_changed(graph: Graph, nodes: Iterable[Node]) -> bool:
    """Whether the graph changes one of these in place."""
    memory = {memory_of(node) for node in nodes}
    return any(
        memory_of(changed) in memory for node in graph.nodes for changed in written_inputs(node)
    )


def _is_pure(node: Node) -> bool:
    """Whether an operation gives the same for the same inputs, and does nothing else."""
    return node.op == "call_function" and not must_stay(node)
