"""Losses that are sums over the batch, of which an average over workers is another number."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from parallax.errors import SourceLine
from parallax.graph.analysis.batch_elements import elements
from parallax.graph.analysis.divided_by import SUMS
from parallax.graph.analysis.how_many import Number, expression
from parallax.graph.analysis.loss_terms import REDUCTIONS, SUM, from_batch, losses, terms
from parallax.graph.analysis.reductions import BY_LABEL, kind_of
from parallax.graph.common.operations import has_one_element, is_view_of_torch
from parallax.graph.common.user_code import line_of
from parallax.graph.step_graph import StepGraph

aten: Any = torch.ops.aten

_LEAST_SHARE = 0.1
"""Factors below it may be one over the number of rows."""
_LEAST_ROWS = 8
"""Factors that are smaller are as many as the rows by chance, if no symbol tells them apart."""


def note_sums(step: StepGraph, batch: Sequence[Any]) -> None:
    """Note a loss that adds up the rows of the batch, where gradients are averaged over workers.

    Args:
        step: as it was captured.
        batch: flat. Where its tensors have several first sizes (values and offsets of bags), each
            may be that of what a loss adds up.
    """
    symbols = {expression(one) for one in step.rows if isinstance(one, torch.SymInt)}
    lengths = first_sizes(batch) - {0, 1}
    way_out = (
        "and gradients are averaged over workers: the sum over all their batches, as on one "
        "device, needs Config(average_dense=False, average_sparse=False)"
    )
    if (
        where := _sum_over_batch(step, symbols or lengths, lengths | _other_numbers(batch))
    ) is not None:
        step.notes.append(f"the loss is a sum over the batch, {way_out} ({where})")
    elif (
        where := _times_rows(step, symbols or {n for n in lengths if n >= _LEAST_ROWS})
    ) is not None:
        step.notes.append(
            "the loss is multiplied by as many as the batch has rows, as a sum over the batch is, "
            f"{way_out} ({where})"
        )


def first_sizes(batch: Iterable[Any]) -> set[int]:
    """Those of the tensors of a flat batch."""
    return {item.shape[0] for item in batch if isinstance(item, torch.Tensor) and item.dim()}


def _other_numbers(batch: Iterable[Any]) -> set[int]:
    """What else a loss may divide by: how many elements tensors have, and two of them together."""
    tensors = [item for item in batch if isinstance(item, torch.Tensor) and item.dim()]
    whole = {item.numel() for item in tensors}
    pairs = [*itertools.combinations(first_sizes(tensors), 2), *itertools.combinations(whole, 2)]
    return (whole | set(map(sum, pairs))) - {0, 1}


def _sum_over_batch(
    step: StepGraph, sizes: Collection[Number], numbers: Collection[int]
) -> SourceLine | None:
    """Where a loss adds up tensors of these sizes, and divides by none of these numbers."""

    def is_no_mean(factor: float | Node, _: Node) -> bool:
        if isinstance(factor, Node):
            return False
        is_share = any(math.isclose(abs(factor) * number, 1) for number in numbers)
        return abs(factor) >= _LEAST_SHARE and not is_share

    batch = from_batch(step)
    for loss, _ in losses(step.graph):
        for term, _ in terms(loss, is_no_mean):
            if term in batch and _adds_up(term, sizes):
                return line_of(term)
    return None


def _times_rows(step: StepGraph, sizes: Collection[Number]) -> SourceLine | None:
    """Where a loss is multiplied by one of these numbers of rows, and divided by no such number."""
    found: list[Node] = []
    divided: list[Node] = []

    def note(_: float | Node, node: Node) -> bool:
        numbers = {*map(_whole, node.args)} - {None, *range(_LEAST_ROWS)}
        if node.target is not aten.mul.Tensor:
            divided.extend([node] if numbers else [])
        elif numbers & {*sizes}:
            found.append(node)
        return True

    for loss, _ in losses(step.graph):
        for _term in terms(loss, note):
            pass
    return line_of(found[0]) if found and not divided else None


def _whole(number: Any) -> Number | None:
    """A whole number, or a size, that is an operand."""
    if isinstance(number, Node):
        number = number.meta.get("val")
    return expression(number) if isinstance(number, int | torch.SymInt) else None


def _adds_up(node: Node, sizes: Collection[Number]) -> bool:
    """Whether a number is a sum over tensors that have the rows of the batch."""
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return False
    if node.target is operator.getitem and source.target in REDUCTIONS:  # one of several results
        node, source = source, source.args[0]
    place = REDUCTIONS.get(node.target)
    if place is not None:
        is_sum = len(node.args) > place and bool(node.args[place] == SUM)
        # Of sequences, one for each item.
        return is_sum and any(_length(source) % rows == 0 for rows in sizes)
    if node.target not in (aten.sum.default, aten.sum.dim_IntList):
        return False
    if source.target is aten.mean.dim or _is_divided(source):
        return False
    if _length(source) not in sizes:
        return False
    return not any(map(_puts_numbers_together, elements(source)))


def _puts_numbers_together(node: Node) -> bool:
    """Whether a node makes a list of numbers, as of the losses of several tasks."""
    several: Any = node.args[0] if node.target is aten.stack.default else ()
    return any(map(has_one_element, several))


def _is_divided(source: Any) -> bool:
    """Whether elements are divided by a number that is computed, or multiplied with such."""
    while isinstance(source, Node) and is_view_of_torch(source):
        source = source.args[0]
    target = getattr(source, "target", None)
    if target is aten.mul.Tensor:
        return any(map(_is_divided, source.args))
    by = source.args[1] if target is aten.div.Tensor else None
    return isinstance(by, Node) and _length(by) == 1 and _is_count(by)


def _is_count(number: Node) -> bool:
    """Whether a number may follow from how much there is, as against means and deviations."""
    queue, seen = [number], {number}
    while queue:
        node = queue.pop()
        if node.op == "placeholder" or _length(node) != 1 or _counts(node):
            return True
        if kind_of(node)[0] is None:
            fresh = {one for one in node.all_input_nodes if one not in seen}
            seen |= fresh
            queue += fresh
    return False


def _counts(node: Node) -> bool:
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return not is_tensor or node.target in SUMS or node.target in BY_LABEL


def _length(source: Any) -> Number:
    value = source.meta.get("val") if isinstance(source, Node) else None
    return expression(value.shape[0]) if isinstance(value, torch.Tensor) and value.dim() else 1
