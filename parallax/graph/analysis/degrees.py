"""How often sums over the batch multiply numbers that are computed with them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from parallax.graph.analysis.batch_elements import BatchElements
from parallax.graph.analysis.batch_numbers import AS_THEY_ARE, PRODUCTS, QUOTIENTS, BatchNumbers
from parallax.graph.analysis.divided_by import SUMS, known_number
from parallax.graph.analysis.reductions import Statistic
from parallax.graph.common.operations import is_view_of_torch, is_write
from parallax.graph.step_graph import StepGraph
from parallax.ops.statistics import Kind

aten: Any = torch.ops.aten

_WITH_SIZES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_ADDED = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.rsub.Scalar,
    aten.maximum.default,
    aten.minimum.default,
    aten.stack.default,
    aten.cat.default,
    operator.add,
    operator.sub,
    torch.sym_max,
    torch.sym_min,
}
"""What gives a number of the same kind, of two such."""
_BOUNDS = {aten.clamp.default, aten.clamp_min.default, aten.add.Scalar}
_LINEAR = {aten.mean.default, aten.mean.dim, *SUMS}
"""The same, of the numbers of several columns."""
_CHOSEN = {
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.embedding.default,
}
"""What takes some of several numbers."""
_OF_KINDS: dict[Kind, float | None] = {"sum": 1, "norm": 0.5, "logsumexp": None}
"""Those of kinds that are no means."""
_SMALL = 1.0
"""Up to it, what is added to a number or bounds it only keeps it from being zero."""


class Size(NamedTuple):
    """A size of this worker's batch that numbers are computed with.

    Args:
        place: which argument it is.
        summed: a sum over elements, of which it is the number, or that of their rows.
        more: than that number.
    """

    place: int
    summed: Statistic
    more: int


class Degrees:
    """How often sums over the batch multiply numbers: not at all, where all that they are made of
    is a mean, or the quotient of two sums; None if that is not known.

    Args:
        step: as it was captured.
        of_batch: what of it follows from the batch.
        numbers: those of the batch.
        take_ones: a one may be the size of a batch that has one row or two: one over a number is
            as many rows over it then.
    """

    def __init__(
        self,
        step: StepGraph,
        of_batch: BatchElements,
        numbers: BatchNumbers,
        take_ones: bool = False,
    ) -> None:
        self.others = numbers.others
        """What cannot be put together."""
        self.has_ones = False
        """Some may be sizes."""
        self._take_ones = take_ones
        self._of_batch = of_batch
        self._numbers = numbers
        self._known: dict[Node, float | None] = {}
        self._sums: dict[Node, Statistic] = {}
        """One that a number follows from."""
        self.sizes: dict[Node, Size] = {}
        for node in step.graph.nodes:  # in order, so that those of inputs are known
            if node in numbers.follows:
                self._note_sum(node)
                self._known[node] = self._degree(node)

    def of(self, node: Any) -> float | None:
        """That of a number."""
        return self._known.get(node, 0)

    def _degree(self, node: Node) -> float | None:
        if (found := self._numbers.found.get(node)) is not None:
            inner = [self.of(one) for one in found.sources]
            own = _OF_KINDS.get(found.kind, 0)
            return None if None in inner or own is None else sum(filter(None, inner)) + own
        inputs = [one for one in node.all_input_nodes if one in self._numbers.follows]
        degrees = [self.of(one) for one in inputs]
        is_alone = node in self._numbers.alone
        if None in degrees or is_write(node):
            return None
        if node.target in _CHOSEN and inputs == node.all_input_nodes[:1]:
            return degrees[0]
        if not is_alone and not is_pointwise(node) and node.target is not operator.getitem:
            return 0 if not any(degrees) and self._is_by_row(node) else None
        arguments: Any = node.args
        is_linear = is_alone and len(inputs) == 1 and node.target in _LINEAR
        is_linear = is_linear or node.target is operator.getitem
        if is_linear or node.target in AS_THEY_ARE or is_view_of_torch(node):
            return degrees[0]
        if node.target in PRODUCTS | QUOTIENTS:
            first, second = (self.of(one) for one in arguments[:2])
            if first is None or second is None:
                return None
            degree = first + second if node.target in PRODUCTS else first - second
            return 0 if degree and self._cancels(node, degree) else degree
        if node.target is aten.reciprocal.default:
            (inverse,) = degrees
            return None if inverse is None else -inverse
        if len({*degrees}) == 1 and self._keeps_degree(node, inputs):
            return degrees[0]
        return 0 if not any(degrees) else None

    def _is_by_row(self, node: Node) -> bool:
        """Whether each row follows from one of the batch, and from numbers."""
        by_numbers = node.target is aten.mm.default and node.args[1] in self._numbers.alone
        return by_numbers or self._of_batch.is_by_row(node)

    def _note_sum(self, node: Node) -> None:
        one = self._numbers.found.get(node)
        sums = [one] if one is not None and one.kind == "sum" else []
        sums += [self._sums[i] for i in node.all_input_nodes if i in self._sums]
        if sums:
            self._sums[node] = sums[0]

    def _cancels(self, node: Node, degree: float) -> bool:
        """Whether a number is multiplied with, or divided by, how many elements a sum has that is
        in it: ``len(y) / (classes * counts)``."""
        if node not in self._sums or node.target not in _WITH_SIZES:
            return False
        is_product = node.target in PRODUCTS
        if degree != (-1 if is_product else 1):
            return False
        for place in (0, 1) if is_product else (1,):
            more = self._numbers.size_of(node.args[place], self._sums[node])
            if more is not None:
                number = known_number(node.args[place])
                if isinstance(number, int | float) and number == 1 and is_product:
                    self.has_ones = True
                    if not self._take_ones:
                        continue
                self.sizes[node] = Size(place, self._sums[node], more)
                return True
        return False

    def _keeps_degree(self, node: Node, inputs: Collection[Node]) -> bool:
        if node.target not in _ADDED | _BOUNDS:
            return False
        others = [one for one in flat(node.args) if one not in inputs and one is not None]
        numbers = [known_number(one) for one in others]
        return all(isinstance(one, int | float) and 0 <= one <= _SMALL for one in numbers)


def flat(arguments: Any) -> Iterator[Any]:
    """The arguments of a node, also those in lists."""
    for one in arguments:
        if isinstance(one, list | tuple):
            yield from flat(one)
        else:
            yield one


def is_pointwise(node: Node) -> bool:
    """Whether each element follows from those in the same place."""
    if node.target in AS_THEY_ARE | _ADDED or not isinstance(node.target, torch._ops.OpOverload):
        return node.target in AS_THEY_ARE | _ADDED | PRODUCTS | QUOTIENTS
    return torch.Tag.pointwise in node.target.tags or is_view_of_torch(node)
