"""Let means over some of the batch be those over all workers' batches.

Where a loss is divided by a number that only the batch tells, such as how many labels are not left
out, an average of workers' gradients would weigh these numbers away. By exchanging them, and
dividing gradients by what they are together, the average is the gradient of one device. Losses that
the step returns are those of the worker's own batch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.aliases import memory_of
from parallax.graph.divisors import Divisor, divisors, is_plain
from parallax.graph.operations import add_call, written_inputs
from parallax.ops.resources import finish, start
from parallax.ops.totals import TotalsSpec
from parallax.rewrite.context import Pass, Rewriting
from parallax.rewrite.early import known_early

aten: Any = torch.ops.aten


def dividing_by_all(leaves_out: bool) -> Pass:
    """The pass; gradients are means over workers, weighted by what batches count.

    Args:
        leaves_out: batches have labels that losses leave out by default.
    """
    return functools.partial(_divide_by_all, leaves_out)


def _divide_by_all(leaves_out: bool, work: Rewriting) -> None:
    if work.workers == 1:
        return
    found = {
        one: _total(work, one)
        for one in divisors(work.step, _parameters(work))
        if leaves_out or not is_plain(one)
    }
    while found:
        order = work.order()
        earliest = min((use for one in found for use in one.uses), key=order.__getitem__)
        sources = [source for one in found for source in _sources(one, found[one])]
        latest = max(sources, key=order.__getitem__)
        before = known_early(work, sources, latest.next)
        order = work.order()
        if order[before] <= order[earliest]:
            _exchange(work, found, before, earliest)
            return
        # Of several backward passes, those of which this is not known in time.
        limit = order[earliest]
        found = {
            one: total
            for one, total in found.items()
            if all(order[source] < limit for source in _sources(one, total))
        }


def _sources(divisor: Divisor, total: Node) -> list[Node]:
    """What is told of a divisor."""
    return [total, *(node for one in divisor.factors for node in one.times + one.over)]


def _exchange(work: Rewriting, found: Mapping[Divisor, Node], before: Node, use: Node) -> None:
    """Send totals in front of one node, and divide by those of all workers from another one on."""
    means = tuple(one.is_mean for one in found)
    resource = work.resource(TotalsSpec((), means), "totals")
    with work.graph.inserting_before(before):
        factors = [_factor(work, one) for one in found]
        work.call(start, resource, 0, [*found.values()], factors)
    with work.graph.inserting_before(use):
        all_of_them = work.call(finish, resource, 0)
        for number, (divisor, total) in enumerate(found.items()):
            example = total.meta["val"].double()
            parts = []
            for place in range(number, 3 * len(found), len(found)):
                part = work.item(all_of_them, place)
                part.meta["val"] = example
                parts.append(part)
            _replace(work, divisor, *parts)


def _parameters(work: Rewriting) -> set[Node]:
    """Inputs that do not stay as they are: parameters, and what the step changes."""
    variables = work.analysis.variables
    inputs = zip(work.step.inputs, work.step.own_placeholders(), strict=True)
    found = {node for item, node in inputs if item.name in variables}
    for node in work.graph.nodes:
        found.update(memory_of(source) for source in written_inputs(node))
    return {node for node in found if node.op == "placeholder"}


def _total(work: Rewriting, divisor: Divisor) -> Node:
    """The sum over this worker's batch."""
    if divisor.total is not None:
        return divisor.total
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


def _factor(work: Rewriting, divisor: Divisor) -> Any:
    """What multiplies the terms of a divisor, all of them together, at the graph's insertion
    point."""
    whole: Any = None
    for factor in divisor.factors:
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


def _replace(work: Rewriting, divisor: Divisor, total: Node, own: Node, whole: Node) -> None:
    """Divide gradients by the number of all workers, at the graph's insertion point.

    Args:
        total: the sum over all workers' batches.
        own, whole: what this worker's batch counts in means, and what all do.
    """
    graph = work.graph
    number = total
    for step in divisor.steps:
        if step.target is not aten._local_scalar_dense.default:
            others = step.args[1:]
            number = add_call(graph, step.target, number, *others, **step.kwargs)
    # In this order, so that a count of all rows gives that of the worker's own without rounding.
    first, second = (whole, own) if divisor.multiplies else (own, whole)
    number = add_call(graph, aten.mul.Tensor, number, first)
    number = add_call(graph, aten.div.Tensor, number, second)
    for use in divisor.uses:
        kind = use.meta["val"].dtype
        same = number
        if number.meta["val"].dtype is not kind:
            same = add_call(graph, aten._to_copy.default, number, dtype=kind)
        use.replace_input_with(divisor.value, same)
