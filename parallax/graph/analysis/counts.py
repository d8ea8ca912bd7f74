"""How many elements a loss is a mean over, where this does not follow from the rows of a batch.

``loss[mask].mean()`` divides by the size of a selection, and a mean over the nodes of graphs, or
the words of packed sequences, by how many of these a batch has. On several workers the number has
to be the one of all their batches for the loss to be that of one device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.analysis.batch_elements import BatchElements
from parallax.graph.analysis.divided_by import known_number, total_of
from parallax.graph.analysis.divisors import summed
from parallax.graph.analysis.how_many import Number, expression, how_many, product
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
from parallax.graph.common.sizes import same_shape
from parallax.graph.common.slices import masks_of
from parallax.graph.common.torch_internals import free_unbacked_symbols
from parallax.graph.step_graph import StepGraph
from parallax.ops.totals import MOST

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


@dataclass(eq=False)
class Count:
    """A number of elements that terms of a loss are divided by.

    Args:
        number: of elements.
        source: the mask that selects them, a tensor that has so many, or the number itself; None if
            it is known.
        each: of a mask, how many elements an element of it selects; None if it is no mask.
        dims: of a tensor, the dimensions whose sizes are multiplied; None for all.
        factors: terms, each with what multiplies it.
        terms: what divides numbers of the loss by it.
        uses: what divides gradients by it.
    """

    number: Number
    source: Node | None
    each: int | None
    dims: tuple[int, ...] | None = None
    factors: list[tuple[Node, Factor]] = field(default_factory=list)
    terms: list[Node] = field(default_factory=list)
    uses: list[Node] = field(default_factory=list)
    weighted: list[WeightedUse] = field(default_factory=list)
    """Of its terms."""
    in_pieces: bool = False
    """A term adds up a part of what the number is of, and workers may have several numbers of such
    terms."""


def counts(step: StepGraph, of_batch: BatchElements, by_rows: bool) -> list[Count]:
    """What the means in a step's losses are over.

    Args:
        step: as it was captured.
        of_batch: what of it follows from the batch.
        by_rows: batches count by their rows, so that only sizes of selections are not known by
            these.
    """
    search = _Search(step, of_batch, by_rows)
    found = [search.of_loss(loss, after) for loss, after in losses(step.graph)]
    whole = _with_pieces_joined([count for some in found for count in some])
    return whole if len(whole) <= MOST else _with_numbers_joined(found)


def means_of_others(step: StepGraph, of_batch: BatchElements, by_rows: bool) -> Iterator[Node]:
    """Means over elements of the batch in whatever a step's losses are made of."""
    search = _Search(step, of_batch, by_rows)
    for loss, _ in losses(step.graph):
        yield from filter(search.is_mean, made_of([loss]))


def divides_within(node: Node) -> bool:
    """Whether a use of a count divides by it within, without having it for an argument."""
    return node.target in _WITHIN.values()


class _Search:
    def __init__(self, step: StepGraph, of_batch: BatchElements, by_rows: bool) -> None:
        graph = step.graph
        self._order = {node: number for number, node in enumerate(graph.nodes)}
        self._of_batch = of_batch
        self._by_rows = by_rows
        self._masks, self._same = _selections(graph)
        self._given = [self._as_first(expression(one)) for one in step.rows]
        """How many rows the batch's tensors have."""

    def of_loss(self, loss: Node, gradients: set[Node]) -> list[Count]:
        """The counts of one loss, by what follows from it on the way to gradients, in the order of
        their terms."""
        within: dict[Node, Count] = {}
        by_number: dict[Number, dict[Node, Count]] = {}
        for term, factor in terms(loss, self._is_factor):
            node, share = self._dividing(term)
            number = self._divides_by(node)
            if number is None or not self._is_mean(node, number):
                continue
            weighted = weighted_uses(term, factor, self._is_factor, gradients)
            count = self._count(number, node)
            if weighted is None or count is None:
                continue
            alike = within if node.target in _WITHIN else by_number.setdefault(number, {})
            count = alike.setdefault(node, replace(count, terms=[term]))
            count.in_pieces = node.target in _QUOTIENTS and self._is_piece(node, number)
            count.factors.append((term, factor * share))
            count.weighted += weighted
        if not within and not by_number:
            return []
        known = within.keys() | {node for alike in by_number.values() for node in alike}
        others: dict[Number, list[Node]] = {}
        for node in made_of([loss]) - known:
            if self._of_batch.is_of_other(node):
                others.setdefault(self._divides_by(node), []).append(node)
        after = sorted(gradients, key=self._order.__getitem__)
        for whole, count in within.items():
            count.uses += [node for node in after if _is_gradient(node, whole)]
        found = [*within.values()]
        for number, alike in by_number.items():
            if number in others and self._selecting(number):
                continue  # the loss divides by how many are selected in another way, too
            uses = [node for node in after if self._divides_by(node) == number]
            found += self._by_term(alike, others.get(number, ()), uses)
        used = [count for count in found if count.uses]
        return sorted(used, key=lambda count: self._order[count.terms[0]])

    def _by_term(
        self, found: Mapping[Node, Count], others: Sequence[Node], uses: Sequence[Node]
    ) -> Sequence[Count]:
        """Counts of one number, each with its own uses.

        Two sets of the batch may be equally many on one worker by chance, or one element each, so
        that numbers do not tell them apart. The order does: backward comes last to what is computed
        first. Where that does not fit either, all are one count; none is, if which gradients are
        divided for it is not known.

        Args:
            found: by what divides for a term.
            others: what else a loss is made of and divides by the number.
            uses: what divides gradients by it.
        """
        divided = sorted((*found, *others), key=self._order.__getitem__, reverse=True)
        pairs = list(zip(divided, uses, strict=False))
        if len(divided) == len(uses) and all(_may_be_use(*pair) for pair in pairs):
            for node, use in pairs:
                if node in found:
                    found[node].uses.append(use)
            return [*found.values()]
        return [] if others else [replace(_joined([*found.values()]), uses=[*uses])]

    def is_mean(self, node: Node) -> bool:
        """Whether a node is a mean over elements of the batch that do not count as its rows do."""
        number = self._divides_by(node)
        return number is not None and self._is_mean(node, number, adds_up=False)

    def _dividing(self, term: Node) -> tuple[Node, Factor]:
        """What divides for a term of a loss, and what this is multiplied with: ``x.mean(0)`` in
        ``x.mean(0).sum()`` and in the mean of that."""
        source: Any = term.args[0] if term.args else None
        if term.target not in (aten.sum.default, aten.mean.default) or not isinstance(source, Node):
            return term, Factor()
        if source.target is not aten.mean.dim or not _is_along_batch(source):
            return term, Factor()
        many = how_many(source)
        if term.target is aten.mean.default and isinstance(many, int) and many:
            return source, Factor(1 / many)
        return source, Factor()

    def _is_factor(self, factor: float | Node, product: Node) -> bool:
        if not isinstance(factor, Node):
            return not self._is_quotient(product)
        if not self._of_batch.is_weight(factor) or total_of(factor) is not None:
            return False
        size = _whole(known_number(factor))
        if size is None:
            return True
        return self._by_rows and not self._selecting(self._as_first(expression(size)))

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

    def _is_mean(self, term: Node, number: Number, adds_up: bool = True) -> bool:
        """Whether a term is a mean over elements of the batch, by their number.

        Args:
            adds_up: the number has to be one that adds up over batches.
        """
        symbols = self._selecting(number)
        if self._by_rows and not symbols:
            return False
        masks = [mask for symbol in symbols for mask in self._masks[symbol]]
        if not all(map(self._of_batch.is_data, masks)):
            return False
        right = self._of_batch.adds_up if adds_up else self._is_of_rows
        if not all(map(right, masks)):
            return False
        source: Any = term.args[0]
        compared = term.args[:2] if term.target in REDUCTIONS else (source,)
        if source not in self._of_batch.batch or any(map(self._of_batch.is_of_item, compared)):
            return False
        if term.target is aten.mean.dim:
            return _is_along_batch(term)
        if term.target not in _QUOTIENTS:
            # A mean of one element is over the batch, too, if this has one there.
            return bool(term.meta["val"].dim() == 0 and source.meta["val"].dim() > 0)
        summands = self._summed_in(source)
        if any(map(self._of_batch.is_of_item, summands)):
            return False
        if not symbols:
            return bool(summands) and self._is_of(number, summands)
        return bool(summands) and all(
            set(symbols).issubset(self._selecting(self._as_first(how_many(one))))
            for one in summands
        )

    def _is_of_rows(self, mask: Node) -> bool:
        return not self._of_batch.is_of_item(mask)

    def _is_piece(self, node: Node, number: Number) -> bool:
        """Whether a quotient is of a sum over fewer rows than the number that it divides by says,
        which is that of the batch's."""
        summands = self._summed_in(node.args[0])  # type: ignore[arg-type]
        return number in self._given and number not in self._rows(
            one.meta["val"] for one in summands
        )

    def _rows(self, tensors: Iterable[torch.Tensor]) -> list[Number]:
        return [self._as_first(expression(one.shape[0])) for one in tensors]

    def _summed_in(self, whole: Node) -> list[Node]:
        """What has the rows of what a number sums up; nothing if that is not known of all of it."""
        found = [_rows_of(summed(part)) for part, _ in terms(whole, self._is_factor)]
        known = [one for one in found if one is not None]
        return known if len(known) == len(found) else []

    def _is_of(self, number: Number, summands: Sequence[Node]) -> bool:
        """Whether a number says of how many elements, or rows, tensors are, or a part of the batch.
        A constant that is the same by chance is so on one worker, if their batches differ."""
        if number in self._given:
            return True
        rows = self._rows(one.meta["val"] for one in summands)
        sizes: list[Number] = [self._as_first(how_many(one)) for one in summands]
        if number in (0, 1):  # or of none: max(len(x), 1)
            return all(one == number for one in rows) or not any(sizes)
        if all(number in pair for pair in zip(rows, sizes, strict=True)):
            return True
        return number in (sum(rows), sum(sizes))

    def _count(self, number: Number, node: Node) -> Count | None:
        """Where the number is known earliest that a node divides by; None if it is nowhere."""
        arguments: Any = node.args
        if node.target in _QUOTIENTS and not any(map(how_many, self._summed_in(arguments[0]))):
            number = 0
        if isinstance(number, int):
            return Count(number, None, None)
        for symbol in self._selecting(number):
            if (number / symbol).is_number:
                return Count(number, self._masks[symbol][0], int(number / symbol))
        if node.target is aten.mean.dim:
            return Count(number, arguments[0], None, tuple(arguments[1]))
        source = next((one for one in self._order if self._says(one, number)), None)
        return None if source is None else Count(number, source, None)

    def _says(self, node: Node, number: Number) -> bool:
        """Whether a node is a number, or a tensor with that number of elements."""
        value = node.meta.get("val")
        size = expression(value) if isinstance(value, torch.SymInt) else how_many(node)
        return bool(self._as_first(size) == number)


def _is_along_batch(mean: Node) -> bool:
    """Whether a mean by dimensions is one along the first."""
    source, dims = mean.args[:2]
    rank = source.meta["val"].dim()  # type: ignore[union-attr]
    return any(place in (0, -rank) for place in dims or range(rank))  # type: ignore[union-attr]


def _rows_of(summed_up: Node | None) -> Node | None:
    """What has the rows of what is summed up; None if nothing is known to have them."""
    if summed_up is not None and summed_up.target in REDUCTIONS:  # its labels
        summed_up = summed_up.args[1]  # type: ignore[assignment]
    value = None if summed_up is None else summed_up.meta.get("val")
    return summed_up if isinstance(value, torch.Tensor) and value.dim() else None


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
            number = expression(size)
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
        return None if number is None else expression(number)
    if node.target is aten.mean.default:
        return how_many(arguments[0])
    if node.target is aten.mean.dim:
        shape = arguments[0].meta["val"].shape
        return product(shape[place] for place in arguments[1] or range(len(shape)))
    if node.target in REDUCTIONS and node.target not in NLL:
        return how_many(arguments[0]) if reduction(node) == MEAN else None
    return None


def _whole(number: Any) -> int | torch.SymInt | None:
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return number if isinstance(number, int | torch.SymInt) else None


def _joined(some: Sequence[Count]) -> Count:
    """One count of terms whose numbers are equal."""
    return replace(
        some[0],
        factors=[factor for count in some for factor in count.factors],
        terms=[term for count in some for term in count.terms],
        uses=[use for count in some for use in count.uses],
        weighted=[one for count in some for one in count.weighted],
    )


def _with_pieces_joined(found: Sequence[Count]) -> list[Count]:
    """Counts of which those of pieces are one where they are of one number, multiplied alike."""
    groups: dict[Any, list[Count]] = {}
    for place, count in enumerate(found):
        is_piece = count.in_pieces and len(count.factors) == 1
        key = (count.number, count.factors[0][1]) if is_piece else place
        groups.setdefault(key, []).append(count)
    return [replace(_joined(some), factors=some[0].factors) for some in groups.values()]


def _with_numbers_joined(found: Sequence[Sequence[Count]]) -> list[Count]:
    """By loss, counts of which those of one number are one, where there are many."""
    groups: dict[Any, list[Count]] = {}
    for loss, some in enumerate(found):
        for count in some:
            within = count.terms[0] if count.terms[0].target in _WITHIN else None
            groups.setdefault((loss, within, count.number), []).append(count)
    return [_joined(some) for some in groups.values()]


def _may_be_use(term: Node, use: Node) -> bool:
    """Whether what divides a gradient has the shape that it has for what divides for a term."""
    source: Any = term if term.target in _QUOTIENTS else term.args[0]
    return same_shape(source.meta["val"].shape, use.meta["val"].shape)


def _is_gradient(node: Node, loss: Node) -> bool:
    """Whether a node is the gradient of a loss function by one of its inputs."""
    return node.target is _WITHIN[loss.target] and set(node.args[1:3]) == set(loss.args[:2])
