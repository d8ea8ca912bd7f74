"""What rows are multiplied with before losses add them up, as in ``(loss * (w / w.sum())).sum()``.

Of a sum over the batch, gradients are an average over workers unless it is divided by a number of
all their batches. Where each row is divided by it first, it is that of the product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.batch_elements import BatchElements
from parallax.graph.analysis.batch_numbers import PRODUCTS, QUOTIENTS
from parallax.graph.analysis.divided_by import SUMS
from parallax.graph.analysis.divisors import summed
from parallax.graph.analysis.loss_terms import losses, terms
from parallax.graph.common.operations import is_view_of_torch
from parallax.graph.step_graph import StepGraph

aten: Any = torch.ops.aten

_LINEAR = {aten.neg.default, aten.sum.dim_IntList, aten.clone.default, aten._to_copy.default}


class SummedRows:
    """The products and quotients that a step's losses are sums of.

    Args:
        step: as it was captured.
        of_batch: what of it follows from the batch.
    """

    def __init__(self, step: StepGraph, of_batch: BatchElements) -> None:
        self._found: set[Node] = set()

        def is_weight(factor: float | Node, _: Node) -> bool:
            return not isinstance(factor, Node) or of_batch.is_weight(factor)

        for loss, gradients in losses(step.graph):
            for term, _ in terms(loss, is_weight):
                if term.target is aten.dot.default:
                    self._found |= {term} | _multiplied(term, term.args, gradients)
                elif (source := summed(term)) is not None and term.target in SUMS:
                    self._found |= _multiplied(term, (source,), gradients)
        self._numbers = {node.meta["forward"] for node in self._found if "forward" in node.meta}
        """Of their operations, by which those of the backward pass know them."""

    def is_divided_by(self, node: Node, value: Node, degree: float | None) -> bool:
        """Whether a node multiplies rows by one over a sum over the batch, or computes gradients
        with it.

        Args:
            node: it.
            value: what it multiplies them with, or divides them by.
            degree: how often sums over the batch multiply this.
        """
        made_by = node.meta.get("backward_of")
        if node not in self._found and (made_by is None or made_by[0] not in self._numbers):
            return False
        if node.target in PRODUCTS | {aten.dot.default}:
            return degree == -1 and node.args.count(value) == 1
        if node.target in QUOTIENTS:
            return degree == (1 if value is node.args[1] else -1) and node.args.count(value) == 1
        return False


def _multiplied(term: Node, sources: Iterable[Any], gradients: Collection[Node]) -> set[Node]:
    """What a sum is linear in, back to what it adds up; without what something else uses."""
    found: set[Node] = set()
    queue = [*sources]
    while queue:
        node = queue.pop()
        if not isinstance(node, Node) or node in found:
            continue
        if node.target in PRODUCTS:
            queue += node.args
        elif node.target in QUOTIENTS or node.target in _LINEAR or is_view_of_torch(node):
            queue.append(node.args[0])
        else:
            continue
        found.add(node)
    return {
        node
        for node in found
        if all(user in found or user is term or user in gradients for user in node.users)
    }
