"""Numbers of the whole batch that a loss is computed with, such as the mean of its advantages.

``(x - x.mean()) / x.std()``, a weight of positive labels by how many there are, a scale by the
largest value: on one device they are of all workers' batches in one. So are averages of them that
the step keeps for the next one.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.batch_elements import BatchElements
from parallax.graph.analysis.batch_numbers import BatchNumbers, takes_value
from parallax.graph.analysis.coupled import Coupled, Scaled
from parallax.graph.analysis.degrees import Degrees, Size, is_pointwise
from parallax.graph.analysis.divisors import Divisor
from parallax.graph.analysis.loss_terms import REDUCTIONS, losses, made_of
from parallax.graph.analysis.reductions import Statistic
from parallax.graph.analysis.summed_rows import SummedRows
from parallax.graph.common.aliases import memory_of
from parallax.graph.common.interface import GraphInput
from parallax.graph.common.operations import with_gradient, written_inputs
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Statistics:
    """Those of a step.

    Args:
        found: by their nodes.
        follows: these, and what follows from one.
        uses: what is computed of them, and by what of the loss or the state it is used.
        left: what is used of others, which stay each worker's own.
        others: what follows from numbers that workers cannot put together.
        scaled: those whose gradients need a factor.
        rounds: those that are needed, in the order of the graph. Those of one round follow from
            nothing that is computed with others of it, or of later ones. Of the first one are
            those that follow from the batch alone.
    """

    found: Mapping[Node, Statistic]
    follows: Collection[Node]
    uses: tuple[tuple[Node, Node], ...]
    left: tuple[Node, ...]
    rounds: tuple[tuple[Statistic, ...], ...]
    scaled: tuple[Scaled, ...] = ()
    divide: Collection[tuple[Node, Node]] = ()
    """Of the uses, those that divide rows by a sum over the batch, which then are summed."""
    sizes: Mapping[Node, Size] = field(default_factory=dict)
    """What numbers are multiplied with or divided by, where that has to be the size of the whole
    batch."""
    others: Collection[Node] = ()

    def origins(self, values: Collection[Node]) -> set[Node]:
        """The first numbers of the batch that values follow from, or they themselves."""
        found: set[Node] = set()
        queue, seen = [*values], set()
        while queue:
            node = queue.pop()
            if node in seen:
                continue
            seen.add(node)
            inputs = [one for one in node.all_input_nodes if self._is_number(one)]
            queue += inputs
            if not inputs:
                found.add(node)
        return found

    def _is_number(self, node: Node) -> bool:
        return node in self.follows or node in self.others

    def following(self, values: Collection[Node]) -> set[Node]:
        """What values are computed of, as far as it follows from a statistic, with these."""
        return _needed(self.found, self.follows, values)

    @property
    def lengths(self) -> tuple[int, ...]:
        """By round, how many numbers are told of columns; -1 if there is no statistic."""
        by_key = [{one.key: one.length for one in used} for used in self.rounds]
        return tuple(sum(used.values()) if used else -1 for used in by_key)


def statistics(
    step: StepGraph, of_batch: BatchElements, divided: Collection[Divisor], by_rows: bool
) -> Statistics:
    """The statistics of the batch that a step trains with.

    Args:
        step: as it was captured.
        of_batch: what of it follows from the batch.
        divided: what losses are divided by, which is seen to otherwise.
        by_rows: batches count by their rows in a mean.
    """
    marked = step.graph.find_nodes(op="call_function", target=marks.GRADIENT)
    # What has no part in gradients is a constant in a loss.
    trained = made_of([one for node in marked for one in node.all_input_nodes])
    outputs: Any = step.graph.output_node().args[0]
    new = [
        (value, item.name)
        for value, item in zip(outputs, step.outputs, strict=True)
        if item.kind == "state" and isinstance(value, Node)
    ]
    kept = _kept(step, trained, new)
    numbers = BatchNumbers(step, of_batch, kept)
    relevant = trained | made_of([loss for loss, _ in losses(step.graph)])
    coupled = Coupled(step, of_batch, numbers, relevant, by_rows)
    if not (numbers.follows or numbers.others or coupled.found):
        return Statistics({}, (), (), tuple(coupled.left), ())
    known = {one.value for one in divided}
    summed = SummedRows(step, of_batch) if by_rows else None
    uses, left = numbers.writes + coupled.uses, [*coupled.left]
    used = set(uses)
    numbers_used = [
        (value, node)
        for node in step.graph.nodes
        if node in relevant and not of_batch.is_data(node) and of_batch.is_of_other(node)
        for value in node.all_input_nodes
        if value not in known and (value, node) not in used and _is_used(numbers, value, node)
    ]
    found = _by_degrees(Degrees(step, of_batch, numbers), numbers_used, summed)
    if found.left and found.degrees.has_ones:
        other = _by_degrees(Degrees(step, of_batch, numbers, True), numbers_used, summed)
        found = other if len(other.left) < len(found.left) else found
    uses += found.uses
    left += [value for value, node in found.left if node in trained]
    # What is new in the state may be trained with, too.
    own = {item.name for node, item in _leaves(step) if node not in kept}
    output = step.graph.output_node()
    uses += [(v, output) for v, name in new if name not in own and v in numbers.alone]
    numbers.found.update(coupled.found)
    numbers.follows.update(coupled.found)
    return Statistics(
        numbers.found,
        numbers.follows,
        tuple(uses),
        tuple(left),
        _rounds(step, of_batch, numbers, uses),
        tuple(coupled.scaled),
        found.divide,
        {**found.degrees.sizes, **coupled.sizes},
        numbers.others,
    )


@dataclass
class _Found:
    """What uses numbers, by whether they are as those of one device are then.

    Args:
        degrees: those of the numbers.
        uses: those known to be, each a number and what uses it.
        divide: of these, those that divide rows by sums.
        left: others.
    """

    degrees: Degrees
    uses: list[tuple[Node, Node]] = field(default_factory=list)
    divide: set[tuple[Node, Node]] = field(default_factory=set)
    left: list[tuple[Node, Node]] = field(default_factory=list)


def _by_degrees(
    degrees: Degrees, used: Iterable[tuple[Node, Node]], summed: SummedRows | None
) -> _Found:
    found = _Found(degrees)
    for value, node in used:
        degree = degrees.of(value)
        if value in degrees.others or not _takes(node, value):
            found.left.append((value, node))
        elif degree == 0:
            found.uses.append((value, node))
        elif summed is not None and summed.is_divided_by(node, value, degree):
            found.uses.append((value, node))
            found.divide.add((value, node))
        else:
            found.left.append((value, node))
    return found


def _is_used(numbers: BatchNumbers, value: Node, node: Node) -> bool:
    """Whether a node is computed with a number of the batch that has no gradient there."""
    if value not in numbers.follows and value not in numbers.others:
        return False
    if not takes_value(node, value):
        return False
    return value not in numbers.detached or value not in with_gradient(node)


def _leaves(step: StepGraph) -> Iterator[tuple[Node, GraphInput]]:
    inputs = zip(step.own_placeholders(), step.inputs, strict=True)
    return ((node, item) for node, item in inputs if item.kind == "state")


def _kept(step: StepGraph, trained: Collection[Node], new: Iterable[tuple[Node, str]]) -> set[Node]:
    """Buffers, and the state that gradients follow from: of this call, or by what the step makes of
    it, of later ones.

    Args:
        step: as it was captured.
        trained: what gradients of this call follow from.
        new: values of state that the step gives, by name.
    """
    leaves = {item.name: node for node, item in _leaves(step)}
    makers: dict[Node, list[Node]] = collections.defaultdict(list)
    for value, name in new:
        if name in leaves:
            makers[leaves[name]].append(value)
    for node in step.graph.nodes:
        for one in written_inputs(node):
            makers[memory_of(one)].append(node)
    found: set[Node] = set()
    queue = [*trained, *(node for node, item in _leaves(step) if item.saved)]
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue += [*node.all_input_nodes, *makers.get(node, ())]
    return found & {*leaves.values()}


def _needed(
    found: Mapping[Node, Statistic], follows: Collection[Node], values: Collection[Node]
) -> set[Node]:
    needed: set[Node] = set()
    queue = list(values)
    while queue:
        node = queue.pop()
        if node in follows and node not in needed:
            needed.add(node)
            one = found.get(node)
            queue += node.all_input_nodes if one is None else one.sources
    return needed


def _rounds(
    step: StepGraph,
    of_batch: BatchElements,
    numbers: BatchNumbers,
    uses: Collection[tuple[Node, Node]],
) -> tuple[tuple[Statistic, ...], ...]:
    """In which messages the statistics travel that are used."""
    needed = _needed(numbers.found, numbers.follows, [value for value, _ in uses])
    depth: dict[Node, int] = {}
    rounds: list[list[Statistic]] = []
    for node in step.graph.nodes:
        before = max((depth[one] for one in node.all_input_nodes), default=0)
        one = numbers.found.get(node) if node in needed else None
        if one is not None:
            # What a model has made is known later than what follows from the batch alone, which
            # its exchanges may wait for.
            before = max(int(not of_batch.is_of_batch(one)) for one in one.sources)
            before = max(before, *(depth[source] for source in one.sources))
            rounds += [[] for _ in range(before + 1 - len(rounds))]
            rounds[before].append(one)
            before += 1
        depth[node] = before
    # One message is enough if nothing uses those of the batch alone before the model's are known.
    # Where workers' Python decides, they may be of other rounds on others.
    if len(rounds) > 1 and rounds[0] and not step.decides_by_batch:
        order = {node: place for place, node in enumerate(step.graph.nodes)}
        last = max(order[one.value] for one in rounds[1])
        ends = _ends([one.value for one in rounds[0]], needed, numbers.found, {*uses})
        if min(map(order.__getitem__, ends)) > last:
            rounds[:2] = [[], sorted(rounds[0] + rounds[1], key=lambda one: order[one.value])]
    return tuple(map(tuple, rounds))


def _ends(
    values: Collection[Node],
    needed: Collection[Node],
    found: Collection[Node],
    uses: Collection[tuple[Node, Node]],
) -> set[Node]:
    """What uses numbers, or what is computed of them: a loss, or other numbers of the batch."""
    ends: set[Node] = set()
    seen: set[Node] = set()
    queue = list(values)
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if (node, user) in uses or (user in needed and user in found):
                ends.add(user)
            elif user in needed:
                queue.append(user)
    return ends


def _takes(node: Node, value: Node) -> bool:
    """Whether what is computed of a value is of no other size for another value."""
    example = value.meta.get("val")
    if isinstance(example, torch.Tensor) and example.dtype.is_floating_point:
        return True
    return is_pointwise(node) or node.target in REDUCTIONS
