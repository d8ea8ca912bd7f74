"""Losses that are sums over the batch, of which an average over workers is another number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from parallax.errors import SourceLine
from parallax.graph.operations import is_view
from parallax.graph.step_graph import StepGraph
from parallax.graph.user_code import line_of

aten: Any = torch.ops.aten

_SUM = 2  # torch's number for reduction="sum"
_REDUCTIONS = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
    aten.nll_loss_forward.default: 3,
    aten.nll_loss2d_forward.default: 3,
}
"""Of loss functions, which argument is their reduction."""
_LEAST_SHARE = 0.1
"""Factors below it may be one over the number of rows."""


def note_sums(step: StepGraph, rows: int) -> None:
    """Note a loss that adds up the rows of the batch, where gradients are averaged over workers.

    Args:
        step: a step that is captured for one size of batch.
        rows: how many rows the batch has.
    """
    if (where := _sum_over_batch(step, rows)) is not None:
        step.notes.append(
            "the loss is a sum over the batch, and gradients are averaged over workers: the sum "
            "over all their batches, as on one device, needs Config(average_dense=False, "
            f"average_sparse=False) ({where})"
        )


def _sum_over_batch(step: StepGraph, rows: int) -> SourceLine | None:
    if rows < 2:
        return None
    batch = _from_batch(step)
    for seed in step.graph.find_nodes(op="call_function", target=aten.ones_like.default):
        loss = seed.args[0]
        if isinstance(loss, Node) and loss.meta["val"].numel() == 1:
            for part in _parts(loss, rows):
                if part in batch and _adds_up(part, rows):
                    return line_of(part)
    return None


def _from_batch(step: StepGraph) -> set[Node]:
    """What is computed from the batch."""
    inputs = zip(step.placeholders(), step.inputs, strict=True)
    found = {node for node, item in inputs if item.kind == "batch"}
    for node in step.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _parts(loss: Node, rows: int) -> Iterator[Node]:
    """What a loss is the sum of, but for factors that are no means."""
    queue = [loss]
    while queue:
        node = queue.pop()
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if node.meta["val"].numel() != 1:
            continue
        yield node
        sources = [arg for arg in node.args if isinstance(arg, Node)]
        if node.target in (aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.neg.default):
            queue += sources
        elif node.target is aten.mul.Tensor or node.target is aten.div.Tensor:
            factor = node.args[1]
            is_division = node.target is aten.div.Tensor
            if isinstance(factor, int | float) and factor:
                share = abs(1 / factor if is_division else factor)
                if share >= _LEAST_SHARE and share * rows != 1:
                    queue += sources
        elif is_view(node) or node.target in (aten._to_copy.default, aten.clone.default):
            queue += sources


def _adds_up(node: Node, rows: int) -> bool:
    """Whether a number is a sum over tensors that have the rows of the batch."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return False
    if source.target in _REDUCTIONS:  # a function of several results, of which this is one
        node, source = source, source.args[0]
    place = _REDUCTIONS.get(node.target)
    if place is not None:
        is_sum = len(node.args) > place and bool(node.args[place] == _SUM)
        return is_sum and _length(source) % rows == 0  # of sequences, one for each item
    return node.target in (aten.sum.default, aten.sum.dim_IntList) and _length(source) == rows


def _length(source: Any) -> int:
    value = source.meta.get("val") if isinstance(source, Node) else None
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else 1
