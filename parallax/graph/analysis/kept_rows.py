"""Rows of the batch that a step puts into its state: queues, banks of features, replay buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.batch_numbers import QUOTIENTS
from parallax.graph.analysis.degrees import flat
from parallax.graph.analysis.divided_by import known_number
from parallax.graph.analysis.loss_terms import SIZES, losses, made_of
from parallax.graph.analysis.row_places import PARTS, RowSizes, is_narrow, is_tensor, shape_of
from parallax.graph.common.aliases import memory_of
from parallax.graph.common.operations import written_inputs
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks

aten: Any = torch.ops.aten

_PUT_TOGETHER = {
    aten.cat.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.index_put.default,
    aten.index_copy.default,
    aten.scatter.src,
    *PARTS,
}
"""What takes rows as they are."""

_ENDS = {*SIZES, marks.GRADIENT}
"""What does not follow from values of this worker's batch."""

IsSized = Callable[[Node], bool]
"""Whether a node follows from how many rows the batch has, and from no values of it."""


def kept_rows(
    step: StepGraph,
    sizes: RowSizes,
    follows: Collection[Node],
    is_sized: IsSized,
    known: Collection[Node],
) -> Collection[Node]:
    """What first makes state of rows of the batch, or of how many there are.

    On one device a queue of keys gets those of the whole batch, and a count of what was seen all of
    its rows. Means and sums over the batch are no part of this, nor is state with a place for each
    row, such as that of a recurrent network. Of buffers, other numbers of the batch are.

    Args:
        step: as it was captured.
        sizes: which grow with the rows of its batch.
        follows: what follows from values of the batch.
        is_sized: see :data:`IsSized`.
        known: numbers of the batch that workers can put together of their own ones.
    """
    found = _KeptRows(sizes, follows, is_sized, known)
    inputs = [*zip(step.own_placeholders(), step.inputs, strict=True)]
    leaves = {item.name: node for node, item in inputs if item.kind == "state"}
    saved = {node for node, item in inputs if item.saved}
    marked = step.graph.find_nodes(op="call_function", target=marks.GRADIENT)
    variables = {str(node.args[1]) for node in marked}
    state = {node for name, node in leaves.items() if name not in variables}
    if isinstance(step.rows[0], torch.SymInt):
        state -= {memory_of(node) for node in step.graph.nodes if found.is_of_lanes(node)}
    first: dict[Node, None] = {}
    for node in step.graph.nodes:
        for written in written_inputs(node):
            if memory_of(written) in state and _is_assignment(node):
                first |= dict.fromkeys(found.written(node, written, memory_of(written) in saved))
    values: Any = step.graph.output_node().args[0]
    made = [one for one in zip(values, step.outputs, strict=True) if isinstance(one[0], Node)]
    for value, item in made:
        if item.kind == "state" and leaves.get(item.name) in state:
            first |= dict.fromkeys(found.new(value, leaves[item.name] in saved))
    # Numbers of Python's, such as how many rows were seen, are often for people alone.
    relevant = made_of([*first, *(loss for loss, _ in losses(step.graph))])
    for value, item in made:
        if item.kind in ("outside", "write") and value in relevant and is_sized(value):
            first[value] = None
    return first


def may_keep_rows(
    step: StepGraph, sizes: RowSizes, follows: Collection[Node], known: Collection[Node]
) -> bool:
    """Whether a step that was captured for one size of batch may have such.

    Args:
        step, sizes, follows, known: as of :func:`kept_rows`. Sizes may be equal by chance.
    """

    def may_be_sized(node: Node) -> bool:
        numbers = (one for one in flat(node.args) if type(one) in (int, float))
        return any(one > 0 and one % max(sizes.count, 1) == 0 for one in numbers)

    return bool(kept_rows(step, sizes, follows, may_be_sized, known))


def has_row_places(node: Node, sizes: RowSizes) -> bool:
    """Whether state that a node writes has as many places as the batch has rows, as that of a
    recurrent network has."""
    return any(sizes.count in shape_of(memory_of(one)) for one in written_inputs(node))


def _is_assignment(node: Node) -> bool:
    """Whether a node does nothing but change a tensor in place, unlike a layer that normalises."""
    return str(node.target._schema.name).endswith("_")  # type: ignore[union-attr]


class _KeptRows:
    def __init__(
        self,
        sizes: RowSizes,
        follows: Collection[Node],
        is_sized: IsSized,
        known: Collection[Node],
    ) -> None:
        self._sizes = sizes
        self._follows = follows
        self._is_sized = is_sized
        self._known = known

    def is_of_lanes(self, node: Node) -> bool:
        """Whether a node reads as many places of a state as the batch has rows, where those lie
        that belong to these: ``hidden[: len(x)]``."""
        if node.op != "call_function" or node in self._follows or not is_tensor(node):
            return False
        state: Any = node.args[0] if node.args else None
        if not isinstance(state, Node) or memory_of(state).op != "placeholder":
            return False
        if not self._are_rows(node):
            return False
        readers = (one for one in node.users if one.target not in SIZES)
        return any(node not in written_inputs(one) for one in readers)

    def written(self, node: Node, state: Node, saved: bool) -> Iterator[Node]:
        """What first makes what a node writes."""
        given = [one for one in node.all_input_nodes if one is not state]
        if any(map(self._has_rows, given)):
            yield node
        else:
            yield from self._of_numbers(node, given, saved)

    def new(self, value: Node, saved: bool) -> Iterator[Node]:
        """What first makes a new value of state."""
        if self._is_put_together(value):
            yield value
        elif not self._has_rows(value) and not self._has_places(value):
            yield from self._of_numbers(value, [value], saved)

    def _of_numbers(self, node: Node, given: Collection[Node], saved: bool) -> Iterator[Node]:
        """The same of what has no rows."""
        queue, seen = [*given], {node}
        is_of_size = self._is_sized(node) and not self._has_places(node)
        while queue:
            one = queue.pop()
            is_of_size |= self._is_sized(one) and not self._has_places(one)
            is_end = one.op != "call_function" or one.target in _ENDS or one in self._known
            if one in seen or is_end:
                continue
            seen.add(one)
            if any(map(self._has_rows, one.all_input_nodes)):
                if self._is_put_together(one) or (saved and self._is_narrow(one)):
                    yield one
            elif not self._is_mean(one):
                queue += one.all_input_nodes
        if is_of_size:
            yield node

    def _has_rows(self, node: Node) -> bool:
        return node in self._follows and bool(self._sizes.dims(node))

    def _has_places(self, node: Node) -> bool:
        """Whether a tensor has a place for each row, such as a state that is set to zeros."""
        shape = shape_of(node) if is_tensor(node) else ()
        return not all(isinstance(size, int) for size in shape) and self._are_rows(node)

    def _is_narrow(self, node: Node) -> bool:
        """Whether the rows that a number is made of are few bytes each."""
        return all(is_narrow(one, self._sizes) for one in node.all_input_nodes if is_tensor(one))

    def _is_put_together(self, node: Node) -> bool:
        """Whether a node has rows of the batch in other places."""
        rows = [one for one in node.all_input_nodes if self._has_rows(one)]
        return bool(rows) and node.target in _PUT_TOGETHER and not self._are_rows(node)

    def _are_rows(self, node: Node) -> bool:
        shape = shape_of(node)
        if all(isinstance(size, int) for size in shape):
            return self._sizes.count in shape
        return any(self._sizes.times(size) is not None for size in shape)

    def _is_mean(self, node: Node) -> bool:
        """Whether a sum is divided by a size, which gives the same number for all batches."""
        if node.target not in QUOTIENTS:
            return False
        source, size = node.args[:2]
        number = known_number(size)
        return source in self._follows and number is not None and self._sizes.has_all(number)
