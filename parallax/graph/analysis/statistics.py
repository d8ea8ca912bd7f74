"""Numbers of the whole batch that a loss is computed with, such as the mean of its advantages.

``(x - x.mean()) / x.std()``, a weight of positive labels by how many there are, a scale by the
largest value: on one device they are of all workers' batches in one. So are averages of them that
the step keeps for the next one.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from parallax.graph.analysis.batch_elements import BatchElements
from parallax.graph.analysis.batch_numbers import (
    AS_THEY_ARE,
    PRODUCTS,
    QUOTIENTS,
    BatchNumbers,
    Statistic,
    takes_value,
)
from parallax.graph.analysis.coupled import Coupled, Scaled
from parallax.graph.analysis.divided_by import SUMS, known_number
from parallax.graph.analysis.divisors import Divisor
from parallax.graph.analysis.loss_terms import REDUCTIONS, losses, made_of
from parallax.graph.common.aliases import memory_of
from parallax.graph.common.interface import GraphInput
from parallax.graph.common.operations import is_view, is_write, with_gradient, written_inputs
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks

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


@dataclass(frozen=True)
class Statistics:
    """Those of a step.

    Args:
        found: by their nodes.
        follows: these, and what follows from one.
        uses: what is computed of them, and by what of the loss or the state it is used.
        left: what is used of others, which stay each worker's own.
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
    sizes: Mapping[Node, Size] = field(default_factory=dict)
    """What numbers are multiplied with or divided by, where that has to be the size of the whole
    batch."""

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
    degrees = _Degrees(step, of_batch, numbers)
    known = {one.value for one in divided}
    uses, left = numbers.writes + coupled.uses, [*coupled.left]
    used = set(uses)
    for node in step.graph.nodes:
        if node not in relevant or of_batch.is_data(node) or not of_batch.is_of_other(node):
            continue
        for value in node.all_input_nodes:
            if value in known or (value, node) in used:
                continue
            if value not in numbers.follows and value not in numbers.others:
                continue
            if not takes_value(node, value):
                continue
            if value in numbers.detached and value in with_gradient(node):
                continue
            if value not in numbers.others and degrees.of(value) == 0 and _takes(node, value):
                uses.append((value, node))
            elif node in trained:
                left.append(value)
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
        degrees.sizes,
    )


def _leaves(step: StepGraph) -> Iterator[tuple[Node, GraphInput]]:
    inputs = zip(step.own_placeholders(), step.inputs, strict=True)
    return ((node, item) for node, item in inputs if item.kind == "state")


def _kept(step: StepGraph, trained: Collection[Node], new: Iterable[tuple[Node, str]]) -> set[Node]:
    """The state that gradients follow from: of this call, or by what the step makes of it, of later
    ones.

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
    queue = list(trained)
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
            queue += node.all_input_nodes if one is None else [one.source]
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


class _Degrees:
    """How often sums over the batch multiply numbers: not at all, where all that they are made of
    is a mean, or the quotient of two sums; None if that is not known."""

    def __init__(self, step: StepGraph, of_batch: BatchElements, numbers: BatchNumbers) -> None:
        self._of_batch = of_batch
        self._numbers = numbers
        self._known: dict[Node, int | None] = {}
        self._sums: dict[Node, Statistic] = {}
        """One that a number follows from."""
        self.sizes: dict[Node, Size] = {}
        for node in step.graph.nodes:  # in order, so that those of inputs are known
            if node in numbers.follows:
                self._note_sum(node)
                self._known[node] = self._degree(node)

    def of(self, node: Any) -> int | None:
        """That of a number."""
        return self._known.get(node, 0)

    def _degree(self, node: Node) -> int | None:
        if (found := self._numbers.found.get(node)) is not None:
            inner = [self.of(one) for one in found.sources]
            return None if None in inner else sum(filter(None, inner)) + (found.kind == "sum")
        inputs = [one for one in node.all_input_nodes if one in self._numbers.follows]
        degrees = [self.of(one) for one in inputs]
        is_alone = node in self._numbers.alone
        if None in degrees or is_write(node):
            return None
        if not is_alone and not _is_pointwise(node) and node.target is not operator.getitem:
            return 0 if not any(degrees) and self._of_batch.is_by_row(node) else None
        arguments: Any = node.args
        is_linear = is_alone and len(inputs) == 1 and node.target in _LINEAR
        is_linear = is_linear or node.target is operator.getitem
        if is_linear or node.target in AS_THEY_ARE or _is_view(node):
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

    def _note_sum(self, node: Node) -> None:
        one = self._numbers.found.get(node)
        sums = [one] if one is not None and one.kind == "sum" else []
        sums += [self._sums[i] for i in node.all_input_nodes if i in self._sums]
        if sums:
            self._sums[node] = sums[0]

    def _cancels(self, node: Node, degree: int) -> bool:
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
                self.sizes[node] = Size(place, self._sums[node], more)
                return True
        return False

    def _keeps_degree(self, node: Node, inputs: Collection[Node]) -> bool:
        if node.target not in _ADDED | _BOUNDS:
            return False
        others = [one for one in _flat(node.args) if one not in inputs and one is not None]
        numbers = [known_number(one) for one in others]
        return all(isinstance(one, int | float) and 0 <= one <= _SMALL for one in numbers)


def _flat(arguments: Any) -> Iterator[Any]:
    for one in arguments:
        if isinstance(one, list | tuple):
            yield from _flat(one)
        else:
            yield one


def _is_pointwise(node: Node) -> bool:
    if node.target in AS_THEY_ARE | _ADDED or not isinstance(node.target, torch._ops.OpOverload):
        return node.target in AS_THEY_ARE | _ADDED | PRODUCTS | QUOTIENTS
    return torch.Tag.pointwise in node.target.tags or _is_view(node)


def _takes(node: Node, value: Node) -> bool:
    """Whether what is computed of a value is of no other size for another value."""
    example = value.meta.get("val")
    if isinstance(example, torch.Tensor) and example.dtype.is_floating_point:
        return True
    return _is_pointwise(node) or node.target in REDUCTIONS


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_view(node)
