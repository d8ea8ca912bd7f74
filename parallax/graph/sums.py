"""Losses that are sums over the batch, of which an average over workers is another number."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from parallax.errors import SourceLine
from parallax.graph.loss_terms import REDUCTIONS, SUM, from_batch, losses, terms
from parallax.graph.step_graph import StepGraph
from parallax.graph.user_code import line_of

aten: Any = torch.ops.aten

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

    def is_no_mean(factor: float | Node, _: Node) -> bool:
        if isinstance(factor, Node):
            return False
        return abs(factor) >= _LEAST_SHARE and abs(factor) * rows != 1

    batch = from_batch(step)
    for loss, _ in losses(step.graph):
        for term, _ in terms(loss, is_no_mean):
            if term in batch and _adds_up(term, rows):
                return line_of(term)
    return None


def _adds_up(node: Node, rows: int) -> bool:
    """Whether a number is a sum over tensors that have the rows of the batch."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return False
    if source.target in REDUCTIONS:  # a function of several results, of which this is one
        node, source = source, source.args[0]
    place = REDUCTIONS.get(node.target)
    if place is not None:
        is_sum = len(node.args) > place and bool(node.args[place] == SUM)
        return is_sum and _length(source) % rows == 0  # of sequences, one for each item
    if node.target not in (aten.sum.default, aten.sum.dim_IntList) or _is_divided(source):
        return False
    return _length(source) == rows


def _is_divided(source: Any) -> bool:
    """Whether elements are divided by a number that is computed."""
    by = source.args[1] if getattr(source, "target", None) is aten.div.Tensor else None
    return isinstance(by, Node) and _length(by) == 1


def _length(source: Any) -> int:
    value = source.meta.get("val") if isinstance(source, Node) else None
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else 1
