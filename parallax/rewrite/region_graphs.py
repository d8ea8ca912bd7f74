"""Write the graph whose regions were found: calls of them, and copies of what is replayed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg

from parallax.graph.operations import returned_input
from parallax.ops.kernels import OPERATIONS
from parallax.ops.specs import ResourceSpec
from parallax.rewrite.tensor_numbers import as_number, is_number, tensor_form, to_tensor

Kind = Literal["input", "computed", "replayed", "remade"]
"""What becomes of a node: it is an input, part of a region, replayed, or made anew in each place
where it is used."""

LEAST_OPERATIONS = 3
"""A region with fewer operations is replayed: a call of compiled code costs as much."""


@dataclass
class Region:
    """Operations that are compiled together.

    Args:
        name: of the submodule in the cut graph.
        module: its operations; numbers are tensors of no dimension.
        operations: how many.
    """

    name: str
    module: GraphModule
    operations: int


@dataclass
class Cutting:
    """What is known of a graph while it is cut."""

    nodes: list[Node]
    kinds: dict[Node, Kind]
    order: dict[Node, int]
    needs: dict[Node, dict[Node, None]]
    """By computed or replayed node, those that must have run before it."""
    specs: dict[Node, ResourceSpec]
    """By input, what of the runtime it is."""
    done: set[Node] = field(default_factory=set)
    plan: list[list[Node] | Node] = field(default_factory=list)
    """Regions, and what is replayed between them."""


def build(module: GraphModule, cutting: Cutting) -> tuple[GraphModule, list[Region]]:
    """The new graph, and the regions that are its submodules."""
    return _Building(module, cutting).build()


class _Building:
    """Writes the new graph: calls of regions, and copies of what is replayed."""

    def __init__(self, module: GraphModule, cutting: Cutting) -> None:
        self._module = module
        self._cutting = cutting
        self._graph = Graph()
        self._made: dict[Node, Node] = {}
        self._tensors: dict[Node, Node] = {}
        """Numbers as tensors."""
        self._regions: list[Region] = []

    def build(self) -> tuple[GraphModule, list[Region]]:
        for node in self._cutting.nodes:
            if node.op == "placeholder":
                self._made[node] = self._graph.node_copy(node)
        for step in self._cutting.plan:
            if isinstance(step, Node):
                self._replay(step)
            elif self._size(step) < LEAST_OPERATIONS:
                for node in step:
                    self._replay(node)
            else:
                self._compute(step)
        attributes = {region.name: region.module for region in self._regions}
        for node in self._graph.nodes:
            if node.op == "get_attr":
                attributes[str(node.target)] = getattr(self._module, str(node.target))
        self._graph.set_codegen(CodeGen())
        self._graph.lint()
        return GraphModule(attributes, self._graph), self._regions

    def _size(self, nodes: Sequence[Node]) -> int:
        return sum(node.target is not operator.getitem for node in nodes)

    def _replay(self, node: Node) -> None:
        self._made[node] = self._graph.node_copy(node, self._value)

    def _value(self, node: Node) -> Node:
        """A value in the new graph, remade if it is a view or a number."""
        if node not in self._made:
            if node in self._tensors:
                return self._number(node)
            # What was changed in place is its input; what else is missing is remade.
            changed = returned_input(node)
            if self._cutting.kinds[node] == "computed" and changed is not None:
                return self._value(changed)
            assert self._cutting.kinds[node] == "remade", node
            self._made[node] = self._graph.node_copy(node, self._value)
        return self._made[node]

    def _number(self, node: Node) -> Node:
        """A number that a region computed."""
        self._made[node] = self._graph.call_function(as_number, (self._tensors[node],))
        return self._made[node]

    def _tensor(self, node: Node) -> Node:
        """A number of the new graph as a tensor."""
        if node not in self._tensors:
            self._tensors[node] = self._graph.call_function(to_tensor, (self._value(node),))
        return self._tensors[node]

    def _compute(self, nodes: Sequence[Node]) -> None:
        inside = _RegionGraph(self._cutting.kinds, nodes)
        own = set(nodes)
        results = [
            node
            for node in nodes
            if returned_input(node) is None and _leaves(node, own, self._cutting.kinds)
        ]
        module = inside.finish(results)
        inputs = [
            self._tensor(node) if is_number(node) else self._value(node) for node in inside.inputs
        ]
        name = f"region_{len(self._regions)}"
        self._regions.append(Region(name, module, self._size(nodes)))
        called = self._graph.create_node("call_module", name, tuple(inputs))
        for place, node in enumerate(results):
            value = self._graph.call_function(operator.getitem, (called, place))
            value.meta.update(node.meta)
            (self._tensors if is_number(node) else self._made)[node] = value


def _leaves(node: Node, own: set[Node], kinds: dict[Node, Kind]) -> bool:
    """Whether a value, a view of it or what it is changed to is used outside of its region."""
    for user in node.users:
        if kinds[user] == "remade":
            leaves = _leaves(user, own, kinds)
        elif user in own:
            leaves = returned_input(user) is node and _leaves(user, own, kinds)
        else:
            leaves = True
        if leaves:
            return True
    return False


class _RegionGraph:
    """The graph of one region."""

    def __init__(self, kinds: dict[Node, Kind], nodes: Sequence[Node]) -> None:
        self._kinds = kinds
        self._graph = Graph()
        self._made: dict[Node, Node] = {}
        self.inputs: list[Node] = []
        """What it takes, of the graph that is cut."""
        for node in nodes:
            self._made[node] = self._copy(node)

    def _copy(self, node: Node) -> Node:
        form = tensor_form(node)
        assert form is not None
        args = map_arg(node.args, self._value)
        kwargs = map_arg(node.kwargs, self._value)
        target = OPERATIONS.get(form, form)
        return self._graph.call_function(target, args, dict(kwargs))

    def _value(self, node: Node) -> Node:
        if node in self._made:
            return self._made[node]
        kind = self._kinds[node]
        if kind == "remade":
            self._made[node] = self._copy(node)
            return self._made[node]
        changed = returned_input(node) if kind == "computed" else None
        if changed is not None:
            return self._value(changed)
        self.inputs.append(node)
        last = self._made[self.inputs[-2]] if len(self.inputs) > 1 else self._graph._root
        with self._graph.inserting_after(last):
            new = self._graph.placeholder(f"in_{len(self.inputs)}")
        self._made[node] = new
        return new

    def finish(self, results: Sequence[Node]) -> GraphModule:
        self._graph.output(tuple(self._made[node] for node in results))
        self._graph.set_codegen(CodeGen())
        self._graph.lint()
        return GraphModule({}, self._graph)
