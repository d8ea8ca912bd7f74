"""Gradients that the step computed some other way and put into ``.grad`` itself.

What is assigned is a gradient of this worker, to be aggregated, if it follows from the batch (or
from random numbers) and from no gradient that was marked before. Else it is what the step makes of
gradients that are aggregated, or the same on all workers, and stays as it is. What is added to a
gradient that nothing else has used is part of it, as what another backward pass adds: ``p.grad +=
g`` for each of several tasks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from parallax.graph.common.aliases import memory_of
from parallax.graph.common.operations import is_random, written_inputs
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks

aten: Any = torch.ops.aten


def settle_assigned(step: StepGraph) -> None:
    """Leave marks on what is assigned only where it is a gradient of this worker, and have what is
    added to gradients marked with them."""
    found = step.graph.find_nodes(op="call_function", target=marks.GRADIENT)
    adds = (user for node in found for user in node.users if user.target is aten.add_.Tensor)
    if any(len(node.args) > 2 for node in found) or any(user.args[0] in found for user in adds):
        _Settling(step).settle()


class _Settling:
    """One pass over a graph, in its order."""

    def __init__(self, step: StepGraph) -> None:
        inputs = zip(step.inputs, step.placeholders(), strict=True)
        self._graph = step.graph
        self._of_batch = {node for item, node in inputs if item.kind == "batch"}
        self._local = set(self._of_batch)
        """That, and what follows from random numbers."""
        self._marked: set[Node] = set()
        self._alike: dict[Node, str] = {}
        """What was assigned and is the same on all workers, as zeros are: of which variable."""

    def settle(self) -> None:
        for node in list(self._graph.nodes):
            if node.op != "call_function":
                continue
            if node.target is not marks.GRADIENT:
                self._follow(node)
            elif len(node.args) < 3 or self._settled(node):
                _spread(node, self._marked)

    def _follow(self, node: Node) -> None:
        sources = node.all_input_nodes
        earlier = _added_to(node) if node.target is aten.add_.Tensor else None
        # What a backward pass adds is marked again already.
        is_marked = any(user.target is marks.GRADIENT for user in node.users)
        if earlier is not None and not is_marked and self._is_added(node):
            variable = self._alike.get(earlier) or _marked_variable(earlier)
            if variable is not None:
                self._mark(node, variable)
                return
        if any(_follows(source, self._marked) for source in sources):
            _spread(node, self._marked)
        if is_random(node) or any(_follows(source, self._local) for source in sources):
            _spread(node, self._local)
        if any(_follows(source, self._of_batch) for source in sources):
            _spread(node, self._of_batch)

    def _is_added(self, total: Node) -> bool:
        """Whether a gradient of this worker is added to what nothing else uses."""
        earlier, added = total.args[:2]
        assert isinstance(earlier, Node)
        assert isinstance(added, Node)
        return (
            set(earlier.users) == {total}
            and not _follows(added, self._marked)
            and _follows(added, self._of_batch)
        )

    def _mark(self, total: Node, variable: str) -> None:
        """Mark a gradient once more when something was added to it in place."""
        with self._graph.inserting_after(total):
            mark = self._graph.call_function(marks.GRADIENT, (total, variable))
        mark.meta = dict(total.meta)
        total.replace_all_uses_with(mark, delete_user_cb=lambda user: user is not mark)
        _spread(mark, self._marked)

    def _settled(self, mark: Node) -> bool:
        """Keep the mark on what is assigned if it is to be there; whether it is."""
        value, variable = mark.args[:2]
        assert isinstance(value, Node)
        assert isinstance(variable, str)
        earlier = _added_to(value)
        adds = earlier is not None and _marked_variable(earlier) == variable
        if adds and self._is_added(value):
            mark.args = mark.args[:2]
            return True
        if _follows(value, self._marked) or not _follows(value, self._local):
            if _marked_variable(value) is None and not _follows(value, self._marked):
                self._alike[value] = variable
            mark.replace_all_uses_with(value)
            self._graph.erase_node(mark)
            return False
        mark.args = mark.args[:2]
        return True


def _added_to(total: Node) -> Node | None:
    """What something is added to."""
    if total.target not in (aten.add.Tensor, aten.add_.Tensor):
        return None
    earlier, added = total.args[:2]
    both = isinstance(earlier, Node) and isinstance(added, Node)
    return earlier if both and earlier is not added else None  # type: ignore[return-value]


def _marked_variable(node: Node) -> str | None:
    """The variable whose gradient a node is marked as."""
    return str(node.args[1]) if node.target is marks.GRADIENT else None


def _follows(node: Node, among: set[Node]) -> bool:
    return node in among or memory_of(node) in among


def _spread(node: Node, among: set[Node]) -> None:
    among.add(node)
    among.update(memory_of(source) for source in written_inputs(node))
