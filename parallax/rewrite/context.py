"""What the rewriting passes share: the graph under work, the decision, and the runtime it needs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from parallax.graph.analysis.variables import Analysis
from parallax.graph.common.interface import GraphInput
from parallax.graph.common.operations import is_view, is_write
from parallax.graph.common.torch_internals import expression
from parallax.graph.step_graph import StepGraph
from parallax.ops.specs import ResourceSpec
from parallax.strategy.data import Strategy, everyone
from parallax.strategy.layout import RowLayout
from parallax.strategy.registry import Synchronizer, facts


@dataclass(eq=False)
class Phase:
    """Gradients that are made one after the other and then used: what is agreed on together."""

    marks: tuple[Node, ...]
    first_use: Node
    wait: Node | None = None
    """Where gradients in buckets are awaited, once they are."""


@dataclass
class WorkerGraph:
    """The graph that one worker runs, and what the runtime has to provide for it."""

    step: StepGraph
    resources: list[ResourceSpec] = field(default_factory=list)
    sharded: dict[str, RowLayout] = field(default_factory=dict)
    """State leaves of which a worker holds only its rows, by name; also those the step creates."""
    views: dict[str, RowLayout] = field(default_factory=dict)
    """Variables held whole of which the worker updates its rows only."""
    late: list[GraphModule] = field(default_factory=list)
    """Updates that were left to the next step, in the order of their :class:`LateSpec`."""


@dataclass
class Rewriting:
    """The state of one rewriting; passes run in order, each owning the graph while it runs."""

    analysis: Analysis
    strategy: Strategy
    worker: int
    workers: int
    result: WorkerGraph
    late: bool = False
    """Whether updates may be left to the step that follows."""
    phases: list[Phase] = field(default_factory=list)
    resource_nodes: list[Node] = field(default_factory=list)
    touched: dict[str, tuple[Node, Node]] = field(default_factory=dict)
    """Variables of which only touched rows are updated: (row numbers, rows of the gradient)."""
    blocked: dict[str, tuple[Node, Node]] = field(default_factory=dict)
    """Variables that are updated block by block, with the same."""
    multiplied: dict[str, Node] = field(default_factory=dict)
    """Variables whose update multiplies the gradient's factors block by block: these factors."""

    @property
    def step(self) -> StepGraph:
        return self.result.step

    @property
    def graph(self) -> Graph:
        return self.step.graph

    def order(self) -> dict[Node, int]:
        """Positions of all nodes; valid until the graph changes."""
        return {node: index for index, node in enumerate(self.graph.nodes)}

    def layout(self, variable: str) -> RowLayout:
        """Where the rows of a variable live."""
        choice, shape = self.strategy.variables[variable], self.analysis.variables[variable].shape
        return RowLayout.of(choice, shape[choice.axis] if shape else 1, self.workers)

    def ring(self, variable: str) -> tuple[int, ...] | None:
        """The workers in the order in which a variable's values go round; None where they do not,
        but all send to all."""
        choice = self.strategy.variables[variable]
        if choice.reduction != "ring":
            return None
        return choice.order or everyone(self.workers)

    def own_rows(self, variable: str) -> int:
        """How many rows of a variable this worker updates."""
        if self.workers > 1 and facts(self.strategy.variables[variable]).sharded:
            return self.layout(variable).local_rows(self.worker)
        return self.analysis.variables[variable].rows

    def names_with(self, *synchronizers: str) -> list[str]:
        """Variables that are synchronised in one of these ways."""
        return [
            name
            for name, choice in self.strategy.variables.items()
            if choice.synchronizer in synchronizers
        ]

    def names_where(self, condition: Callable[[Synchronizer], bool]) -> list[str]:
        """Variables of whose synchroniser a condition holds."""
        chosen = self.strategy.variables.items()
        return [name for name, choice in chosen if condition(facts(choice))]

    def sharded(self) -> list[str]:
        """Variables of which every worker has a part; a single worker has all of them whole."""
        return self.names_where(lambda one: one.sharded and self.workers > 1)

    def resource(self, spec: ResourceSpec, name: str) -> Node:
        """A new first input of the graph: the runtime object that ``spec`` describes."""
        index = len(self.result.resources)
        self.result.resources.append(spec)
        anchor = self.resource_nodes[-1] if self.resource_nodes else None
        if anchor is None:
            first = next(iter(self.graph.nodes))
            with self.graph.inserting_before(first):
                node = self.graph.placeholder(f"{name}_{index}")
        else:
            with self.graph.inserting_after(anchor):
                node = self.graph.placeholder(f"{name}_{index}")
        self.resource_nodes.append(node)
        return node

    def shard_inputs(self, variables: Iterable[str]) -> dict[str, Node]:
        """New inputs: this worker's rows of variables that are also held whole."""
        added: dict[str, Node] = {}
        for variable in variables:
            placeholder = self.step.placeholder(variable)
            assert placeholder is not None
            with self.graph.inserting_after(placeholder):
                node = self.graph.placeholder(f"shard_of_{placeholder.name}")
            node.meta.update(placeholder.meta)
            added[variable] = node
        names = {node: variable for variable, node in added.items()}
        old = iter(self.step.inputs)
        self.step.inputs = tuple(
            GraphInput("shard", names[node]) if node in names else next(old)
            for node in self.step.placeholders()[len(self.resource_nodes) :]
        )
        return added

    def call(self, function: Callable[..., Any], *args: Any) -> Node:
        """A call at the graph's insertion point."""
        return self.graph.call_function(function, args)

    def size(self, value: int | torch.SymInt) -> int | Node:
        """A size that is known with the batch, computed at the graph's insertion point."""
        sizes = self.step.sizes
        if isinstance(value, int) or sizes is None or value.node.hint is None:
            return int(value)
        batch = {
            item.index: node
            for item, node in zip(self.step.inputs, self.step.own_placeholders(), strict=True)
            if item.kind == "batch"
        }
        parts: dict[Any, Node] = {}
        for symbol in value.node.expr.free_symbols:
            index, dimension = next(place for place in sizes.places(symbol) if place[0] in batch)
            parts[symbol] = self.call(torch.ops.aten.sym_size.int, batch[index], dimension)
        return expression(value.node.expr, parts)

    def item(self, source: Node, index: int) -> Node:
        """``source[index]`` at the graph's insertion point."""
        return self.graph.call_function(operator.getitem, (source, index))


def find_phases(
    marks: Sequence[Node], nodes: Sequence[Node], updates: Collection[Node] = ()
) -> list[Phase]:
    """Group marks into phases: all marks of one precede the first use of any of them.

    ``updates`` change variables or slots. The first after a mark counts as a use: nothing may be
    changed (a momentum decayed, a counter counted) before all workers agree on the step.
    """
    wanted = set(marks)
    phases: list[Phase] = []
    open_marks: dict[Node, None] = {}
    for node in nodes:
        used = any(source in open_marks for source in node.all_input_nodes)
        if open_marks and (used or node in updates):
            phases.append(Phase(tuple(open_marks), node))
            open_marks = {}
        if node in wanted:
            open_marks[node] = None
    return phases


def updates_of(analysis: Analysis) -> set[Node]:
    """In-place changes of variables, their slots and their shadows."""
    step = analysis.step
    followed = {
        name
        for variable in analysis.variables.values()
        for name in (variable.name, *variable.slots, *variable.shadows)
    }
    base = {
        node: node
        for item, node in zip(step.inputs, step.own_placeholders(), strict=True)
        if item.name in followed
    }
    found = set()
    for node in step.graph.nodes:
        source = node.args[0] if node.args and node.op == "call_function" else None
        if not isinstance(source, Node) or source not in base:
            continue
        if is_write(node):
            found.add(node)
            base[node] = base[source]
        elif is_view(node):
            base[node] = base[source]
    return found


Pass = Callable[[Rewriting], None]
