"""How a step ends on a way of a branch on which it changes no more tensors: an update is left out.

``if not loss.isfinite(): return loss`` is such a branch. The graph is that of the other way; where
the step leaves it, what this way returns is made of what was computed until then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from parallax.graph.aliases import memory_of
from parallax.graph.operations import is_random, written_inputs

if TYPE_CHECKING:
    from parallax.graph.collected import Collected
    from parallax.graph.step_graph import GraphOutput, HostCall, Written

_RESULTS = ("return", "write", "outside", "call", "said")
"""What such a way may leave: no tensors that are state."""


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


def ending(
    graph: Graph, before: Collection[str], left: Collected, notes: Sequence[str]
) -> Ending | None:
    """How a captured way ends, if it changes no tensor after a branch.

    Args:
        graph: of the way, as it was traced.
        before: names of its nodes before the branch.
        left: what the step has left.
        notes: for the user.
    """
    own = [node for node in graph.nodes if node.name not in before and node.op != "output"]
    if left.new_leaves or left.constants or any(o.kind not in _RESULTS for o in left.outputs):
        return None
    written = {memory_of(source) for node in own for source in written_inputs(node)}
    if any(memory.op in ("placeholder", "get_attr") for memory in written):
        return None
    if any(is_random(node) or not _is_plain(node) for node in own):
        return None
    computed = _after(graph, before)
    read = {memory_of(source) for node in computed for source in node.all_input_nodes}
    read |= {memory_of(node) for node in _results(graph) if isinstance(node, Node)}
    if read & written or any(node.op != "call_function" for node in computed):
        return None
    return Ending(
        graph,
        frozenset(before),
        tuple(left.outputs),
        left.return_spec,
        left.return_constants,
        left.calls,
        dict(left.left),
        tuple(left.writes),
        tuple(notes),
    )


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
