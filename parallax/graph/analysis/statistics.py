"""Numbers of the whole batch that a loss is computed with, such as the mean of its advantages.

``(x - x.mean()) / x.std()``, a weight of positive labels by how many there are, a scale by the
largest value: on one device they are of all workers' batches in one.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.batch_elements import BatchElements
from parallax.graph.analysis.divided_by import SUMS, known_number
from parallax.graph.analysis.divisors import Divisor
from parallax.graph.analysis.how_many import expression, how_many
from parallax.graph.analysis.loss_terms import REDUCTIONS, losses, made_of
from parallax.graph.common.operations import is_view, is_write
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks
from parallax.ops.statistics import Kind

aten: Any = torch.ops.aten

_KINDS: dict[Any, Kind] = {
    aten.mean.default: "mean",
    aten.mean.dim: "mean",
    aten.var.correction: "variance",
    aten.std.correction: "deviation",
    aten.max.default: "largest",
    aten.amax.default: "largest",
    aten.min.default: "smallest",
    aten.amin.default: "smallest",
    **dict.fromkeys(SUMS, "sum"),
}
_OF_TWO: dict[Any, tuple[Kind, Kind]] = {
    aten.var_mean.correction: ("variance", "mean"),
    aten.std_mean.correction: ("deviation", "mean"),
}
"""What gives two numbers at once."""
_OTHERS = {
    aten.linalg_vector_norm.default,
    aten.median.default,
    aten.prod.default,
    aten.bincount.default,
}
"""Numbers of the whole batch that cannot be put together of those of its parts, or are not yet."""
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar, operator.truediv}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, operator.mul}
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
_DIFFERENCES = {aten.rsub.Scalar, aten.sub.Tensor, operator.sub}
_AS_THEY_ARE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.neg.default,
    aten.abs.default,
    aten.expand.default,
    aten._local_scalar_dense.default,
    aten.scalar_tensor.default,
    operator.neg,
    torch.sym_float,
}
_SMALL = 1.0
"""Up to it, what is added to a number or bounds it only keeps it from being zero."""


@dataclass(eq=False, frozen=True)
class Statistic:
    """A number of the whole batch.

    Args:
        value: the number, as it is on this worker.
        kind: what it is.
        source: what it is of.
        count: of how many elements, where that is not the size of ``source``.
    """

    value: Node
    kind: Kind
    source: Node
    count: Any = None

    @property
    def correction(self) -> float:
        """Of a variance, what is taken from the number of elements."""
        node: Any = self.value
        made = node.args[0] if node.target is operator.getitem else node
        given = made.kwargs.get("correction")
        return 1.0 if given is None else float(given)

    @property
    def key(self) -> Any:
        """What tells a number apart from others of a graph: sums are told by what is summed."""
        own = self.value if self.count is not None or self.kind == "sum" else None
        return self.kind, self.source, self.correction, own


@dataclass(frozen=True)
class Statistics:
    """Those of a step.

    Args:
        found: by their nodes.
        follows: these, and what follows from one.
        uses: what is computed of them, and by what of the loss it is used.
        left: what is used of others, which stay each worker's own.
    """

    found: dict[Node, Statistic]
    follows: Collection[Node]
    uses: tuple[tuple[Node, Node], ...]
    left: tuple[Node, ...]

    @property
    def used(self) -> list[Statistic]:
        """Those that are needed, in the order of the graph."""
        needed = self.following([value for value, _ in self.uses])
        return [one for node, one in self.found.items() if node in needed]

    def following(self, values: Collection[Node]) -> set[Node]:
        """What values are computed of, as far as it follows from a statistic, with these."""
        found: set[Node] = set()
        queue = list(values)
        while queue:
            node = queue.pop()
            if node in self.follows and node not in found:
                found.add(node)
                if node not in self.found:
                    queue += node.all_input_nodes
        return found


def statistics(
    step: StepGraph, of_batch: BatchElements, divided: Collection[Divisor]
) -> Statistics:
    """The statistics of the batch that a step's losses are computed with.

    Args:
        step: as it was captured.
        of_batch: what of it follows from the batch.
        divided: what losses are divided by, which is seen to otherwise.
    """
    search = _Search(step, of_batch)
    if not search.follows | search.of_columns:
        return Statistics({}, (), (), ())
    marked = step.graph.find_nodes(op="call_function", target=marks.GRADIENT)
    ends = [one for node in marked for one in node.all_input_nodes]
    relevant = made_of([*ends, *(loss for loss, _ in losses(step.graph))])
    known = {one.value for one in divided}
    uses: list[tuple[Node, Node]] = []
    left: list[tuple[Node, Node]] = []
    for node in step.graph.nodes:
        if node not in relevant or not of_batch.is_of_other(node):
            continue
        for value in node.all_input_nodes:
            if value in known or not of_batch.is_of_batch(value):
                continue
            is_size = not isinstance(value.meta.get("val"), torch.Tensor)
            is_size = is_size and (_is_view(node) or not _is_pointwise(node))
            if value in search.of_columns and not is_size:
                left.append((value, node))
            elif value in search.follows and not is_size:
                right = search.degree(value) == 0 and _takes(node, value)
                (uses if right else left).append((value, node))
    return Statistics(search.known, search.follows, tuple(uses), tuple(value for value, _ in left))


class _Search:
    def __init__(self, step: StepGraph, of_batch: BatchElements) -> None:
        self._of_batch = of_batch
        self._rows = [expression(one) for one in step.rows]
        self.known: dict[Node, Statistic] = {}
        for node in step.graph.nodes:
            if of_batch.is_of_batch(node) and (found := self._statistic(node)) is not None:
                self.known[node] = found
        self.follows = _following(step, self.known)
        """Statistics, and what follows from one."""
        sizes = {
            size
            for item, node in zip(step.inputs, step.own_placeholders(), strict=True)
            if item.kind == "state" and isinstance(node.meta.get("val"), torch.Tensor)
            for size in node.meta["val"].shape
        }
        columns = [
            node
            for node in step.graph.nodes
            if self._is_of_columns(node, sizes)
            or (node.target in _OTHERS and of_batch.is_of_batch(node) and not self._is_of_row(node))
        ]
        self.of_columns = _following(step, columns)
        """The same of numbers of each column of the batch, and of those of other kinds."""
        self._degrees: dict[Node, int | None] = {}
        for node in step.graph.nodes:  # in order, so that those of inputs are known
            if node in self.follows and of_batch.is_of_batch(node):
                self._degrees[node] = self._degree(node)

    def _is_of_columns(self, node: Node, sizes: Collection[Any]) -> bool:
        """Whether a node reduces the rows of the batch to one, whose columns are some of a model,
        by their number: where they lie along another dimension, those of one are none of these."""
        if node.target not in _KINDS or not self._of_batch.is_of_batch(node):
            return False
        value, source = node.meta.get("val"), node.args[0]
        if not isinstance(value, torch.Tensor) or not value.dim() or not isinstance(source, Node):
            return False
        return value.shape[-1] in sizes and self._of_batch.adds_up_along_rows(node)

    def _is_of_row(self, node: Node) -> bool:
        """Whether a node reduces each row of the batch, or one alone."""
        value = node.meta.get("val")
        is_number = isinstance(value, torch.Tensor) and value.dim() == 0
        is_whole = is_number or node.target is aten.bincount.default
        return not is_whole or self._of_batch.is_of_item(node.args[0])

    def _statistic(self, node: Node) -> Statistic | None:
        kind, made = _KINDS.get(node.target), node
        if node.target is operator.getitem and node.args[0].target in _OF_TWO:  # type: ignore[union-attr]
            made = node.args[0]  # type: ignore[assignment]
            kind = _OF_TWO[made.target][node.args[1]]  # type: ignore[index]
        if kind is not None:
            source: Any = made.args[0]
            whole = _is_of_all(node, made) and self._of_batch.adds_up(source)
            return Statistic(node, kind, source) if whole else None
        arguments = node.args
        if node.target in _QUOTIENTS and isinstance(part := arguments[0], Node):
            # A mean by hand.
            if (counted := self._counted(part)) and self._is_size(arguments[1], counted):
                return Statistic(node, "mean", counted, arguments[1])
        elif node.target in _DIFFERENCES and len(arguments) == 2 and not node.kwargs:
            pair = arguments if node.target is aten.rsub.Scalar else arguments[::-1]
            if (rest := self._counted(pair[0])) and self._is_size(pair[1], rest):
                return Statistic(node, "sum", rest)
        return None

    def _counted(self, node: Any) -> Node | None:
        """What a number is the sum of."""
        while isinstance(node, Node) and node.target in _AS_THEY_ARE - {aten.neg.default}:
            node = node.args[0]
        found = self.known.get(node) if isinstance(node, Node) else None
        return found.source if found is not None and found.kind == "sum" else None

    def _is_size(self, number: Any, source: Node) -> bool:
        """Whether a number is how many elements a tensor has, or how many rows."""
        size = known_number(number)
        if isinstance(size, float) and size.is_integer():
            size = int(size)
        if not isinstance(size, int | torch.SymInt):
            return False
        return expression(size) in (how_many(source), *self._rows)

    def degree(self, node: Any) -> int | None:
        """How often a sum over the batch multiplies a number: not at all, where all that it is made
        of is a mean, or the quotient of two sums; None if that is not known."""
        return self._degrees.get(node, 0)

    def _degree(self, node: Node) -> int | None:
        if (found := self.known.get(node)) is not None:
            return int(found.kind == "sum")
        inputs = [one for one in node.all_input_nodes if one in self.follows]
        degrees = [self.degree(one) for one in inputs]
        if None in degrees or is_write(node) or not _is_pointwise(node):
            return None
        arguments: Any = node.args
        if node.target in _AS_THEY_ARE or _is_view(node):
            return degrees[0]
        if node.target in _PRODUCTS | _QUOTIENTS:
            first, second = (self.degree(one) for one in arguments[:2])
            if first is None or second is None:
                return None
            return first + second if node.target in _PRODUCTS else first - second
        if node.target is aten.reciprocal.default:
            (inverse,) = degrees
            return None if inverse is None else -inverse
        if len({*degrees}) == 1 and self._keeps_degree(node, inputs):
            return degrees[0]
        return 0 if not any(degrees) else None

    def _keeps_degree(self, node: Node, inputs: Collection[Node]) -> bool:
        if node.target not in _ADDED | _BOUNDS:
            return False
        others = [one for one in _flat(node.args) if one not in inputs and one is not None]
        numbers = [known_number(one) for one in others]
        return all(isinstance(one, int | float) and 0 <= one <= _SMALL for one in numbers)


def _following(step: StepGraph, nodes: Collection[Node]) -> set[Node]:
    """These nodes, and what follows from one."""
    found: set[Node] = set()
    for node in step.graph.nodes:
        if node in nodes or any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def _flat(arguments: Any) -> Iterator[Any]:
    for one in arguments:
        if isinstance(one, list | tuple):
            yield from _flat(one)
        else:
            yield one


def _is_of_all(node: Node, made: Node) -> bool:
    """Whether a reduction is over all dimensions of a tensor that has some.

    Args:
        node: its result.
        made: what has made it.
    """
    value, source = node.meta.get("val"), made.args[0]
    whole = source.meta.get("val") if isinstance(source, Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return False
    dims = made.args[1] if len(made.args) > 1 else made.kwargs.get("dim")
    is_kept = isinstance(dims, list | tuple) and len(dims) == whole.dim() == value.dim()
    return whole.dim() > 0 and (value.dim() == 0 or is_kept)


def _is_pointwise(node: Node) -> bool:
    if node.target in _AS_THEY_ARE | _ADDED or not isinstance(node.target, torch._ops.OpOverload):
        return node.target in _AS_THEY_ARE | _ADDED | _PRODUCTS | _QUOTIENTS
    return torch.Tag.pointwise in node.target.tags or _is_view(node)


def _takes(node: Node, value: Node) -> bool:
    """Whether what is computed of a value is of no other size for another value."""
    example = value.meta.get("val")
    if isinstance(example, torch.Tensor) and example.dtype.is_floating_point:
        return True
    return _is_pointwise(node) or node.target in REDUCTIONS


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_view(node)
