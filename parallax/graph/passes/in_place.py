"""Tensors that a step changes in place, such as ``loss /= n`` or ``out[:, t] = h``: computed anew.

What a loss is made of is read from the graph, where a tensor that changes is several, and what is
written to a part of one is no input of what reads the whole.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Sequence

import torch
from torch.fx import Node

from parallax.graph.analysis.loss_terms import backward_passes, from_batch
from parallax.graph.analysis.row_matrices import MATRIX_PRODUCTS, matrices_of
from parallax.graph.common.aliases import memory_of, tensor_of
from parallax.graph.common.operations import ancestors, has_one_element, written_inputs
from parallax.graph.common.sizes import same_shape, same_size
from parallax.graph.passes.written_parts import as_values
from parallax.graph.step_graph import StepGraph
from parallax.ops.statistics import MOST_COLUMNS

aten = torch.ops.aten

_BY_NUMBERS = {aten.div_.Tensor, aten.mul_.Tensor, aten.add_.Tensor, aten.sub_.Tensor}


def compute_anew(step: StepGraph) -> None:
    """Let the step compute what it changes in place, where that is a part of a tensor that then
    follows from the batch; or losses follow from the tensor, and it is changed by a number, or one
    for each column, or has numbers of columns itself."""
    graph = step.graph
    writes: dict[Node, list[Node]] = collections.defaultdict(list)
    changing: set[Node] = set()
    for node in graph.nodes:
        for one in written_inputs(node):
            changing.add(memory := memory_of(one))
            is_new = not writes[memory] or writes[memory][-1] is not node
            if is_new and _is_own(memory) and node.meta.get("autograd") != "backward":
                writes[memory].append(node)
    if not any(writes.values()):
        return
    batch = from_batch(step)
    leading = ancestors((loss for _, loss in backward_passes(graph)), writes)

    def matters(node: Node, memory: Node) -> bool:
        if memory in leading and memory in batch and _is_of_columns(memory, step.rows):
            return True
        if tensor_of(written_inputs(node)[0]) is not memory:
            return any(one in batch for one in node.all_input_nodes if memory_of(one) is not memory)
        by = node.args[1] if node.target in _BY_NUMBERS else None
        is_by_number = isinstance(by, Node) and by in batch and _is_number(by, memory)
        is_chosen = node.target is aten.index_put_.default
        return memory in leading and (has_one_element(memory) or is_by_number or is_chosen)

    first = {
        memory: next((node for node in several if matters(node, memory)), None)
        for memory, several in writes.items()
    }
    for memory, node in first.items():
        if node is not None:
            as_values(graph, memory, node, changing)


def _is_own(node: Node) -> bool:
    """Whether the step computes a tensor."""
    target = node.args[0].target if node.target is operator.getitem else node.target  # type: ignore[union-attr]
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"


def _is_of_columns(memory: Node, rows: Sequence[int | torch.SymInt]) -> bool:
    """Whether a tensor may be numbers of columns of the batch, and has no rows of it itself."""
    value = memory.meta["val"]
    if not isinstance(value.numel(), int) or value.numel() > MOST_COLUMNS:
        return False
    if not value.dim() or not any(same_size(value.shape[0], count) for count in rows):
        return True
    first = memory.args[0] if memory.target in MATRIX_PRODUCTS else None
    return isinstance(first, Node) and matrices_of(memory, first) is not None


def _is_number(by: Node, memory: Node) -> bool:
    """Whether a tensor is changed by one number, or by one for each column."""
    number, whole = by.meta["val"], memory.meta["val"]
    if by.op != "call_function" or not isinstance(number, torch.Tensor):
        return False
    return has_one_element(by) or number.dim() < whole.dim() or same_shape(number.shape[:1], (1,))
