"""What a loss divides by that only the batch tells, such as how many labels are not left out.

A mean over some of the batch (``ignore_index``, class weights, a mask for padding) is a sum over
the batch, divided by a number that is summed over the batch as well, in the step or before it. On
several workers that number has to be the one of all their batches for the loss to be that of one
device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.batch_elements import BatchElements, elements
from parallax.graph.analysis.divided_by import (
    SUMS,
    Followed,
    Step,
    is_total,
    keeps_number,
    known_number,
    total_of,
)
from parallax.graph.analysis.how_many import expression, how_many
from parallax.graph.analysis.loss_terms import (
    MEAN,
    NLL,
    REDUCTIONS,
    SUM,
    Factor,
    WeightedUse,
    from_batch,
    losses,
    made_of,
    reduction,
    terms,
    weighted_uses,
)
from parallax.graph.common.guards import run_program
from parallax.graph.common.operations import ancestors
from parallax.graph.common.slices import masks_of, slice_program
from parallax.graph.step_graph import StepGraph

aten: Any = torch.ops.aten

_SUMS_OF_TWO = {aten.add.Tensor, operator.add}
_DIFFERENCES = {aten.rsub.Scalar, aten.sub.Tensor, operator.sub}
_LEFT_OUT = -100
"""The label that losses leave out unless they are told another one."""


@dataclass(eq=False)
class Divisor:
    """A number that terms of a loss are divided by.

    Args:
        value: the number, as it is on this worker.
        total: the sum over the batch that ``value`` follows from, or a number that comes with the
            batch; of labels that are counted, or of the weights of their classes, None.
        steps: from ``total`` to ``value``, what is computed of it.
        is_mean: ``total`` is a mean over the batch, and so is what it divides.
        multiplies: ``value`` is one over the number.
        factors: terms, each with what multiplies it.
        uses: what divides gradients by it, or multiplies them with it.
    """

    value: Node
    total: Node | None
    steps: tuple[Step, ...] = ()
    is_mean: bool = False
    multiplies: bool = False
    factors: list[tuple[Node, Factor]] = field(default_factory=list)
    uses: list[Node] = field(default_factory=list)
    terms: list[Node] = field(default_factory=list)
    """What divides numbers of the loss by it."""
    weighted: list[WeightedUse] = field(default_factory=list)
    """Of its terms."""


def divisors(step: StepGraph, of_batch: BatchElements) -> list[Divisor]:
    """The divisors of a step's losses.

    Args:
        step: as it was captured.
        of_batch: what of it follows from the batch.
    """
    search = _Search(of_batch)
    found: dict[Node, Divisor] = {}
    after: dict[Node, set[Node]] = {}
    for loss, gradients in losses(step.graph):
        for term, factor in terms(loss, search.is_factor):
            divisor = search.of_term(term)
            if divisor is None:
                continue
            weighted = weighted_uses(term, factor, search.is_factor, gradients)
            if weighted is None:
                continue
            known = found.setdefault(divisor.value, replace(divisor, factors=[], weighted=[]))
            if (known.is_mean, known.multiplies) == (divisor.is_mean, divisor.multiplies):
                known.factors += [(term, factor * own) for _, own in divisor.factors]
                known.terms.append(term)
                known.weighted += weighted
                after.setdefault(divisor.value, set()).update(gradients)
    return [one for one in found.values() if _find_uses(one, after[one.value])]


def parts_of_others(step: StepGraph, of_batch: BatchElements, leave_out: bool) -> Iterator[Node]:
    """Whatever a step's losses are made of and is divided by a number that the batch tells, also
    where a loss is no sum of it.

    Args:
        leave_out: some labels are left out by PyTorch's default.
    """
    search = _Search(of_batch)
    for loss, _ in losses(step.graph):
        for node in made_of([loss]):
            if (divisor := search.of_term(node)) is not None:
                if leave_out or not is_plain(divisor):
                    yield node
            elif search.divides_by_total(node):
                yield node


def divided_by_inputs(step: StepGraph, of_batch: BatchElements) -> Iterator[Node]:
    """Sums in a step's losses that are divided by a number which the batch brings."""
    search = _Search(of_batch)
    for loss, _ in losses(step.graph):
        for term, factor in terms(loss, search.is_factor):
            if summed(term) is not None and any(map(search.is_input, factor.over)):
                yield term


def divides_by_constants(step: StepGraph) -> bool:
    """Whether a sum in a step's losses is divided by a whole number that is part of the graph."""
    for node in made_of(loss for loss, _ in losses(step.graph)):
        for part, value, multiplies in _quotients(node):
            if isinstance(part, Node) and _is_whole(value, multiplies):
                sums = [part for part, _ in terms(part, _is_no_sum)]
                if any(map(summed, [*sums, *node.users])):
                    return True
    return False


def _is_whole(value: Any, is_inverse: bool) -> bool:
    """Whether a constant is a whole number, or one over it."""
    if not isinstance(value, int | float) or not value:
        return False
    number = 1 / value if is_inverse else value
    return number >= 1 and math.isclose(number, round(number))


def _is_no_sum(factor: float | Node, _: Node) -> bool:
    return not isinstance(factor, Node) or summed(factor) is None


def leaves_out_labels(step: StepGraph, batch: Sequence[Any]) -> bool:
    """Whether a loss leaves out labels of a batch by what PyTorch leaves out if nothing is said.

    Args:
        step: as it was captured.
        batch: flat; what it was captured for.
    """
    values = {item.name: batch[item.index] for item in step.inputs if item.kind == "batch"}
    of_batch = from_batch(step)
    for node in step.graph.nodes:
        if node.target not in NLL or not _is_default(node):
            continue
        labels: Any = node.args[1]
        if labels not in of_batch:
            continue
        sliced = slice_program((labels,), values, step.graph_module, counts=False)
        if sliced is None:
            return True
        program, names = sliced
        (found,) = run_program(program, [values[name] for name in names])
        if bool((found == _LEFT_OUT).any()):
            return True
    return False


def is_plain(divisor: Divisor) -> bool:
    """Whether it counts labels that are no selection, and of which none is left out but those of
    PyTorch's default."""
    if divisor.total is not None:
        return False
    loss: Any = divisor.value.args[0]
    return _is_default(loss) and not _is_selected(loss.args[1])


def _is_selected(labels: Node) -> bool:
    """Whether a mask selects them. By what computes them, not by their sizes, which are numbers
    where a batch is empty."""
    return any(masks_of(node) for node in ancestors([labels]))


def _is_default(loss: Any) -> bool:
    _, _, weight, _, ignored = loss.args
    return weight is None and reduction(loss) == MEAN and ignored == _LEFT_OUT


def _find_uses(divisor: Divisor, gradients: set[Node]) -> bool:
    """Find what gradients are divided by it; False if they are used with it in other ways."""
    value = divisor.value
    for user in value.users:
        if user in divisor.terms or user not in gradients:
            continue
        if user.target in NLL.values():
            others = user.args[:6]
        elif user.target is (aten.mul if divisor.multiplies else aten.div).Tensor:
            others = user.args[:1] if user.args[1] is value else user.args[1:]
            if user.args[1] is not value and not divisor.multiplies:
                return False
        else:
            return False
        if value in others:
            return False
        divisor.uses.append(user)
    return bool(divisor.uses)


_SIZES_OF = {aten.sym_numel.default, aten.sym_size.int}


class _Search:
    def __init__(self, found: BatchElements) -> None:
        self._found = found

    def is_factor(self, factor: float | Node, product: Node) -> bool:
        """Whether gradients of terms are multiplied by it, and it is no term and no divisor."""
        if not isinstance(factor, Node):
            return True
        if not self._found.is_weight(factor) or total_of(factor) is not None:
            return False
        return not any(
            value is factor and self._of_quotient(part, value, multiplies) is not None
            for part, value, multiplies in _quotients(product)
        )

    def of_term(self, term: Node) -> Divisor | None:
        """What a term of a loss is divided by, if it is a sum over the batch."""
        arguments: Any = term.args
        if term.target is operator.getitem and arguments[0].target in NLL and arguments[1] == 0:
            return self._of_labels(arguments[0])
        for part, value, multiplies in _quotients(term):
            if found := self._of_quotient(part, value, multiplies):
                return found
        return self._of_elements(term)

    def _of_elements(self, term: Node) -> Divisor | None:
        """Of a sum of quotients, ``(loss / count).sum()``."""
        source = term.args[0] if term.target is aten.sum.default else None
        for part, value, multiplies in _quotients(source) if isinstance(source, Node) else ():
            if not isinstance(part, Node) or not self._found.is_data(value):
                continue
            if part in self._found.batch and (found := self._total(value, multiplies)):
                return Divisor(
                    value, found.total, found.steps, False, multiplies, [(term, Factor())]
                )
        return None

    def divides_by_total(self, node: Node) -> bool:
        """Whether what follows from parameters is divided by a sum over the batch that the step
        has, or by a number of it that does not add up over batches."""
        for part, value, multiplies in _quotients(node):
            if self._found.is_of_other(part) and self._found.is_of_batch(value):
                found = total_of(value, self._is_given)
                if found is None or not is_total(found.total):
                    return False
                alike = found.is_inverse is multiplies
                return alike and not self._found.is_of_item(found.total.args[0])
        return False

    def is_input(self, value: Node) -> bool:
        """Whether a number follows from numbers of the batch alone."""
        sources = [one for one in elements(value) if one.op == "placeholder"]
        return self._found.is_of_batch(value) and bool(sources) and all(map(_is_number, sources))

    def _of_labels(self, loss: Node) -> Divisor | None:
        labels: Any
        labels, weight = loss.args[1:3]
        if reduction(loss) != MEAN or not self._count_alike(labels):
            return None
        if any(map(self._found.is_of_item, loss.args[:2])):
            return None
        if self._found.is_of_other(weight):
            return None
        value = next((user for user in loss.users if user.args[1] == 1), None)
        return Divisor(value, None, factors=[(loss, Factor())]) if value is not None else None

    def _count_alike(self, labels: Node) -> bool:
        """Whether the numbers of labels of all workers' batches are that of all batches in one."""
        if self._found.is_of_batch(labels):
            return True
        masks = [mask for node in ancestors([labels]) for mask in masks_of(node)]
        return not self._found.is_of_other(labels) and all(
            self._found.is_of_batch(mask) and self._found.adds_up(mask) for mask in masks
        )

    def _of_quotient(self, part: Any, value: Any, multiplies: bool) -> Divisor | None:
        if not isinstance(part, Node) or not isinstance(value, Node):
            return None
        if (found := self._total(value, multiplies)) is None:
            return None
        total, steps, _ = found
        if total.target not in _SIZES_OF and not self._found.is_data(value):
            return None
        is_mean = total.target is aten.mean.default
        factors = []
        for term, factor in terms(part, self.is_factor):
            source = summed(term, is_mean)
            if source is None or source not in self._found.batch:
                return None
            factors.append((term, factor))
        return Divisor(value, total, steps, is_mean, multiplies, factors)

    def _total(self, value: Node, is_inverse: bool) -> Followed | None:
        """How a number follows from a sum over the batch."""
        found = total_of(value, self._is_given)
        if found is None or found.is_inverse is not is_inverse:
            return None
        if not is_total(found.total):
            return found
        counted: Any = found.total.args[0]
        return found if self._found.adds_up(counted) else None

    def _is_given(self, node: Node) -> bool:
        """Whether a number comes with the batch, or is the sum of such, or of totals of it."""
        if node.target in _SUMS_OF_TWO:
            parts = all(isinstance(one, Node) and self._is_part(one) for one in node.args)
            return parts or self._is_of_all_rows(node)
        if node.target in _DIFFERENCES:
            return self._is_rest(node)
        if node.target in _SIZES_OF:
            return self._is_how_many(node)
        return node.op == "placeholder" and self._found.is_of_batch(node) and _is_number(node)

    def _is_how_many(self, node: Node) -> bool:
        """Whether a number is how many of a batch a mask selects: ``len(mask.nonzero())``."""
        number, source = expression(node.meta["val"]), node.args[0]
        if not getattr(number, "is_Symbol", False) or not isinstance(source, Node):
            return False
        found = [
            one.args[0]
            for one in elements(source)
            if one.target is aten.nonzero.default and expression(one.meta["val"].shape[0]) == number
        ]
        return bool(found) and all(
            self._found.is_of_batch(mask) and self._found.adds_up(mask)  # type: ignore[arg-type]
            for mask in found
        )

    def _is_of_all_rows(self, node: Node) -> bool:
        """Whether a number is the sum of what a loop counts in each row of the batch."""
        queue: list[Any] = [node]
        counted: list[Any] = []
        while queue:
            one = queue.pop()
            value = known_number(one)
            if isinstance(value, int | float) and value == 0:  # what a loop begins with
                continue
            if not isinstance(one, Node):
                return False
            if one.target in _SUMS_OF_TWO:
                queue += one.args
            else:
                found = total_of(one)
                if found is None or not all(map(keeps_number, found.steps)):
                    return False
                counted.append(found.total.args[0])
        return bool(counted) and self._found.add_up_by_rows(counted)

    def _is_rest(self, node: Node) -> bool:
        """Whether a number is how many elements are not counted: ``mask.numel() - mask.sum()``; or
        the difference of two such."""
        arguments: Any = node.args
        if len(arguments) != 2 or node.kwargs:
            return False
        counted, whole = arguments if node.target is aten.rsub.Scalar else reversed(arguments)
        if not isinstance(counted, Node) or not self._is_part(counted):
            return False
        if isinstance(whole, Node) and self._is_part(whole):
            return True
        found = total_of(counted, self._is_given)
        if found is None or not is_total(found.total):
            return False
        size, source = known_number(whole), found.total.args[0]
        if not isinstance(size, int | torch.SymInt) or not isinstance(source, Node):
            return False
        return bool(expression(size) == how_many(source))

    def _is_part(self, node: Node) -> bool:
        """Whether a number adds up over batches, as it is."""
        if self._is_given(node):
            return True
        found = total_of(node, self._is_given)
        if found is None or found.total.target is aten.mean.default:
            return False
        counted: Any = found.total.args[0] if is_total(found.total) else None
        adds_up = counted is None or self._found.adds_up(counted)
        return adds_up and all(keeps_number(step) for step in found.steps)


def _is_number(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _quotients(node: Node) -> Iterator[tuple[Any, Any, bool]]:
    """What is divided, by what, or may be multiplied with one over it: whether it is."""
    arguments: Any = node.args
    if node.target is aten.div.Tensor:
        yield (*arguments[:2], False)
    elif node.target is aten.mul.Tensor:
        yield (*arguments, True)
        yield (*reversed(arguments), True)


def summed(term: Node, is_mean: bool = False) -> Node | None:
    """What a term is the sum of, or the mean; None if it is neither."""
    node: Any = term
    if node.target is operator.getitem and node.args[0].target in REDUCTIONS:
        node = node.args[0]
    if node.target in REDUCTIONS:
        return node if not is_mean and reduction(node) == SUM else None
    wanted = {aten.mean.default} if is_mean else SUMS
    return node.args[0] if node.target in wanted and is_total(node) else None
