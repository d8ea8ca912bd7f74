"""Gradients of zero for what only other workers' batches have gradients of.

A step whose Python decides by values of the batch (``if len(boxes):``) leaves out a part of the
model where a batch has nothing for it. On one device with all workers' batches that part has
gradients, to which the batches without it add nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from parallax.graph.analysis.compute import computes_much
from parallax.graph.common.operations import ancestors
from parallax.graph.objects.state import Leaf
from parallax.graph.step_graph import GradientPlace, Gradients, StepGraph
from parallax.ops import marks


@dataclass(frozen=True)
class Lent:
    """Gradients of zero.

    Args:
        passes: by variable that is to have one if it has none, after which backward pass.
        order: of all workers' gradients.
        tables: of these, those whose gradients are of rows; whether they are sparse tensors.
        reads: of all workers' tables, in the order in which rows are looked up.
        as_products: those of matrices are products of nothing, as strategies may send factors.
    """

    passes: Mapping[str, int] = field(default_factory=dict)
    order: Sequence[str] = ()
    tables: Mapping[str, bool] = field(default_factory=dict)
    reads: Sequence[str] = ()
    as_products: bool = True

    def lookups(self, tensors: Sequence[Leaf], number: int) -> torch.Tensor | None:
        """A number that is zero, and follows from no row of each table.

        Args:
            tensors: the state.
            number: of the backward pass.
        """
        found: torch.Tensor | None = None
        for leaf in tensors:
            if self.passes.get(leaf.name) != number or leaf.name not in self.tables:
                continue
            # As many as are chosen, which torch does not know to be none: else it looks up nothing;
            # and their gradient has to need them.
            ids = torch.zeros(1, dtype=torch.bool, device=leaf.value.device).nonzero()[:, 0]
            nothing = F.embedding(ids, leaf.value, sparse=self.tables[leaf.name]).square().sum()
            found = nothing if found is None else found + nothing
        return found

    def gradient(self, variable: torch.Tensor) -> torch.Tensor:
        """A gradient of zero, of a variable that is no table."""
        if not self.as_products or variable.dim() != 2:
            return torch.zeros_like(variable)
        rows, columns = (variable.new_zeros(0, size) for size in variable.shape)
        return torch.mm(rows.t(), columns)


NOTHING_LENT = Lent()
_OF_ROWS = {torch.ops.aten.embedding_dense_backward.default}
_LOOKUPS = {torch.ops.aten.embedding.default}
_SUMS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
_MOST_NODES = 6
"""Of a gradient of zero, with the variable and the mark."""


def gradients_of(step: StepGraph, passes: Mapping[str, int]) -> Gradients:
    """What a step has gradients of, so that other workers can have them as zeros.

    Args:
        step: as it was captured.
        passes: by variable, the backward pass that it first has a gradient of.
    """
    order = {node: place for place, node in enumerate(step.graph.nodes)}
    found: dict[str, GradientPlace] = {}
    for mark in step.graph.find_nodes(op="call_function", target=marks.GRADIENT):
        name: Any = mark.args[1]
        table = step.placeholder(name)
        if name not in passes or name in found or table is None:
            continue
        form = _form(mark)
        readers = [node for node in table.users if node.target in _LOOKUPS]
        if form != "whole":
            ids = ancestors([node.args[1] for node in readers])  # type: ignore[misc]
            form = "late" if not readers or any(map(computes_much, ids)) else form
        read = min((order[node] for node in readers), default=0)
        found[name] = GradientPlace(name, passes[name], form, read)
    return tuple(found.values())


def _form(mark: Node) -> str:
    if mark.meta["val"].layout is not torch.strided:
        return "sparse"
    queue: list[Any] = [mark.args[0]]
    while queue:
        node = queue.pop()
        if node.target in _OF_ROWS:
            return "rows"
        if node.target in _SUMS:
            queue += node.args[:2]
    return "whole"


def missing(own: Gradients, all_of_them: Sequence[Gradients]) -> Lent:
    """What a worker lacks of all workers' gradients."""
    places: dict[str, GradientPlace] = {}
    for one in (place for gradients in all_of_them for place in gradients):
        places.setdefault(one.name, one)
    known = {one.name for one in own}
    lacking = [one for one in places.values() if one.name not in known and one.form != "late"]
    tables = {one.name: one.form == "sparse" for one in lacking if one.form != "whole"}
    return Lent(
        {one.name: one.number for one in lacking},
        _merged([[one.name for one in gradients] for gradients in all_of_them]),
        tables,
        _merged(
            [
                [one.name for one in sorted(gradients, key=lambda one: one.read) if one.read]
                for gradients in all_of_them
            ]
        ),
    )


def _merged(lists: Sequence[Sequence[str]]) -> list[str]:
    """All names of lists, in the order of the longest one; of others, behind what is before."""
    order: list[str] = []
    for names in sorted(lists, key=len, reverse=True):
        place = 0
        for name in names:
            if name in order:
                place = order.index(name) + 1
            else:
                order.insert(place, name)
                place += 1
    return order


def put_in_order(step: StepGraph, lent: Lent) -> None:
    """Let gradients of zero, and lookups of nothing, come where other workers have theirs: they
    depend on nothing."""
    if not lent.passes:
        return
    marked: dict[str, Node] = {}
    for mark in step.graph.find_nodes(op="call_function", target=marks.GRADIENT):
        marked.setdefault(str(mark.args[1]), mark)
    _put_off(step.graph, lent, marked)
    _move(step.graph, lent, lent.order, marked)
    order = {node: place for place, node in enumerate(step.graph.nodes)}
    read: dict[str, Node] = {}
    for name in lent.reads:
        users = [] if (table := step.placeholder(name)) is None else [*table.users]
        if readers := [node for node in users if node.target in _LOOKUPS]:
            read[name] = min(readers, key=order.__getitem__)
    _move(step.graph, lent, lent.reads, read)


def _put_off(graph: Graph, lent: Lent, marked: Mapping[str, Node]) -> None:
    """Move marks that come too early behind those that they follow."""
    before: Node | None = None
    for name in lent.order:
        if (mark := marked.get(name)) is None:
            continue
        if before is not None and name in lent.passes:
            order = {node: place for place, node in enumerate(graph.nodes)}
            first = min((order[user] for user in mark.users), default=len(order))
            if order[mark] < order[before] < first:
                before.append(mark)
        before = mark


def _move(graph: Graph, lent: Lent, names: Sequence[str], nodes: Mapping[str, Node]) -> None:
    """Move nodes of what is lent that come too late before those that follow them."""
    following: Node | None = None
    for name in reversed(names):
        if (node := nodes.get(name)) is None:
            continue
        if following is not None and name in lent.passes:
            order = {one: place for place, one in enumerate(graph.nodes)}
            made = sorted(ancestors([node]), key=order.__getitem__)
            for one in made if len(made) <= _MOST_NODES else ():
                if order[one] > order[following]:
                    following.prepend(one)
        following = node
