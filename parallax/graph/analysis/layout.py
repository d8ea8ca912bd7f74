"""Which part of a step can run on one shard of a variable's rows.

From a variable's gradient, its slots and itself, follow every use. Operations that work row by
row stay on the shard; a reduction over all elements (a norm) leaves a partial value behind that
the owners combine; anything else needs the whole, and then the variable cannot be sharded. This
is the placement rule of the Parallax paper's Figure 9: an operation runs where its inputs are, if
they are in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch.fx import Node

from parallax.graph.analysis.lookups import lookup_of
from parallax.graph.common.sizes import same_size
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks

aten: Any = torch.ops.aten

ReductionKind = Literal["norm", "sum", "mean", "amax", "amin"]

_REDUCTIONS: dict[Any, ReductionKind] = {
    aten.linalg_vector_norm.default: "norm",
    aten.norm.Scalar: "norm",
    aten.sum.default: "sum",
    aten.mean.default: "mean",
    aten.max.default: "amax",
    aten.min.default: "amin",
    aten.amax.default: "amax",
    aten.amin.default: "amin",
}
# Reductions that may be given dimensions; without dimension 0 they work row by row.
_DIMENSIONS = {
    aten.linalg_vector_norm.default: 2,
    aten.amax.default: 1,
    aten.amin.default: 1,
    aten.sum.dim_IntList: 1,
    aten.mean.dim: 1,
}
_ROW_BY_ROW = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.clone.default,
    aten.copy_.default,
    aten.copy.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten._to_copy.default,
    aten.lift_fresh_copy.default,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.masked_fill.Scalar,
    aten.masked_fill_.Scalar,
}
_COO = aten._sparse_coo_tensor_with_dims_and_tensors.default
_ROWS_OF_COO = {aten._indices.default, aten._values.default, aten.coalesce.default}
_FROM_COO = {aten.sparse_mask.default, _COO}
_SIZED = {aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format}


@dataclass(frozen=True)
class Reduction:
    """A reduction over all elements of a sharded value."""

    node: Node
    kind: ReductionKind
    order: float = 2.0


@dataclass
class Component:
    """Everything that moves to the shard together with one variable, or several that are tied."""

    variables: set[str] = field(default_factory=set)
    members: dict[Node, None] = field(default_factory=dict)
    states: dict[str, None] = field(default_factory=dict)
    """Leaf names: the variables, their slots and their shadows."""
    created: dict[str, None] = field(default_factory=dict)
    """Leaf names of new state that is sharded when it comes to be."""
    reductions: list[Reduction] = field(default_factory=list)
    sized: dict[Node, None] = field(default_factory=dict)
    """Members that name the number of rows, which differs on a shard."""
    whole_reads: list[Node] = field(default_factory=list)
    """Reads of a variable itself that need all of it (a matrix product)."""
    obstacle: str = ""
    """Why the component cannot be sharded, if it cannot."""
    elementwise: bool = False
    """Whether its operations treat every element alike, so that it can be cut along any axis."""


def is_row_by_row(target: Any) -> bool:
    return target in _ROW_BY_ROW or torch.Tag.pointwise in getattr(target, "tags", ())


class Components:
    """What moves together with each variable of a captured step.

    Args:
        step: a captured step.
        slots: the variable that each slot belongs to, by leaf name.
        gradients: the marks of each variable's gradients, by its name.
    """

    def __init__(
        self, step: StepGraph, slots: Mapping[str, str], gradients: Mapping[str, Sequence[Node]]
    ) -> None:
        self.step = step
        self.slots = slots
        self.gradients = gradients
        self.names = {
            node: item.name
            for item, node in zip(step.inputs, step.placeholders(), strict=True)
            if item.kind == "state"
        }
        self.slots_of: dict[str, list[Node]] = {}
        for node, leaf in self.names.items():
            if leaf in slots:
                self.slots_of.setdefault(slots[leaf], []).append(node)
        self.before_marks = _ancestors_of_marks(chain.from_iterable(gradients.values()))

    def of(self, variable: str) -> Component:
        """The component of a trainable variable."""
        return _Follower(self, variable).run()


class _Follower:
    def __init__(self, all_: Components, variable: str) -> None:
        self.all = all_
        self.step = all_.step
        self.names = all_.names
        self.component = Component()
        self.queue: list[Node] = []
        self.rows = 0
        self.add_variable(variable)

    def add_variable(self, name: str) -> None:
        component = self.component
        if name in component.variables:
            return
        component.variables.add(name)
        node = self.step.placeholder(name)
        shape = self._shape_of(name, node)
        if shape is None:
            return
        if self.rows and shape[0] != self.rows:
            self.fail(f"it is combined with {name!r}, which has another number of rows")
            return
        self.rows = shape[0]
        if node is not None:
            component.states[name] = None
            self.take(node)
        for mark in self.all.gradients.get(name, ()):
            self.take(mark)
        for placeholder in self.all.slots_of.get(name, ()):
            if self.is_rows(placeholder):
                component.states[self.names[placeholder]] = None
                self.take(placeholder)

    def _shape_of(self, name: str, node: Node | None) -> torch.Size | None:
        if node is None:
            node = next(iter(self.all.gradients.get(name, ())), None)
        if node is None:
            return None
        shape: torch.Size = node.meta["val"].shape
        if len(shape) == 0:
            self.fail("it is a single number")
            return None
        return shape

    def is_rows(self, node: Any) -> bool:
        """Whether a value has one row for each row of the variable."""
        if not isinstance(node, Node):
            return False
        value = node.meta.get("val")
        return (
            isinstance(value, torch.Tensor)
            and value.dim() > 0
            and same_size(value.shape[0], self.rows)
        )

    def fail(self, reason: str) -> None:
        if not self.component.obstacle:
            self.component.obstacle = reason

    def take(self, node: Node) -> None:
        if node not in self.component.members:
            self.component.members[node] = None
            self.queue.append(node)

    def run(self) -> Component:
        while self.queue and not self.component.obstacle:
            node = self.queue.pop()
            for user in list(node.users):
                self.follow(node, user)
        self.component.elementwise = not self.component.obstacle and self._is_elementwise()
        return self.component

    def _is_elementwise(self) -> bool:
        """Whether every member has the variable's shape, and meets single numbers only."""
        members = self.component.members
        values = [v for node in members if isinstance(v := node.meta.get("val"), torch.Tensor)]
        if len(values) < len(members) or any(v.layout is not torch.strided for v in values):
            return False
        others = (
            source.meta.get("val")
            for node in members
            if node.op == "call_function" and node.target is not marks.GRADIENT
            for source in node.all_input_nodes
            if source not in members
        )
        return len({value.shape for value in values}) == 1 and not any(
            isinstance(value, torch.Tensor) and value.dim() for value in others
        )

    def follow(self, node: Node, user: Node) -> None:
        component = self.component
        if user in component.members:
            return
        is_variable = self.names.get(node) in component.variables
        if user.op == "output":
            self._output(node, user)
        elif is_variable and lookup_of(user, node, ""):
            return
        elif is_variable and user in self.all.before_marks:
            component.whole_reads.append(user)
        elif user.target is marks.GRADIENT:
            self.fail("a value that follows from its gradient enters another gradient")
        elif user.target in _REDUCTIONS and self._all_dimensions(user):
            order = user.args[1] if len(user.args) > 1 else 2
            reduction = _REDUCTIONS[user.target]
            component.reductions.append(
                Reduction(user, reduction, float(order) if reduction == "norm" else 0.0)  # type: ignore[arg-type]
            )
        elif (
            user.target in _DIMENSIONS and 0 not in self._dimensions(user)
        ) or user.target in _ROWS_OF_COO:
            self.take(user)
        elif user.target in _FROM_COO:
            self.take(user)
            if user.target is _COO:
                component.sized[user] = None
            self._bring_others(user)
        elif is_row_by_row(user.target):
            self.take(user)
            self._bring_others(user)
        elif is_variable:
            component.whole_reads.append(user)
        else:
            self.fail(f"{user.target} needs all rows of a value that follows from its gradient")

    def _output(self, node: Node, user: Node) -> None:
        for value, output in zip(user.args[0], self.step.outputs, strict=True):  # type: ignore[arg-type]
            if value is node:
                if output.kind == "state":
                    self.component.created[output.name] = None
                elif self.names.get(node) in self.component.variables:
                    self.component.whole_reads.append(user)
                else:
                    self.fail("the step returns its gradient or a value of its shape")

    def _dimensions(self, user: Node) -> list[int]:
        position = _DIMENSIONS[user.target]
        given = user.args[position] if len(user.args) > position else user.kwargs.get("dim")
        count = user.args[0].meta["val"].dim()  # type: ignore[union-attr]
        if given is None or given == []:
            return list(range(count))
        given = [given] if isinstance(given, int) else list(given)  # type: ignore[arg-type]
        return [d % count for d in given]

    def _all_dimensions(self, user: Node) -> bool:
        if user.target not in _DIMENSIONS:
            return True
        count = user.args[0].meta["val"].dim()  # type: ignore[union-attr]
        return bool(len(set(self._dimensions(user))) == count)

    def _bring_others(self, user: Node) -> None:
        """What a row-by-row operation combines with the shard must be on the shard too."""
        for other in user.all_input_nodes:
            if other in self.component.members or not self.is_rows(other):
                continue
            if self._is_broadcast_row(user, other):
                continue
            self._bring(other)

    def _is_broadcast_row(self, user: Node, other: Node) -> bool:
        value = user.meta.get("val")
        return (
            isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and other.meta["val"].dim() < value.dim()
        )

    def _bring(self, node: Node) -> None:
        name = self.names.get(node)
        if name is not None:
            leaf_variable = self.all.slots.get(name, name)
            if leaf_variable in self.all.gradients:
                self.add_variable(leaf_variable)
            self.component.states[name] = None
            self.take(node)
        elif node.target is marks.GRADIENT:
            self.add_variable(str(node.args[1]))
        elif node.op == "call_function" and node.target in _SIZED:
            self.component.sized[node] = None
            self.take(node)
        elif node.target in _ROWS_OF_COO:
            self._bring_unless_there(node.args[0])
            self.take(node)
        elif node.target is _COO and _indices_of(node) is not None:
            # Made of the rows of another COO tensor, the gradient: it is where that one is.
            self._bring_unless_there(_indices_of(node))
            self.component.sized[node] = None
            self.take(node)
            self._bring_others(node)
        elif node.op == "call_function" and (
            is_row_by_row(node.target) or node.target is aten.sparse_mask.default
        ):
            self.take(node)
            self._bring_others(node)
        else:
            self.fail(f"it is combined with a value made by {node.target}")

    def _bring_unless_there(self, node: Any) -> None:
        if node not in self.component.members:
            self._bring(node)


def _indices_of(node: Node) -> Node | None:
    """The COO tensor whose indices a new one is made with, or None if they are its own."""
    indices = node.args[3]
    if isinstance(indices, Node) and indices.target is aten._indices.default:
        source = indices.args[0]
        assert isinstance(source, Node)
        return source
    return None


def _ancestors_of_marks(gradients: Iterable[Node]) -> set[Node]:
    """Nodes of forward and backward passes: what some gradient is computed from."""
    found: set[Node] = set()
    queue = [mark.args[0] for mark in gradients]
    while queue:
        node = queue.pop()
        if not isinstance(node, Node) or node in found or node.target is marks.GRADIENT:
            continue
        found.add(node)
        queue += node.all_input_nodes
    return found
