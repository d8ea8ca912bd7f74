"""What a step asks of the batches of all workers together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Node

from parallax.errors import SourceLine
from parallax.graph.analysis.batch_elements import BatchElements
from parallax.graph.analysis.counts import Count, counts, means_of_others
from parallax.graph.analysis.divisors import (
    Divisor,
    divided_by_inputs,
    divisors,
    is_plain,
    parts_of_others,
)
from parallax.graph.analysis.reduced_rows import reduced_rows
from parallax.graph.analysis.statistics import Statistics, statistics
from parallax.graph.common.aliases import memory_of
from parallax.graph.common.operations import written_inputs
from parallax.graph.common.user_code import line_of
from parallax.graph.step_graph import StepGraph


@dataclass(frozen=True)
class Batches:
    """What all workers know of their batches.

    Args:
        by_rows: they count by their rows in a mean; else all that are not empty count alike.
        leave_out: some have labels that losses leave out by default.
        total: the steps of all workers send totals, since those of some need them: an empty batch
            does not tell.
        decide: Python of some worker's step decides by their values.
        compared: their steps compare rows of the batch with each other.
        statistics: by message with statistics that the steps of all workers send, since those of
            some need them, how many numbers of columns it has; -1 if none needs it.
    """

    by_rows: bool = True
    leave_out: bool = False
    total: bool = False
    decide: bool = False
    compared: bool = False
    statistics: tuple[int, ...] = ()


class OwnNumbers(NamedTuple):
    """Numbers of a worker's batch that a step is computed with.

    Args:
        told: means over some of the batch, and what other numbers are first made of, which workers
            cannot put together of their own ones: :func:`means_left_alone` and
            :func:`statistics_of` tell of them.
        reduced: what else a loss reduces rows to, and is no sum of.
        known: those that workers can put together.
    """

    told: set[Node]
    reduced: set[Node]
    known: Collection[Node]

    @property
    def left(self) -> set[Node]:
        """Those that workers cannot put together."""
        return self.told | self.reduced


def totals(step: StepGraph, variables: Collection[str], batches: Batches) -> list[Divisor | Count]:
    """What the losses of a step divide by, and workers have to add up.

    Args:
        step: as it was captured.
        variables: the names of those that it trains.
        batches: of all workers.
    """
    return _totals(step, BatchElements(step, _changing(step, variables)), batches)


def _totals(step: StepGraph, of_batch: BatchElements, batches: Batches) -> list[Divisor | Count]:
    plain = batches.leave_out or not batches.by_rows
    sums = [one for one in divisors(step, of_batch) if plain or not is_plain(one)]
    return [*sums, *counts(step, of_batch, batches.by_rows)]


def statistics_of(step: StepGraph, variables: Collection[str], by_rows: bool) -> Statistics:
    """Numbers of the whole batch that losses are computed with, as :func:`totals`."""
    of_batch = BatchElements(step, _changing(step, variables))
    return statistics(step, of_batch, divisors(step, of_batch), by_rows)


def means_left_alone(
    step: StepGraph, variables: Collection[str], batches: Batches
) -> SourceLine | None:
    """Where a mean over some of the batch stays this worker's own, since a loss is no sum of it."""
    left = _means_left_alone(step, BatchElements(step, _changing(step, variables)), batches)
    return next((line_of(node) for node in step.graph.nodes if node in left), None)


def own_numbers(step: StepGraph, by_rows: bool) -> OwnNumbers:
    """Numbers of this worker's batch that a step is computed with.

    Args:
        step: as it was captured.
        by_rows: batches count by their rows in a mean.
    """
    trained = {item.name for item in step.inputs if item.differentiated}
    of_batch = BatchElements(step, _changing(step, trained))
    found = statistics(step, of_batch, divisors(step, of_batch), by_rows)
    known = _seen_to(step, of_batch, Batches(by_rows), found)
    told = {*found.origins(found.left), *(_means(step, of_batch, Batches(by_rows)) - known)}
    reduced = {*reduced_rows(step, known | {*found.found, *found.others})}
    return OwnNumbers(told, reduced, found.found)


def _means_left_alone(step: StepGraph, of_batch: BatchElements, batches: Batches) -> set[Node]:
    found = statistics(step, of_batch, divisors(step, of_batch), batches.by_rows)
    return _means(step, of_batch, batches) - _seen_to(step, of_batch, batches, found)


def _means(step: StepGraph, of_batch: BatchElements, batches: Batches) -> set[Node]:
    """Means over some of the batch that a loss is no sum of."""
    found = set(parts_of_others(step, of_batch, batches.leave_out))
    found.update(means_of_others(step, of_batch, batches.by_rows))
    return found


def _seen_to(
    step: StepGraph, of_batch: BatchElements, batches: Batches, found: Statistics
) -> set[Node]:
    """What is of all batches, or divided by what they add up."""
    terms = {node for one in _totals(step, of_batch, batches) for node in one.terms}
    known = terms.union(*(node.all_input_nodes for node in terms))  # a sum of quotients
    known |= {node for _, node in found.uses}
    return known | found.following([value for value, _ in found.uses])


def sums_by_inputs(step: StepGraph, variables: Collection[str]) -> SourceLine | None:
    """Where a loss divides a sum by a number that the batch brings."""
    of_batch = BatchElements(step, _changing(step, variables))
    return next((line_of(node) for node in divided_by_inputs(step, of_batch)), None)


def means_of_items(step: StepGraph, variables: Collection[str]) -> SourceLine | None:
    """Where a loss takes a mean over some of one row of the batch, such as the boxes of an image.

    It stays one; were the first dimension of the batch time, workers would have to add up.
    """
    changing = _changing(step, variables)
    found, wider = (
        {one.value for one in divisors(step, BatchElements(step, changing, by_item))}
        for by_item in (True, False)
    )
    return next((line_of(node) for node in step.graph.nodes if node in wider - found), None)


def _changing(step: StepGraph, variables: Collection[str]) -> set[Node]:
    """Inputs that do not stay as they are: parameters, and what the step changes."""
    inputs = zip(step.inputs, step.own_placeholders(), strict=True)
    found = {node for item, node in inputs if item.name in variables}
    for node in step.graph.nodes:
        found.update(memory_of(source) for source in written_inputs(node))
    return {node for node in found if node.op == "placeholder"}
