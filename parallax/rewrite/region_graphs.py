"""Write the graph whose regions were found: calls of them, and copies of what is replayed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg

from parallax.graph.common.aliases import base_of
from parallax.graph.common.operations import returned_input, written_inputs
from parallax.ops.kernels import OPERATIONS
from parallax.ops.specs import ResourceSpec
from parallax.rewrite.tensor_numbers import (
    as_number,
    constant_arguments,
    is_number,
    tensor_form,
    to_tensor,
)

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
        numbers: which inputs are given as numbers, of a region that is recorded.
        constants: those among them that its operations want as numbers as well.
        changed: which inputs it changes.
        kept: which of them are the run's own state, that stays where it is in memory.
    """

    name: str
    module: GraphModule
    operations: int
    numbers: frozenset[int] = frozenset()
    constants: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()


def with_constants(region: Region, inputs: Sequence[Any]) -> GraphModule:
    """A region's module with the numbers among these inputs that it wants as such written in."""
    if not region.constants:
        return region.module
    graph = Graph()
    graph.output(graph.graph_copy(region.module.graph, {}))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    values = {placeholders[place]: inputs[place] for place in region.constants}

    def written(node: Node) -> Any:
        return values.get(node, node)

    for node in values:
        for user in list(node.users):
            user.args = map_arg(user.args, written)
        graph.erase_node(node)
    graph.set_codegen(CodeGen())
    return GraphModule({}, graph)


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
    state: dict[Node, Node]
    """By input that is the run's state, the memory that it is part of."""
    recorded: bool
    """Whether regions are recorded: numbers are given to them as numbers."""
    of_processor: set[Node]
    """What has nothing to do with a device besides the processor."""
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
        recorded = self._cutting.recorded
        numbers = {place for place, node in enumerate(inside.inputs) if is_number(node)}
        inputs = [
            self._tensor(node) if place in numbers and not recorded else self._value(node)
            for place, node in enumerate(inside.inputs)
        ]
        name = f"region_{len(self._regions)}"
        region = Region(name, module, self._size(nodes))
        if recorded:
            region.numbers, region.constants = frozenset(numbers), frozenset(inside.constants)
            region.changed, region.kept = self._memory(inside.inputs, nodes)
        self._regions.append(region)
        called = self._graph.create_node("call_module", name, tuple(inputs))
        for place, node in enumerate(results):
            value = self._graph.call_function(operator.getitem, (called, place))
            value.meta.update(node.meta)
            (self._tensors if is_number(node) else self._made)[node] = value

    def _memory(
        self, inputs: Sequence[Node], nodes: Sequence[Node]
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Which inputs the nodes of a region change, and which are the run's state."""
        state = self._cutting.state

        def memory(node: Node) -> Node:
            base = base_of(node)
            return state.get(base, base)

        written = {memory(source) for node in nodes for source in written_inputs(node)}
        changed = {place for place, node in enumerate(inputs) if memory(node) in written}
        kept = {place for place, node in enumerate(inputs) if base_of(node) in state}
        return frozenset(changed), frozenset(kept)


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
        self._constants: dict[Node, Node] = {}
        self._last: Node = self._graph._root
        self.inputs: list[Node] = []
        """What it takes, of the graph that is cut."""
        self.constants: list[int] = []
        """Which of these are wanted as numbers."""
        for node in nodes:
            self._made[node] = self._copy(node)

    def _copy(self, node: Node) -> Node:
        form = tensor_form(node)
        assert form is not None
        constant = constant_arguments(node)
        args = tuple(
            map_arg(argument, self._constant if place in constant else self._value)
            for place, argument in enumerate(node.args)
        )
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
        self._made[node] = self._input(node)
        return self._made[node]

    def _constant(self, node: Node) -> Node:
        """A number that stays one."""
        if node not in self._constants:
            self.constants.append(len(self.inputs))
            self._constants[node] = self._input(node)
        return self._constants[node]

    def _input(self, node: Node) -> Node:
        self.inputs.append(node)
        with self._graph.inserting_after(self._last):
            self._last = self._graph.placeholder(f"in_{len(self.inputs)}")
        return self._last

    def finish(self, results: Sequence[Node]) -> GraphModule:
        self._graph.output(tuple(self._made[node] for node in results))
        self._graph.set_codegen(CodeGen())
        self._graph.lint()
        return GraphModule({}, self._graph)
