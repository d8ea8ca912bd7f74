"""Look at branches that go on both ways before a step changes anything.

Where the step looks first, or changes state first, all is looked at that follows from the gradients
known by then. What this needs from behind is moved there, or computed there on copies, if an
optimizer changes it on the way. So the graph can be left there, and the step run by another one, as
if it had not begun.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from parallax.errors import DataDependentError
from parallax.graph.common.aliases import memory_of, writes_to
from parallax.graph.common.operations import (
    add_call,
    is_view,
    must_stay,
    returned_input,
    written_inputs,
)
from parallax.graph.common.slices import needed_by
from parallax.graph.common.user_code import line_of
from parallax.graph.objects.state import Leaf
from parallax.graph.step_graph import StepGraph
from parallax.graph.symbols.assertions import enforce
from parallax.graph.symbols.guesses import is_look
from parallax.ops import marks

aten: Any = torch.ops.aten


def look_early(step: StepGraph, leaves: Mapping[str, Leaf]) -> None:
    """The pass.

    Args:
        step: captured, and clean.
        leaves: all state, by name.

    Raises:
        DataDependentError: something is changed before that cannot be put back, or a number that
            the step keeps is each worker's own.
    """
    graph = step.graph
    looks = [node for node in graph.nodes if is_look(node)]
    if not looks:
        return
    order = {node: number for number, node in enumerate(graph.nodes)}
    changes = [node for node in graph.nodes if any(_changed_state(node))]
    groups: dict[Node, list[Node]] = {}
    place = looks[0]
    own = _own_numbers(step)
    for look in looks:
        needed = needed_by(look.all_input_nodes)
        if not own.isdisjoint(needed):
            raise _of_one_worker(look)
        after = max((order[node] for node in needed if _is_gradient(node)), default=-1)
        if not groups or after > order[place]:
            place = next((c for c in changes if after < order[c] < order[look]), look)
        groups.setdefault(place, []).append(look)
    names = {
        node: item.name for item, node in zip(step.inputs, step.own_placeholders(), strict=True)
    }
    kept: dict[Node, Node] = {}
    for place, some in groups.items():
        order = {node: number for number, node in enumerate(graph.nodes)}
        before = [
            (memory, change)
            for change in changes
            if order[change] < order[place]
            for memory in _changed_state(change)
        ]
        for memory, change in before:
            leaf = leaves.get(names.get(memory, ""))
            if leaf is None or leaf.kind != "buffer":
                raise _too_late(some[0], change)
            if memory not in kept:
                with graph.inserting_before(change):
                    kept[memory] = add_call(graph, aten.clone.default, memory)
        pairs = [one for memory, _ in dict(before).items() for one in (memory, kept[memory])]
        _look_in_front_of(place, some, pairs, order)


def _own_numbers(step: StepGraph) -> set[Node]:
    """The placeholders of numbers that the step leaves for the next one and that follow from this
    worker's batch."""
    placeholders = step.own_placeholders()
    inputs = list(zip(step.inputs, placeholders, strict=True))
    batch = {node for item, node in inputs if item.kind == "batch"}
    (values,) = next(iter(reversed(step.graph.nodes))).args
    left = zip(step.outputs, values, strict=True)
    names = {
        output.name
        for output, value in left
        if output.kind == "outside"
        and isinstance(value, Node)
        and not batch.isdisjoint(needed_by([value]))
    }
    return {node for item, node in inputs if item.kind == "outside" and item.name in names}


def _look_in_front_of(
    place: Node, looks: Sequence[Node], before: Sequence[Node], order: Mapping[Node, int]
) -> None:
    """Move looks, and copy what they need from behind.

    Args:
        place: which node to move them in front of.
        before: what to restore, see :func:`parallax.graph.symbols.guesses.looking`.
        order: of the graph's nodes.
    """
    graph = place.graph
    needed = needed_by(source for look in looks for source in look.all_input_nodes)
    behind = {node for node in needed if order[node] >= order[place]}
    for node in sorted(behind, key=order.__getitem__):
        if _may_move(node, behind, order, order[place]):
            behind.remove(node)
            place.prepend(node)
    written = {memory_of(one) for node in behind for one in written_inputs(node)} - behind
    views = {
        node
        for node in needed - behind - written
        if node.op == "call_function" and memory_of(node) in written
    }
    copies: dict[Node, Node] = {}
    with graph.inserting_before(place):
        for memory in sorted(written, key=order.__getitem__):
            copies[memory] = add_call(graph, aten.clone.default, memory)
        # What one look needs may fail if an earlier one finds a guess to be wrong.
        for node in sorted(behind.union(views, looks), key=order.__getitem__):
            changed = returned_input(node) if node in views else None
            if changed is not None:  # it was changed before
                copies[node] = copies[changed]
            else:
                copies[node] = graph.node_copy(node, lambda one: copies.get(one, one))
        found = [copies[look] for look in looks]
        for one in found if before else ():
            one.kwargs = {"before": tuple(before)}
        guard = graph.call_function(enforce, (found,))
        guard.meta.update(looks[0].meta)
    for look in looks:
        graph.erase_node(look)


def _may_move(node: Node, behind: set[Node], order: Mapping[Node, int], place: int) -> bool:
    """Whether a node gives the same in an earlier place, when what it needs is there.

    Args:
        behind: what it may need that is not there.
        order: of the graph's nodes, as it was.
        place: in this order.
    """
    if not behind.isdisjoint(node.all_input_nodes):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem  # not Python's numbers, which may fail
    if must_stay(node):
        return False
    return is_view(node) or not any(
        place <= order[write] < order[node]
        for source in node.all_input_nodes
        for write in writes_to(memory_of(source))
    )


def _is_gradient(node: Node) -> bool:
    return node.target is marks.GRADIENT


def _changed_state(node: Node) -> Iterator[Node]:
    """The inputs of the graph that a node changes."""
    for written in written_inputs(node):
        if (memory := memory_of(written)).op == "placeholder":
            yield memory


def _of_one_worker(look: Node) -> DataDependentError:
    return DataDependentError(
        "Python control flow in the step depends on a number that it keeps and that follows from "
        "this worker's batch, so workers would go other ways.",
        hint="keep what follows from gradients, or choose with torch.where instead of `if`.",
        where=line_of(look),
    )


def _too_late(look: Node, change: Node) -> DataDependentError:
    where = line_of(change)
    return DataDependentError(
        "Python control flow in the step depends on the values of tensors, after the step has "
        f"changed others{f' ({where})' if where else ''}, so the step is not one graph.",
        hint="choose with torch.where or multiply by a mask instead of `if`; let a step have one "
        "optimizer whose Python decides by gradients, or put it first.",
        where=line_of(look),
    )
