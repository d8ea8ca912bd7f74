"""How many elements a loss is a mean over, where this does not follow from the rows of a batch.

``loss[mask].mean()`` divides by the size of a selection, and a mean over the nodes of graphs, or
the words of packed sequences, by how many of these a batch has. On several workers the number has
to be the one of all their batches for the loss to be that of one device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.analysis.batch_elements import BatchElements
from parallax.graph.analysis.divided_by import known_number, total_of
from parallax.graph.analysis.divisors import summed
from parallax.graph.analysis.loss_terms import (
    MEAN,
    NLL,
    REDUCTIONS,
    Factor,
    WeightedUse,
    losses,
    made_of,
    reduction,
    terms,
    weighted_uses,
)
from parallax.graph.common.operations import must_stay
from parallax.graph.common.slices import masks_of
from parallax.graph.common.torch_internals import free_unbacked_symbols
from parallax.graph.step_graph import StepGraph

aten: Any = torch.ops.aten

_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar}
_WITHIN = {
    aten.mse_loss.default: aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default: aten.smooth_l1_loss_backward.default,
    aten.huber_loss.default: aten.huber_loss_backward.default,
    aten.soft_margin_loss.default: aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy.default: aten.binary_cross_entropy_backward.default,
}
"""Of means that are not divided in the open, the gradient."""
Number = Any
"""A number, or an expression over sizes."""


@dataclass(eq=False)
class Count:
    """A number of elements that terms of a loss are divided by.

    Args:
        number: of elements.
        source: the mask that selects them, or a tensor that has so many; None if it is known.
        each: of a mask, how many elements an element of it selects; None if it is no mask.
        factors: what multiplies the terms, of each.
        terms: what divides numbers of the loss by it.
        uses: what divides gradients by it.
    """

    number: Number
    source: Node | None
    each: int | None
    factors: list[Factor] = field(default_factory=list)
    terms: list[Node] = field(default_factory=list)
    uses: list[Node] = field(default_factory=list)
    weighted: list[WeightedUse] = field(default_factory=list)
    """Of its terms."""


def counts(step: StepGraph, of_batch: BatchElements, by_rows: bool) -> list[Count]:
    """What the means in a step's losses are over.

    Args:
        step: as it was captured.
        of_batch: what of it follows from the batch.
        by_rows: batches count by their rows, so that only sizes of selections are not known by
            these.
    """
    search = _Search(step.graph, of_batch, by_rows)
    return [count for loss, after in losses(step.graph) for count in search.of_loss(loss, after)]


def selections_of_others(step: StepGraph, of_batch: BatchElements, by_rows: bool) -> Iterator[Node]:
    """Means over selections of whatever a step's losses are made of."""
    search = _Search(step.graph, of_batch, by_rows)
    for loss, _ in losses(step.graph):
        yield from filter(search.is_of_selected, made_of([loss]))


def divides_within(node: Node) -> bool:
    """Whether a use of a count divides by it within, without having it for an argument."""
    return node.target in _WITHIN.values()


class _Search:
    def __init__(self, graph: Graph, of_batch: BatchElements, by_rows: bool) -> None:
        self._order = {node: number for number, node in enumerate(graph.nodes)}
        self._of_batch = of_batch
        self._by_rows = by_rows
        self._masks, self._same = _selections(graph)

    def of_loss(self, loss: Node, gradients: set[Node]) -> Iterator[Count]:
        """The counts of one loss, by what follows from it on the way to gradients."""
        found: dict[Any, Count] = {}
        for term, factor in terms(loss, self._is_factor):
            number = self._divides_by(term)
            if number is None or not self._is_mean(term, number):
                continue
            weighted = weighted_uses(term, factor, self._is_factor, gradients)
            if weighted is None:
                continue
            key = term if term.target in _WITHIN else number
            count = found.setdefault(key, self._count(number))
            count.factors.append(factor)
            count.terms.append(term)
            count.weighted += weighted
        known = {term for count in found.values() for term in count.terms}
        for node in made_of([loss]) - known if found else ():
            number = self._divides_by(node)
            found.pop(number, None)  # which of the gradients are divided for it is not known
        after = sorted(gradients, key=self._order.__getitem__) if found else []
        for key, count in found.items():
            for node in after:
                if isinstance(key, Node):
                    is_use = _is_gradient(node, key)
                else:
                    is_use = self._divides_by(node) == key
                if is_use:
                    count.uses.append(node)
            if count.uses:
                yield count

    def is_of_selected(self, node: Node) -> bool:
        """Whether a node is a mean over elements that a mask selects."""
        number = self._divides_by(node)
        return bool(number is not None and self._selecting(number)) and self._is_mean(node, number)

    def _is_factor(self, factor: float | Node, product: Node) -> bool:
        if not isinstance(factor, Node):
            return not self._is_quotient(product)
        if not self._of_batch.is_weight(factor) or total_of(factor) is not None:
            return False
        size = _whole(known_number(factor))
        if size is None:
            return True
        return self._by_rows and not self._selecting(self._as_first(_expression(size)))

    def _is_quotient(self, node: Node) -> bool:
        """Whether a node is a mean for it divides a sum by a number that is known."""
        number = self._divides_by(node) if node.target in _QUOTIENTS else None
        return number is not None and self._is_mean(node, number)

    def _divides_by(self, node: Node) -> Number | None:
        return self._as_first(_divides_by(node))

    def _as_first(self, number: Number | None) -> Number | None:
        """A number by the first of sizes that are the same."""
        return number if number is None or isinstance(number, int) else number.xreplace(self._same)

    def _selecting(self, number: Number) -> list[Any]:
        """The sizes of selections that a number follows from."""
        symbols: Collection[Any] = getattr(number, "free_symbols", ())
        return [symbol for symbol in symbols if symbol in self._masks]

    def _is_mean(self, term: Node, number: Number) -> bool:
        """Whether a term is a mean over elements of the batch, by their number."""
        symbols = self._selecting(number)
        if number == 1 or (self._by_rows and not symbols):
            return False
        masks = [mask for symbol in symbols for mask in self._masks[symbol]]
        if not all(
            self._of_batch.is_of_batch(one) and self._of_batch.adds_up(one) for one in masks
        ):
            return False
        source: Any = term.args[0]
        if source not in self._of_batch.batch or self._of_batch.is_of_item(source):
            return False
        if term.target not in _QUOTIENTS:
            return bool(term.meta["val"].dim() == 0)
        summands = [summed(part) for part, _ in terms(source, self._is_factor)]
        return all(one is not None and self._counts(number, symbols, one) for one in summands)

    def _counts(self, number: Number, symbols: Sequence[Any], summed_up: Node) -> bool:
        """Whether a number is of the elements of a tensor, or of its rows.

        Args:
            symbols: sizes of selections that it follows from.
        """
        if symbols:
            return set(symbols).issubset(self._selecting(self._as_first(_elements(summed_up))))
        # A constant that is the same by chance is so on one worker, if their batches differ.
        shape = summed_up.meta["val"].shape
        return len(shape) > 0 and bool(self._as_first(_expression(shape[0])) == number)

    def _count(self, number: Number) -> Count:
        """Where a number is known earliest."""
        if isinstance(number, int):
            return Count(number, None, None)
        for symbol in self._selecting(number):
            if (number / symbol).is_number:
                return Count(number, self._masks[symbol][0], int(number / symbol))
        source = next(one for one in self._order if self._as_first(_elements(one)) == number)
        return Count(number, source, None)


def _selections(graph: Graph) -> tuple[dict[Any, list[Node]], dict[Any, Any]]:
    """By the size of a selection, what chooses its elements; and of sizes that are the same, since
    what chooses is computed twice in one way, which other one they are."""
    found: dict[Any, list[Node]] = {}
    same: dict[Any, Any] = {}
    first: dict[Any, Any] = {}
    for node in graph.nodes:
        if not (masks := masks_of(node)):
            continue
        for size in node.meta["val"].shape:
            number = _expression(size)
            if number in free_unbacked_symbols(number) and number not in found:
                found[number] = masks
                same[number] = first.setdefault(tuple(map(_way, masks)), number)
    return found, same


def _way(value: Any) -> Any:
    """How a value is computed; equal for those that are computed alike."""
    if isinstance(value, list | tuple):
        return tuple(map(_way, value))
    if not isinstance(value, Node):
        return type(value), str(value)
    if value.op != "call_function" or must_stay(value):
        return value
    named = sorted(value.kwargs.items())
    return value.target, _way(value.args), _way([one for pair in named for one in pair])


def _divides_by(node: Node) -> Number | None:
    """The number of elements that an operation is a mean over, or the number that it divides by;
    None for what is neither, or divides by no whole number."""
    arguments: Any = node.args
    if node.target in _QUOTIENTS:
        number = _whole(known_number(arguments[1]))
        return None if number is None else _expression(number)
    if node.target is aten.mean.default:
        return _elements(arguments[0])
    if node.target is aten.mean.dim:
        shape = arguments[0].meta["val"].shape
        return _product(shape[place] for place in arguments[1] or range(len(shape)))
    if node.target in REDUCTIONS and node.target not in NLL:
        return _elements(arguments[0]) if reduction(node) == MEAN else None
    return None


def _whole(number: Any) -> int | torch.SymInt | None:
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return number if isinstance(number, int | torch.SymInt) else None


def _is_gradient(node: Node, loss: Node) -> bool:
    """Whether a node is the gradient of a loss function by one of its inputs."""
    return node.target is _WITHIN[loss.target] and set(node.args[1:3]) == set(loss.args[:2])


def _elements(node: Node) -> Number | None:
    """How many elements a tensor has."""
    value = node.meta.get("val")
    return _product(value.shape) if isinstance(value, torch.Tensor) else None


def _product(sizes: Iterable[int | torch.SymInt]) -> Number:
    whole: Number = 1
    for size in sizes:
        whole = whole * _expression(size)
    return whole


def _expression(size: int | torch.SymInt) -> Number:
    if isinstance(size, torch.SymInt):
        return int(size.node.expr) if size.node.expr.is_number else size.node.expr
    return size
