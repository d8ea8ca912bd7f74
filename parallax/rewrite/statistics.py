"""Let numbers of the whole batch that losses are computed with be those of all workers' batches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.coupled import Scaled
from parallax.graph.analysis.degrees import Size
from parallax.graph.analysis.reductions import ROWS, Statistic
from parallax.graph.analysis.statistics import Statistics
from parallax.graph.analysis.totals import Batches, statistics_of
from parallax.graph.common.aliases import memory_of
from parallax.graph.common.hashes import hash_of
from parallax.graph.common.operations import add_call, ancestors, written_inputs
from parallax.graph.common.slices import masks_of
from parallax.graph.common.user_code import line_of, places_of
from parallax.ops.resources import finish, start
from parallax.ops.statistics import KEYS, MOST, VARIANCES, StatisticsSpec
from parallax.rewrite.context import Pass, Rewriting
from parallax.rewrite.early import at_the_start, known_early
from parallax.rewrite.term_keys import TermKeys

aten: Any = torch.ops.aten

_OF_TENSORS: dict[Any, Any] = {
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}

logger = logging.getLogger("parallax")


def over_all_batches(batches: Batches) -> Pass:
    """The pass."""
    return functools.partial(_over_all, batches)


def _over_all(batches: Batches, work: Rewriting) -> None:
    if work.workers == 1:
        return
    wanted = statistics_of(work.step, work.analysis.variables, batches.by_rows)
    rounds: Sequence[Sequence[Statistic]] = wanted.rounds
    pairs = itertools.zip_longest(wanted.lengths, batches.statistics, fillvalue=-1)
    if any(own > agreed for own, agreed in pairs):
        logger.warning(
            "the loss is computed with a number of each worker's own batch, as none was, or of "
            "fewer columns, when the first batches were compared (%s)",
            line_of(wanted.uses[0][0]),
        )
        rounds = ()
    exchanges = _Exchanges(work, wanted)
    agreed = [number for number, length in enumerate(batches.statistics) if length >= 0]
    of_rounds = {number: rounds[number] if number < len(rounds) else () for number in agreed}
    for number in agreed:
        later = [of_rounds[one] for one in agreed if one >= number and of_rounds[one]]
        exchanges.add(of_rounds[number], batches.statistics[number], later)


class _Exchanges:
    """Puts the messages into a worker's graph, one after the other.

    Args:
        work: the rewriting.
        wanted: the statistics.
    """

    def __init__(self, work: Rewriting, wanted: Statistics) -> None:
        self._work = work
        self._wanted = wanted
        self._needed = wanted.following([value for value, _ in wanted.uses])
        self._origins: dict[Node, set[Node]] = {}
        """Of what is needed, from which statistics it follows, through others of earlier rounds
        too."""
        for node in sorted(self._needed, key=work.order().__getitem__):
            self._origins[node] = {node} if node in wanted.found else set()
            self._origins[node].update(
                *(self._origins.get(one, ()) for one in node.all_input_nodes)
            )
        self._uses = list(dict.fromkeys(wanted.uses))
        """Which are to be replaced."""
        self._moved: dict[tuple[Node, Node], Node] = {}
        """By what a number is used now, and what used it."""
        self._started: Node | None = None
        """Where the last message starts."""
        self._sized = {size.summed for size in wanted.sizes.values()}
        self._counts: dict[Statistic, tuple[Node, Any]] = {}
        """Of sums, over how many elements they are: of all batches, and of this worker's."""
        self._share: Node | None = None
        """How many times as many rows as this worker's batch all of them have."""
        self._divided: dict[tuple[Node, Any], Node] = {}
        """Numbers that rows are divided by before they are summed, times this or by it."""
        self._known: dict[Node, Node] = {}
        """In place of this worker's own: what follows from the statistics of all."""

    def add(
        self,
        statistics: Sequence[Statistic],
        length: int,
        later: Sequence[Sequence[Statistic]],
    ) -> None:
        """One message, which starts behind the one before, as on all workers.

        Args:
            statistics: of this worker.
            length: how many numbers of columns the message has.
            later: the same of this message and of later ones, which start behind it.
        """
        work = self._work
        firsts = {one.key: one for one in reversed(statistics)}
        used = [one for one in statistics if firsts[one.key] is one]  # of several epochs, say
        if sum(not one.shape for one in used) > MOST:
            logger.warning(
                "the loss is computed with more than %d numbers of the whole batch: each worker "
                "has its own (%s)",
                MOST,
                line_of(used[0].value),
            )
        numbers = [number for one in used for number in self._numbers(one)]
        if used:
            first = self._first(statistics)
            limit = min(map(self._first, later), key=work.order().__getitem__)
            before = known_early(work, [one for one in numbers if isinstance(one, Node)], limit)
        else:  # others may have some
            before, first = at_the_start(work)
        order = work.order()
        if self._started is not None and order[before] <= order[self._started]:
            before = self._started.next
        if order[first] < order[before]:
            first = before
        scaled = [one for one in self._wanted.scaled if one.statistic in statistics]
        spec = _spec(work, used, length)
        values = {one.value for one in statistics}
        divides = any(self._origins[value] & values for value, _ in self._wanted.divide)
        if scaled or divides:
            spec = _with_rows(spec)
            numbers += [self._rows, self._rows, 0.0]
        resource = work.resource(spec, "statistics")
        with work.graph.inserting_before(before):
            self._started = work.call(start, resource, 0, numbers)
        with work.graph.inserting_before(first):
            found = work.call(finish, resource, 0)
            for one in statistics:
                place = used.index(firsts[one.key])
                self._known[one.value] = _as_it_was(work, one, work.item(found, place))
                if one in self._sized:
                    whole = _number(work.item(found, len(spec.kinds) + place))
                    self._counts[one] = whole, numbers[3 * place]
            several = len(spec.kinds)
            if divides and self._share is None:
                all_rows = _number(work.item(found, several - 1))
                share = add_call(work.graph, aten.div.Tensor, all_rows, self._rows)
                self._share = add_call(work.graph, aten.nan_to_num.default, share, 0.0, 0.0)
            for each in scaled:
                place = used.index(firsts[each.statistic.key])
                all_rows = _number(work.item(found, several - 1))
                share = add_call(work.graph, aten.div.Tensor, all_rows, self._rows)
                if each.statistic.kind == "mean":  # of a part of each row, or of some rows
                    whole = _number(work.item(found, several + place))
                    own = add_call(work.graph, aten.mul.Tensor, share, numbers[3 * place])
                    share = add_call(work.graph, aten.div.Tensor, own, whole)
                # A worker with nothing that counts has no gradients to be scaled.
                share = add_call(work.graph, aten.nan_to_num.default, share, 0.0, 0.0)
                if each.output is None:
                    self._scale(each, share)
                else:
                    of_mean = work.item(found, 2 * several + place)
                    of_all = _number(work.item(found, several + place))
                    self._differentiate(each, each.output, share, of_mean, of_all)
        for node, size in self._wanted.sizes.items():
            if size.summed in statistics and node not in self._needed:
                self._resize(node, size)
        self._copy(first)
        self._replace()

    @functools.cached_property
    def _rows(self) -> Any:
        """How many rows this worker's batch has."""
        step = self._work.step
        given = next(
            node
            for node in step.given()
            if isinstance(value := node.meta.get("val"), torch.Tensor) and value.dim()
        )
        size = given.meta["val"].shape[0]
        if isinstance(size, int):
            return size
        with self._work.graph.inserting_after(given):
            return add_call(self._work.graph, aten.sym_size.int, given, 0)

    def _scale(self, scaled: Scaled, share: Node) -> None:
        """Let gradients weigh as they do in those of the whole batch."""
        graph = self._work.graph
        by_kind: dict[torch.dtype, Node] = {}
        for node, gradient in scaled.entries:
            kind = gradient.meta["val"].dtype
            if kind not in by_kind:
                by_kind[kind] = add_call(graph, aten._to_copy.default, share, dtype=kind)
            with graph.inserting_before(node):
                product = add_call(graph, aten.mul.Tensor, gradient, by_kind[kind])
            node.replace_input_with(gradient, product)
            self._moved[gradient, node] = product

    def _differentiate(
        self, scaled: Scaled, output: Node, share: Node, mean: Node, count: Node
    ) -> None:
        """Let the gradient of what a variance is of be that in the whole batch.

        Args:
            scaled: of the variance.
            output: its gradient.
            share: of how many times this worker's rows all of them are.
            mean: of all batches, by column.
            count: how many elements they have, of all columns.
        """
        graph, one = self._work.graph, scaled.statistic
        example = one.source.meta["val"]
        columns = math.prod(one.shape)
        mean.meta["val"] = example.new_empty((columns,) if one.shape else (), dtype=torch.float64)
        shape = [1 if dim in one.dims else size for dim, size in enumerate(example.shape)]

        def along_rows(node: Node) -> Node:
            if one.shape:
                node = add_call(graph, aten.view.default, node, shape)
            return add_call(graph, aten._to_copy.default, node, dtype=example.dtype)

        freedom = add_call(graph, aten.div.Scalar, count, max(columns, 1))
        freedom = add_call(graph, aten.sub.Scalar, freedom, one.correction)
        factor = add_call(graph, aten.div.Tensor, share, freedom)
        factor = add_call(graph, aten._to_copy.default, factor, dtype=example.dtype)
        mean = along_rows(mean)
        gradient = scaled.entries[0][1]
        with graph.inserting_before(output):
            if one.kind == "variance":
                value = add_call(graph, aten.mul.Scalar, gradient, 2.0)
            else:
                value = add_call(graph, aten.div.Tensor, gradient, self._known[one.value])
            used = value
            if one.shape:
                value = add_call(graph, aten.reshape.default, value, shape)
            value = add_call(graph, aten.mul.Tensor, value, factor)
            off = add_call(graph, aten.sub.Tensor, one.source, mean)
            new = add_call(graph, aten.mul.Tensor, off, value)
        output.replace_all_uses_with(new)
        for entry, _ in scaled.entries:
            self._moved[gradient, entry] = used

    def _replace(self) -> None:
        """Let what uses numbers of this worker use those of all, as far as they are known."""
        for value, node in list(self._uses):
            if (known := self._known.get(value)) is not None:
                if (value, node) in self._wanted.divide:
                    known = self._of_sum(node, value, known)
                self._moved.get((value, node), node).replace_input_with(value, known)
                self._uses.remove((value, node))

    def _of_sum(self, node: Node, value: Node, known: Node) -> Node:
        """A number that rows are divided by before they are summed, or multiplied with as one over
        it: gradients of the sum are averaged, and batches count in them by their rows."""
        graph, share = self._work.graph, self._share
        is_divisor = node.target is aten.div.Tensor and value is node.args[1]
        change = aten.div.Tensor if is_divisor else aten.mul.Tensor
        if (value, change) not in self._divided:  # once, forward and back
            with graph.inserting_before(node):
                kind = value.meta["val"].dtype
                share = add_call(graph, aten._to_copy.default, share, dtype=kind)
                self._divided[value, change] = add_call(graph, change, known, share)
        return self._divided[value, change]

    def _first(self, statistics: Sequence[Statistic]) -> Node:
        """What is the first to need some: what uses them, a number of a later round, or what
        writes to memory that is read for it."""
        order = self._work.order()
        own = {one.value for one in statistics}
        copied = {node for node, origins in self._origins.items() if origins & own}
        ends = [
            self._moved.get((value, node), node)
            for value, node in self._wanted.uses
            if value in copied
        ]
        ends += [node for node in copied if node in self._wanted.found and node not in own]
        first = min(ends, key=order.__getitem__)
        last = max(map(order.__getitem__, own))
        read = {memory_of(one) for node in copied for one in node.all_input_nodes}
        between = [node for node in order if last < order[node] < order[first]]
        return next((n for n in between if read & {*map(memory_of, written_inputs(n))}), first)

    def _copy(self, first: Node) -> None:
        """Compute once more, behind a message, what is known with it."""
        work, order = self._work, self._work.order()
        for node in sorted(self._needed, key=order.__getitem__):
            inputs = [one for one in node.all_input_nodes if one in self._needed]
            is_new = node not in self._known and node not in self._wanted.found
            if not is_new or not all(one in self._known for one in inputs):
                continue
            is_early = order[node] < order[first]
            graph = work.graph
            with graph.inserting_before(first) if is_early else graph.inserting_after(node):
                self._known[node] = graph.node_copy(node, self._in_place_of)
            if (size := self._wanted.sizes.get(node)) is not None:
                self._resize(self._known[node], size)

    def _resize(self, node: Node, size: Size) -> None:
        """Let a number be computed with the size of all workers' batches."""
        graph, (whole, count) = self._work.graph, self._counts[size.summed]
        own: Any = node.args[size.place]
        kind = node.meta["val"].dtype
        with graph.inserting_before(node):
            # As often as there are elements, or rows.
            each = own
            if size.more:
                is_node = isinstance(own, Node)
                each = add_call(graph, operator.sub, own, size.more) if is_node else own - size.more
            share = add_call(graph, aten.div.Tensor, whole, count)
            found = add_call(graph, aten.mul.Tensor, share, each)
            found = add_call(graph, aten.add.Scalar, found, size.more) if size.more else found
            found = add_call(graph, aten._to_copy.default, found, dtype=kind)
        node.update_arg(size.place, found)
        node.target = _OF_TENSORS.get(node.target, node.target)

    def _in_place_of(self, node: Node) -> Node:
        return self._known.get(node, node)

    def _numbers(self, one: Statistic) -> list[Any]:
        """What is told of a statistic: three numbers."""
        graph = self._work.graph
        source = self._in_place_of(one.source)
        with graph.inserting_after(one.value):
            count = self._rows if one.count == ROWS else one.count
            if count is None:
                size = one.source.meta["val"].numel()
                if isinstance(size, int):
                    count = size
                else:
                    count = add_call(graph, aten.sym_numel.default, one.source)
            if one.kind in VARIANCES:
                dims = list(one.dims)
                mean = add_call(graph, aten.mean.dim, source, dims)
                variance = add_call(graph, aten.var.correction, source, dims, correction=0)
                return [count, mean, variance]
            is_new = not one.is_gradient and any(source in self._known for source in one.sources)
            return [count, self._again(one) if is_new else one.value, 0.0]

    def _again(self, one: Statistic) -> Node:
        """Compute a statistic of this worker, of what is known with those of earlier rounds."""
        between: set[Node] = set()
        queue = [one.value]
        while queue:
            node = queue.pop()
            is_between = node in self._wanted.follows and node not in one.sources
            if is_between and node not in between:
                between.add(node)
                queue += node.all_input_nodes
        made: dict[Node, Node] = {}
        for node in sorted(between, key=self._work.order().__getitem__):
            made[node] = self._work.graph.node_copy(
                node, lambda input: made.get(input) or self._in_place_of(input)
            )
        return made[one.value]


def _as_it_was(work: Rewriting, one: Statistic, found: Node) -> Node:
    """One of all workers, in place of this worker's own, at the graph's insertion point."""
    value = one.value.meta["val"]
    found.meta["val"] = torch.empty((), dtype=torch.float64)
    if not isinstance(value, torch.Tensor):
        number = add_call(work.graph, aten._local_scalar_dense.default, found)
        number.meta["val"] = value
        return number
    several = (math.prod(one.shape),) if one.shape else ()
    found.meta["val"] = value.new_empty(several, dtype=torch.float64)
    if value.shape != several:
        found = add_call(work.graph, aten.view.default, found, list(value.shape))
    if value.dtype is torch.float64:
        return found
    return add_call(work.graph, aten._to_copy.default, found, dtype=value.dtype)


def _number(found: Node) -> Node:
    found.meta["val"] = torch.empty((), dtype=torch.float64)
    return found


def _with_rows(spec: StatisticsSpec) -> StatisticsSpec:
    """With how many rows all batches have."""
    return dataclasses.replace(
        spec,
        kinds=(*spec.kinds, "sum"),
        columns=(*spec.columns, 0),
        corrections=(*spec.corrections, 0.0),
        keys=(*spec.keys, hash_of("rows") % KEYS),
        lines=(*spec.lines, ""),
    )


def _is_of_some(one: Statistic) -> bool:
    """Whether a worker that leaves a statistic out may have nothing that counts in it."""
    chosen = any(masks_of(node) for node in ancestors([one.source]))
    return chosen or one.kind not in ("mean", *VARIANCES)


def _spec(work: Rewriting, used: list[Statistic], length: int) -> StatisticsSpec:
    terms = TermKeys(work.step)
    made = [places_of(one.value.meta.get("user_calls", ())) for one in used]
    lines = [
        hash_of((place, one.kind, terms.counted([one.source])))
        for place, one in zip(made, used, strict=True)
    ]
    # Of a line, which one of them each is.
    keys = [hash_of((line, lines[:place].count(line))) % KEYS for place, line in enumerate(lines)]
    corrections = [one.correction for one in used]
    lines_of_all = ["" if _is_of_some(one) else str(line_of(one.value)) for one in used]
    kinds = tuple(one.kind for one in used)
    columns = tuple(math.prod(one.shape) if one.shape else 0 for one in used)
    several = [pair for pair in zip(keys, columns, strict=True) if pair[1]]
    return StatisticsSpec(
        (),
        length,
        hash_of(several) % KEYS,
        kinds,
        columns,
        tuple(corrections),
        tuple(keys),
        tuple(lines_of_all),
    )
