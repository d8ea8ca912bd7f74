"""Losses that are no mean over the batch but follow from such: roots, quotients, products of means.

Of ``mse.sqrt()``, of one minus Dice's quotient or of a correlation, the mean over workers is not
that of the whole batch, nor are its gradients. They are, if every worker computes what follows from
the means and sums with those of the whole batch, and what follows from them on the way back to the
batch counts as much as the worker's own batch does in them. Where rows are computed with a mean, as
``x - x.mean()``, its gradient is a sum over rows, and has to be that of all workers' rows.
"""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.batch_elements import BatchElements
from parallax.graph.analysis.batch_numbers import AS_THEY_ARE, PRODUCTS, QUOTIENTS, BatchNumbers
from parallax.graph.analysis.degrees import Size
from parallax.graph.analysis.divided_by import SUMS, known_number
from parallax.graph.analysis.how_many import expression, how_many
from parallax.graph.analysis.loss_terms import (
    REDUCTIONS,
    SHAPES,
    SIZES,
    losses,
    made_of,
)
from parallax.graph.analysis.reductions import ROWS, Statistic
from parallax.graph.common.operations import (
    ancestors,
    gradient_of,
    has_one_element,
    is_call,
    is_view_of_torch,
    is_write,
)
from parallax.graph.common.sizes import same_shape, size_of
from parallax.graph.step_graph import StepGraph
from parallax.ops.statistics import VARIANCES, Kind

aten: Any = torch.ops.aten

LINEAR = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.rsub.Scalar,
    aten.neg.default,
    aten.stack.default,
    aten.cat.default,
    aten.mean.default,
    aten.mean.dim,
    aten._to_copy.default,
    aten.clone.default,
    aten.select.int,
    operator.getitem,
    *SUMS,
}
_BENT: tuple[Kind, ...] = (*VARIANCES, "norm", "logsumexp")
"""Numbers of which an average is none of the whole batch."""
_KINDS: tuple[Kind, ...] = ("mean", "sum", *_BENT)
_MOST_MEANS = 8
"""That rows are computed with. A step has two messages for each that waits for another one."""
_SMALL = 2
"""Constants up to it are not taken for sizes of the batch."""


@dataclass(frozen=True)
class Scaled:
    """A number of the batch whose gradient is to be that of the whole batch.

    Args:
        statistic: the number.
        entries: what computes gradients of the batch from that of the number, each with what it
            takes for it.
        output: of a variance or a deviation, the gradient of what it is of.
    """

    statistic: Statistic
    entries: tuple[tuple[Node, Node], ...]
    output: Node | None = None


class Coupled:
    """What of a step's losses follows from several means or sums of the batch, not as their sum.

    Args:
        step: as it was captured.
        of_batch: what of it follows from the batch.
        numbers: those that have no gradient.
        relevant: what losses and gradients follow from.
        by_rows: batches count by their rows in a mean; else nothing is found.
    """

    def __init__(
        self,
        step: StepGraph,
        of_batch: BatchElements,
        numbers: BatchNumbers,
        relevant: Collection[Node],
        by_rows: bool,
    ) -> None:
        self._of_batch = of_batch
        self._numbers = numbers
        self._rows = {expression(one) for one in step.rows}
        self._known: dict[Node, Statistic] = {}
        self._region: dict[Node, bool] = {}
        """What follows from them alone, and whether as a sum of them."""
        self._backward: dict[int, list[Node]] = collections.defaultdict(list)
        self._others: list[Node] = []
        """Extremes, norms and the like."""
        self.found: dict[Node, Statistic] = {}
        """The means and sums that have to be those of the whole batch, by their nodes."""
        self.uses: list[tuple[Node, Node]] = []
        """These, and numbers without gradients, and by what they are used."""
        self.scaled: list[Scaled] = []
        """Those of them whose gradients need a factor."""
        self.sizes: dict[Node, Size] = {}
        """What sums are divided by, where that is less than how many elements or rows they have."""
        self.left: list[Node] = []
        """What would need other numbers as well."""
        if not by_rows or len(self._rows) != 1:
            return
        for node in step.graph.nodes:
            if (made_by := gradient_of(node)) is not None:
                self._backward[made_by[0]].append(node)
            elif self._is_forward(node):
                self._look_at(node)
        inner = made_of(loss for loss, _ in losses(step.graph))
        bent = [node for node, is_sum in self._region.items() if not is_sum]
        bent += [node for node, one in self._known.items() if one.kind in _BENT]
        bent = [node for node in bent if node in inner]
        mixed = [
            node
            for node in [*self._known, *self._region]
            if node in inner and any(self._mixes(user) for user in node.users if user in inner)
        ]
        self.left += [node for node in self._others if node in inner]
        if bent or mixed:
            order = {node: place for place, node in enumerate(step.graph.nodes)}
            ends = sorted({*bent, *mixed}, key=order.__getitem__)
            self._couple(ends, mixed, relevant, inner)

    def _is_forward(self, node: Node) -> bool:
        # The seed of a gradient is like a number, but does not follow from it.
        is_made = node.op == "call_function" and node.target not in SHAPES
        is_made = is_made and node in self._of_batch.batch
        is_trained = node.meta.get("autograd") == "on" and self._of_batch.is_of_other(node)
        return is_made and is_trained and not self._of_batch.is_data(node)

    def _look_at(self, node: Node) -> None:
        if (one := self._statistic(node)) is not None:
            self._known[node] = one
            return
        if self._numbers.is_whole(node, self._known):
            self._others.append(node)
            return
        inside = [one for one in node.all_input_nodes if self._is_inside(one)]
        others = [one for one in node.all_input_nodes if one not in inside]
        batch = self._of_batch.batch
        if inside and all(one in self._numbers.alone or one not in batch for one in others):
            self._region[node] = self._is_sum(node, inside)

    def _is_inside(self, node: Any) -> bool:
        return node in self._known or node in self._region

    def _is_sum(self, node: Node, inside: Collection[Node]) -> bool:
        """Whether a number is a sum of others, each times what has no gradient."""
        first, *rest = node.args
        if node.target in LINEAR:
            return True
        if node.target in PRODUCTS:
            return sum(map(self._is_inside, node.args)) == 1
        if node.target in QUOTIENTS:
            # Divided by a number of each column, it is that of none but all workers' batches.
            by_columns = rest[0] in self._numbers.alone and not has_one_element(rest[0])
            return self._is_inside(first) and not self._is_inside(rest[0]) and not by_columns
        return is_view_of_torch(node)

    def _statistic(self, node: Node) -> Statistic | None:
        made: Any = node.args[0] if node.target is operator.getitem else node
        source: Any = made.args[0] if made.args else None
        if not self._is_inside(source):
            found = self._numbers.reduction_of(node, _KINDS, self._known)
            if found is not None:
                return found
        if (found := self._numbers.sum_of_rows(node, self._known)) is not None:
            return found
        if made.target in REDUCTIONS:
            return self._numbers.loss_of(node, made, self._known)
        if node.target in QUOTIENTS and isinstance(source, Node):
            summed = self._known.get(source)
            if summed is not None and summed.kind == "sum":
                return self._numbers.mean_of_sum(node, summed)
        return None

    def _couple(
        self,
        ends: Sequence[Node],
        mixed: Sequence[Node],
        relevant: Collection[Node],
        inner: Collection[Node],
    ) -> None:
        region, found = self._behind(ends)
        by_rows = self._behind(mixed)[1]
        # A mean by hand follows from its sum, where that is used as well.
        by_hand = {node for node in found if node.target in QUOTIENTS and node.args[0] in found}
        if not by_hand.isdisjoint(by_rows):
            self.left.append(ends[0])
            return
        region |= by_hand
        found = {node: one for node, one in found.items() if node not in by_hand}
        scaled = [one for one in map(self._scaled, found.values()) if one is not None]
        gradients = [self._gradient(found[node]) for node in by_rows]
        is_whole = all(map(_is_whole, scaled)) and None not in gradients
        # A sum is one of rows alone: what it is divided by may be a number of them.
        is_known = all(found[node].kind in ("mean", *VARIANCES) for node in by_rows)
        whole = {how_many(one.source) for one in found.values()} | self._rows
        known = {size for size in whole if isinstance(size, int) and size > 1}
        sizes = {float(size) for size in known if size > _SMALL}
        if any(one.kind == "norm" for one in found.values()):
            sizes |= {math.sqrt(size) for size in known}
        several = [dict(self._sized(node)) for node in region]
        sized = {node: size for some in several for node, size in some.items()}
        others = [node for node in region if node not in sized]
        # Of what is changed in place by a view, the backward pass is not known by its operations.
        if any(map(is_write, region)) or any(len(some) == 1 for some in several):
            is_known = False
        after = self._after(found, inner) - region
        if len(by_rows) > _MOST_MEANS or any(self._has_size(node, sizes) for node in others):
            is_known = False
        # What a loss is multiplied by may be any number.
        if any(self._has_size(node, sizes, False) for node in after):
            is_known = False
        if not is_whole or not is_known:
            self.left.append(ends[0])
            return
        self.found = found
        self.scaled = scaled
        self.uses = [(value, user) for value in found for user in value.users if user in relevant]
        self.sizes = sized
        backward = {one for node in region | after for one in self._group(node)}
        for node in region | after | backward:
            inputs = node.all_input_nodes
            self.uses += [(one, node) for one in inputs if one in self._numbers.alone]
        for gradient in filter(None, gradients):
            self.found[gradient.statistic.value] = gradient.statistic
            self.uses += [(given, node) for node, given in gradient.entries]

    def _sized(self, node: Node) -> Iterator[tuple[Node, Size]]:
        """Where a sum is divided by how many elements or rows it has, or one less, and its
        gradient."""
        if node.target not in QUOTIENTS:
            return
        summed: Any = node.args[0]
        while summed not in self._known and (
            summed.target in AS_THEY_ARE or is_view_of_torch(summed)
        ):
            summed = summed.args[0]
        one = self._known.get(summed)
        if one is None or one.kind != "sum":
            return
        if (more := self._numbers.size_of(node.args[1], one)) is not None:
            for user in (node, *self._group(node)):
                is_alike = user.target in QUOTIENTS
                if is_alike and self._numbers.size_of(user.args[1], one) == more:
                    yield user, Size(1, one, more)

    def _behind(self, ends: Collection[Node]) -> tuple[set[Node], dict[Node, Statistic]]:
        """What some numbers follow from, down to means and sums of the batch."""
        region: set[Node] = set()
        found: dict[Node, Statistic] = {}
        queue = list(ends)
        while queue:
            node = queue.pop()
            if node in self._region and node not in region:
                region.add(node)
                queue += node.all_input_nodes
            elif node in self._known:
                found[node] = self._known[node]
        return region, found

    def _after(self, found: Collection[Node], inner: Collection[Node]) -> set[Node]:
        """What losses follow from that follows from numbers of the whole batch."""
        after: set[Node] = set()
        for node in self._region:
            inputs = node.all_input_nodes
            if node in inner and any(one in found or one in after for one in inputs):
                after.add(node)
        return after

    def _mixes(self, user: Node) -> bool:
        """Whether what uses a number of the batch computes rows with it."""
        value = user.meta.get("val")
        if isinstance(value, tuple | list) and value:
            value = value[0]
        if not self._is_forward(user) or self._is_inside(user):
            return False
        if not isinstance(value, torch.Tensor) or not value.dim():
            return False
        # Rows are columns of a system that is solved.
        is_selection = size_of(value.shape[0]) is None
        return is_selection or any(map(self._of_batch.are_places, value.shape))

    def _has_size(self, node: Node, sizes: Collection[float], inverse: bool = True) -> bool:
        """Whether a number is computed with one that may be a size of this worker's batch, or one
        over it."""
        if node.target not in PRODUCTS | QUOTIENTS | {aten.add.Tensor, aten.sub.Tensor}:
            return False
        for one in node.args:
            if isinstance(one, Node) and _is_size(one):
                return True
            number = known_number(one)
            if not isinstance(number, int | float) or not number:
                continue
            number = abs(number)
            values = [number, 1 / number] if inverse else [number]
            if any(math.isclose(value, size) for value in values for size in sizes):
                return True
        return False

    def _scaled(self, one: Statistic) -> Scaled | None:
        """A number whose gradient of this worker's batch does not weigh as much as its batch."""
        rows = one.source.meta["val"].shape
        by_rows = self._of_batch.are_rows(rows[0]) and all(isinstance(n, int) for n in rows[1:])
        if one.kind == "mean" and one.count is None and by_rows:
            return None
        by_hand = one.made.target in QUOTIENTS
        of_sum: Any = one.made.args[0] if by_hand else one.made
        entries = tuple(self._entries(of_sum))
        if one.kind not in VARIANCES:
            return Scaled(one, entries)
        group = set(self._group(one.made))
        # PyTorch adds what has gone other ways within the same pass.
        group = {
            node
            for node in group
            if isinstance(node.meta.get("val"), torch.Tensor)
            and (node.target is not aten.add.Tensor or group.issuperset(node.all_input_nodes))
        }
        ends = [node for node in group if any(user not in group for user in node.users)]
        return Scaled(one, entries, ends[0] if len(ends) == 1 else None)

    def _gradient(self, one: Statistic) -> Scaled | None:
        """The gradient of a number, as one of all workers."""
        entries = self._entries(one.made)  # before it is divided by this worker's rows
        values = {given for _, given in entries}
        if len(values) != 1:
            return None
        (value,) = values
        whole = Statistic(value, "mean", value, value, one.dims, one.shape, ROWS, True)
        return Scaled(whole, tuple(entries))

    def _entries(self, made: Node) -> list[tuple[Node, Node]]:
        """What computes gradients of the batch from that of a number, each with that."""
        group = set(self._group(made))
        return [
            (node, given)
            for node in group
            for given in node.all_input_nodes
            if given not in group and self._is_gradient_of(given, made)
        ]

    def _group(self, node: Node) -> list[Node]:
        """The backward pass of an operation."""
        found = self._backward.get(node.meta.get("forward", -1), [])
        calls = [(one, gradient_of(one)) for one in found]
        return [one for one, call in calls if call is not None and is_call(node, *call)]

    @staticmethod
    def _is_gradient_of(given: Node, made: Node) -> bool:
        if given.meta.get("autograd") != "backward" and given.target is not aten.ones_like.default:
            return False
        value: Any = made.meta["val"]
        value = value[0] if isinstance(value, tuple | list) else value
        gradient = given.meta.get("val")
        return isinstance(gradient, torch.Tensor) and same_shape(gradient.shape, value.shape)


def _is_size(node: Node) -> bool:
    """Whether a node is a number of Python's that follows from sizes."""
    is_plain = not isinstance(node.meta.get("val"), torch.Tensor)
    return is_plain and not SIZES.isdisjoint(one.target for one in ancestors([node]))


def _is_whole(scaled: Scaled) -> bool:
    """Whether it is known where the gradients of a number are computed with its own."""
    if scaled.statistic.kind not in VARIANCES:
        return bool(scaled.entries)
    if scaled.output is None or len({given for _, given in scaled.entries}) != 1:
        return False
    source, gradient = (one.meta["val"] for one in (scaled.statistic.source, scaled.output))
    return isinstance(gradient, torch.Tensor) and same_shape(source.shape, gradient.shape)
