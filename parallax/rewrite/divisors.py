"""Let means over some of the batch be those over all workers' batches.

Where a loss is divided by a number that only the batch tells, such as how many labels are not left
out, an average of workers' gradients would weigh these numbers away. By exchanging them, and
dividing gradients by what they are together, the average is the gradient of one device. Losses that
the step returns are those of the worker's own batch.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.counts import Count, divides_within
from parallax.graph.analysis.divisors import Divisor
from parallax.graph.analysis.loss_terms import Factor, WeightedUse, losses
from parallax.graph.analysis.totals import Batches, totals
from parallax.graph.common.operations import add_call
from parallax.graph.common.user_code import line_of
from parallax.ops.resources import finish, start
from parallax.ops.totals import MOST_TERMS, TermKey, TotalsSpec
from parallax.rewrite.context import Pass, Rewriting
from parallax.rewrite.early import at_the_start, known_early
from parallax.rewrite.term_keys import TermKeys

aten: Any = torch.ops.aten

logger = logging.getLogger("parallax")

_BY_TENSOR = {
    aten.div.Scalar: aten.div.Tensor,
    aten.div_.Scalar: aten.div_.Tensor,
}
_HALVES = {torch.float16, torch.bfloat16}
"""What a number of elements does not fit into."""


def dividing_by_all(batches: Batches) -> Pass:
    """The pass; gradients are means over workers, weighted by what batches count."""
    return functools.partial(_divide_by_all, batches)


def _divide_by_all(batches: Batches, work: Rewriting) -> None:
    if work.workers == 1:
        return
    wanted = totals(work.step, work.analysis.variables, batches)
    if not batches.total:
        _tell_of(wanted, "none was when the first batches were compared")
        return
    found = {
        one: _total(work, one) if isinstance(one, Divisor) else _counted(work, one)
        for one in wanted
    }
    while found:
        order = work.order()
        earliest = min((use for one in found for use in _uses(one)), key=order.__getitem__)
        sources = [source for one in found for source in _sources(one, found[one])]
        latest = max(sources, key=order.__getitem__)
        before = known_early(work, sources, _behind_inputs(latest))
        order = work.order()
        if order[before] <= order[earliest]:
            _exchange(work, found, before, earliest)
            return
        # Of several backward passes, those of which this is not known in time.
        limit = order[earliest]
        early = {
            one: total
            for one, total in found.items()
            if all(order[source] < limit for source in _sources(one, total))
        }
        late = [one for one in found if one not in early]
        _tell_of(late, "how many it is over is not known before the step's first backward pass")
        found = early
    _exchange(work, {}, *at_the_start(work))  # as of an empty batch


def _tell_of(alone: Iterable[Divisor | Count], why: str) -> None:
    """Say which means stay each worker's own."""
    for one in alone:
        logger.warning(
            "a mean over some of the batch is that of each worker's own batch, as %s (%s)",
            why,
            line_of(one.terms[0]),
        )


def _uses(divisor: Divisor | Count) -> list[Node]:
    return [*divisor.uses, *(one.use for one in divisor.weighted)]


def _sources(divisor: Divisor | Count, total: Node) -> list[Node]:
    """What is told of a divisor."""
    return [total, *(node for _, one in divisor.factors for node in one.times + one.over)]


def _exchange(
    work: Rewriting, found: Mapping[Divisor | Count, Node], before: Node, use: Node
) -> None:
    """Send totals in front of one node, and divide by those of all workers from another one on."""
    spec, multiplied = _described(work, found)
    resource = work.resource(spec, "totals")
    with work.graph.inserting_before(before):
        factors = [_factor(work, some) for some in multiplied]
        work.call(start, resource, 0, [*found.values()], factors)
    with work.graph.inserting_before(use):
        all_of_them = work.call(finish, resource, 0)
        shares: dict[Node, tuple[Node, Node]] = {}
        for number, (divisor, total) in enumerate(found.items()):
            example = total.meta["val"].double()
            parts = []
            for place in range(number, 3 * len(found), len(found)):
                part = work.item(all_of_them, place)
                part.meta["val"] = example
                parts.append(part)
            if isinstance(divisor, Divisor):
                share = _replace(work, divisor, *parts)
            else:
                share = _replace_count(work, divisor, total, *parts)
            shares.update(dict.fromkeys(divisor.terms, share))
    uses = {(one.use, one.part): one for divisor in found for one in divisor.weighted}
    for weighted in uses.values():
        _replace_weighted(work, weighted, shares)


def _total(work: Rewriting, divisor: Divisor) -> Node:
    """The sum over this worker's batch."""
    if divisor.total is not None:
        return _as_tensor(work, divisor.total, divisor.terms[0])
    loss: Any = divisor.value.args[0]
    _, labels, weight, _, ignored = loss.args
    graph = work.graph
    with graph.inserting_before(loss):
        counted = add_call(graph, aten.ne.Scalar, labels, ignored)
        if weight is not None:
            left_out = add_call(graph, aten.eq.Scalar, labels, ignored)
            classes = add_call(graph, aten.masked_fill.Scalar, labels, left_out, 0)
            weights = add_call(graph, aten.index.Tensor, weight, [classes])
            counted = add_call(graph, aten.mul.Tensor, weights, counted)
        return add_call(graph, aten.sum.default, counted)


def _as_tensor(work: Rewriting, number: Node, like: Node) -> Node:
    """A number, which may come with the batch, as a tensor of no dimension.

    Args:
        like: of the device that it is wanted on.
    """
    if isinstance(number.meta["val"], torch.Tensor):
        return number
    with work.graph.inserting_before(_behind_inputs(number)):
        example = like.meta["val"].new_empty((), dtype=torch.float64)
        named = {"dtype": example.dtype, "device": example.device}
        tensor = work.graph.call_function(aten.scalar_tensor.default, (number,), named)
        tensor.meta["val"] = example
        return tensor


def _behind_inputs(node: Node) -> Node:
    """The first operation behind a node."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def _counted(work: Rewriting, count: Count) -> Node:
    """How many elements this worker's batch has, of what losses are means over."""
    graph, order = work.graph, work.order()
    first = min(count.terms, key=order.__getitem__)
    with graph.inserting_before(first):
        if count.source is not None and count.each is not None:
            selected = add_call(graph, aten.count_nonzero.default, count.source)
            return add_call(graph, aten.mul.Tensor, selected, count.each)
        number = count.number if count.source is None else _size(work, count)
        like: Any = first.args[0]
        # By its device alone: the tensor itself may be known too late.
        example = like.meta["val"].new_empty((), dtype=torch.float64)
        named = {"dtype": example.dtype, "device": example.device}
        found = graph.call_function(aten.full.default, ([], number), named)
        found.meta["val"] = example
        return found


def _size(work: Rewriting, count: Count) -> Node:
    """The number of elements of a tensor, or a number of the graph, at its insertion point."""
    assert count.source is not None
    if not isinstance(count.source.meta["val"], torch.Tensor):
        return count.source
    if count.dims is None:
        return add_call(work.graph, aten.sym_numel.default, count.source)
    sizes = [add_call(work.graph, aten.sym_size.int, count.source, place) for place in count.dims]
    return functools.reduce(functools.partial(add_call, work.graph, operator.mul), sizes)


def _described(
    work: Rewriting, found: Mapping[Divisor | Count, Node]
) -> tuple[TotalsSpec, list[list[Factor]]]:
    """What is told of totals, and what multiplies terms: for each of ``terms``, all in its line."""
    keys = TermKeys(work.step)
    of_totals = keys.of_totals([*found])
    multiplied: dict[TermKey, list[Factor]] = {}
    for number, (one, key) in enumerate(zip(found, of_totals, strict=True)):
        for term, factor in one.factors:
            factors = multiplied.setdefault(keys.of_term(term, one, key, number), [])
            if factor not in factors:  # how many terms a loop has is all the same
                factors.append(factor)
    others = keys.of_others(
        (loss for loss, _ in losses(work.graph)), {one.line for one in multiplied}
    )
    spec = TotalsSpec(
        (),
        tuple(isinstance(one, Divisor) and one.is_mean for one in found),
        tuple(of_totals),
        tuple(str(line_of(one.terms[0])) for one in found),
        tuple(multiplied),
        tuple(itertools.islice(others, max(MOST_TERMS - len(multiplied), 0))),
    )
    return spec, [*multiplied.values()]


def _factor(work: Rewriting, factors: Sequence[Factor]) -> Any:
    """What multiplies terms, all of them together, at the graph's insertion point."""
    whole: Any = None
    for factor in factors:
        one: Any = factor.constant
        for node in factor.times:
            one = work.call(operator.mul, one, node)
        for node in factor.over:
            one = work.call(operator.truediv, one, node)
        both = isinstance(one, Node) or isinstance(whole, Node)
        if whole is None:
            whole = one
        else:
            whole = work.call(operator.add, whole, one) if both else whole + one
    return whole


def _replace(
    work: Rewriting, divisor: Divisor, total: Node, own: Node, whole: Node
) -> tuple[Node, Node]:
    """Divide gradients by the number of all workers, at the graph's insertion point.

    Args:
        total: the sum over all workers' batches.
        own, whole: what this worker's batch counts in means, and what all do.

    Returns:
        What the terms are to be multiplied with to be divided by that number, as a quotient.
    """
    graph = work.graph
    number, value = total, divisor.value
    if divisor.weighted:
        value = _as_tensor(work, value, divisor.terms[0])
    for step in divisor.steps:
        number = add_call(graph, step.target, number, *step.others, **dict(step.named))
    first, second = (whole, own) if divisor.multiplies else (own, whole)
    number = _in_mean(work, number, first, second)
    for use in divisor.uses:
        use.replace_input_with(divisor.value, _alike(work, number, use))
    return (number, value) if divisor.multiplies else (value, number)


def _replace_weighted(
    work: Rewriting, weighted: WeightedUse, shares: Mapping[Node, tuple[Node, Node]]
) -> None:
    """Let the gradient of what multiplies terms use them as they are with all workers' numbers.

    Args:
        shares: by term, what to multiply it with, as a quotient.
    """
    graph = work.graph
    whole: Node | None = None
    with graph.inserting_before(weighted.use):
        for term, factor in weighted.terms:
            value = term
            if term in shares:
                share = add_call(graph, aten.div.Tensor, *shares[term])
                # Of nothing a mean is no number.
                nothing = add_call(graph, aten.eq.Scalar, share, 0)
                some = add_call(graph, aten.masked_fill.Scalar, term, nothing, 0)
                value = add_call(graph, aten.mul.Tensor, some, _alike(work, share, term))
            if factor.constant != 1:
                value = add_call(graph, aten.mul.Tensor, value, factor.constant)
            for number in factor.times:
                value = add_call(graph, aten.mul.Tensor, value, number)
            for number in factor.over:
                value = add_call(graph, aten.div.Tensor, value, number)
            whole = value if whole is None else add_call(graph, aten.add.Tensor, whole, value)
    assert whole is not None
    weighted.use.replace_input_with(weighted.part, whole)


def _replace_count(
    work: Rewriting, count: Count, counted: Node, total: Node, own: Node, whole: Node
) -> tuple[Node, Node]:
    """As :func:`_replace`, of a number that gradients may be divided by within an operation.

    Args:
        counted: the number of this worker's batch.
    """
    graph = work.graph
    number = _in_mean(work, total, own, whole)
    for use in count.uses:
        arguments: Any = use.args
        if divides_within(use) or use.meta["val"].dtype in _HALVES:
            with graph.inserting_before(use):
                more = add_call(graph, aten.div.Tensor, counted, number)
                more = _alike(work, more, arguments[0])
                gradient = add_call(graph, aten.mul.Tensor, arguments[0], more)
            use.args = (gradient, *arguments[1:])
        else:
            use.target = _BY_TENSOR.get(use.target, use.target)
            use.args = (arguments[0], _alike(work, number, use))
    return counted, number


def _in_mean(work: Rewriting, number: Node, first: Node, second: Node) -> Node:
    """In this order, so that a count of all rows gives that of the worker's own without
    rounding."""
    graph = work.graph
    number = add_call(graph, aten.mul.Tensor, number, first)
    return add_call(graph, aten.div.Tensor, number, second)


def _alike(work: Rewriting, number: Node, other: Node) -> Node:
    """A number with the dtype of another node."""
    kind = other.meta["val"].dtype
    if number.meta["val"].dtype is kind:
        return number
    return add_call(work.graph, aten._to_copy.default, number, dtype=kind)
