"""How a step ends on a way of a branch on which it changes no more tensors: an update is left out.

``if not loss.isfinite(): return loss`` is such a branch. The graph is that of the other way; where
the step leaves it, what this way returns is made of what was computed until then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from parallax.graph.common.aliases import memory_of
from parallax.graph.common.interface import GraphOutput, HostCall, Written
from parallax.graph.common.operations import is_random, written_inputs


@dataclass(frozen=True, eq=False)
class Ending:
    """What a step does from a branch on, if that is nothing but to return.

    Args:
        graph: of the whole way.
        before: the names of its nodes before the branch, which the other way has as well.
        outputs, return_spec, return_constants, calls, left, writes, notes: as a step's graph has
            them.
    """

    graph: Graph
    before: frozenset[str]
    outputs: tuple[GraphOutput, ...]
    return_spec: pytree.TreeSpec
    return_constants: tuple[Any, ...]
    calls: tuple[HostCall, ...]
    left: Mapping[str, float]
    writes: Sequence[Written]
    notes: Sequence[str]

    @property
    def counted_before(self) -> set[str]:
        """The names of numbers that are what they were at the branch."""
        (values,) = next(iter(reversed(self.graph.nodes))).args
        pairs = zip(self.outputs, values, strict=True)
        return {
            output.name
            for output, value in pairs
            if output.kind == "outside" and getattr(value, "name", None) in self.before
        }

    def results(self, graph: Graph) -> list[Any]:
        """The nodes of what it leaves, in the graph of the other way, which has come to the branch.

        What is computed after the branch is computed there, too.
        """
        known = {node.name: node for node in graph.nodes}
        copies: dict[Node, Node] = {}

        def here(node: Node) -> Node:
            return known[node.name] if node.name in self.before else copies[node]

        for node in _after(self.graph, self.before):
            copies[node] = graph.node_copy(node, here)
        return [here(one) if isinstance(one, Node) else one for one in _results(self.graph)]


def leaves_all(graph: Graph, before: Collection[str]) -> bool:
    """Whether a captured way changes no tensor after a branch, nor draws, nor does anything but
    compute.

    Args:
        graph: of the way, as it was traced.
        before: names of its nodes before the branch.
    """
    own = [node for node in graph.nodes if node.name not in before and node.op != "output"]
    written = {memory_of(source) for node in own for source in written_inputs(node)}
    if any(memory.op in ("placeholder", "get_attr") for memory in written):
        return False
    if any(is_random(node) or not _is_plain(node) for node in own):
        return False
    computed = _after(graph, before)
    read = {memory_of(source) for node in computed for source in node.all_input_nodes}
    read |= {memory_of(node) for node in _results(graph) if isinstance(node, Node)}
    return not read & written and all(node.op == "call_function" for node in computed)


def _is_plain(node: Node) -> bool:
    """Whether a node does nothing but compute."""
    return node.op == "get_attr" or not getattr(node.target, "parallax_effect", False)


def _results(graph: Graph) -> Sequence[Any]:
    (output,) = graph.find_nodes(op="output")
    (results,) = output.args
    return results if isinstance(results, tuple | list) else (results,)


def _after(graph: Graph, before: Collection[str]) -> list[Node]:
    """What a way computes for its results after the branch, in its order."""
    wanted: set[Node] = set()
    queue = [node for node in _results(graph) if isinstance(node, Node)]
    while queue:
        node = queue.pop()
        if node.name not in before and node not in wanted:
            wanted.add(node)
            queue += node.all_input_nodes
    return [node for node in graph.nodes if node in wanted]
