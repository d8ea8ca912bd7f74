"""By what workers know that totals are of the same terms, though some leave terms out.

A step whose Python decides by values of the batch (``if len(boxes):``) has other terms on workers
whose batches decide otherwise. Totals of the same place in the code belong together: of the same
calls, line and columns, and the same one of as many as are computed there.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.counts import Count
from parallax.graph.analysis.divisors import Divisor
from parallax.graph.analysis.loss_terms import SIZES
from parallax.graph.common.hashes import hash_of
from parallax.graph.common.operations import has_one_element
from parallax.graph.common.user_code import Calls, places_of
from parallax.graph.step_graph import StepGraph
from parallax.ops.totals import LINES, MOST, NUMBERS, PARTS, PLACES, TermKey

aten: Any = torch.ops.aten

_COMPARISONS = {
    aten.eq.Scalar,
    aten.ne.Scalar,
    aten.lt.Scalar,
    aten.le.Scalar,
    aten.gt.Scalar,
    aten.ge.Scalar,
}


class TermKeys:
    """Makes the keys of a worker's step.

    Args:
        step: as it was captured.
    """

    def __init__(self, step: StepGraph) -> None:
        inputs = zip(step.own_placeholders(), step.inputs, strict=True)
        self._parts = {node: item.part for node, item in inputs if item.kind == "batch"}
        self._order = {node: number for number, node in enumerate(step.graph.nodes)}

    def of_totals(self, totals: Sequence[Divisor | Count]) -> list[int]:
        """A key for each."""
        lines = [self._line(_told_by(one), self.counted(_counts(one))) for one in totals]
        if len(totals) > MOST:
            return lines  # they do not travel
        alike: dict[int, list[int]] = collections.defaultdict(list)
        for number in sorted(range(len(totals)), key=lambda one: self._place(totals[one])):
            alike[lines[number]].append(number)
        found = list(lines)
        for numbers in alike.values():
            for place, number in enumerate(numbers):
                one = totals[number]
                is_mean = isinstance(one, Divisor) and one.is_mean
                found[number] += (place * MOST + len(numbers) - 1) * 2 + is_mean
        return found

    def of_term(self, term: Node, one: Divisor | Count, key: int, total: int) -> TermKey:
        """The key of terms of a line.

        Args:
            term: one of them.
            one: what divides them.
            key: of that.
            total: which one it is.
        """
        line = self._line(term, self.counted(_counts(one)))
        return TermKey(line + 1 + hash_of(key) % (PLACES - 1), total, self._line(term))

    def of_others(self, losses: Iterable[Node], lines: Collection[int]) -> Iterator[int]:
        """Keys of lines of all numbers that losses are made of, from the losses on; not of what is
        multiplied by zero.

        Args:
            lines: keys of those that are known.
        """
        queue = collections.deque(losses)
        seen = set(queue)
        found = set(lines)
        while queue:
            node = queue.popleft()
            if node.op == "call_function" and has_one_element(node):
                key = self._line(node)
                if key not in found:
                    found.add(key)
                    yield key
            if 0 not in node.args[:2]:
                new = [one for one in node.all_input_nodes if one not in seen]
                seen.update(new)
                queue += new

    def _place(self, total: Divisor | Count) -> int:
        return self._order[_told_by(total)]

    def _line(self, node: Node, counted: tuple[object, object] = ((), ())) -> int:
        """A multiple of :data:`PLACES`: hashes of the calls and the line that made a node, of an
        input of its part of the batch; and of what is counted there."""
        calls: Calls = node.meta.get("user_calls", ())
        made = places_of(calls) or (node.op, self._parts.get(node, ""))
        line = 1 + hash_of(made) % (LINES - 1)
        parts, numbers = counted
        number = 1 + hash_of(numbers) % (NUMBERS - 1) if numbers else 0
        return ((line * PARTS + hash_of(parts) % PARTS) * NUMBERS + number) * PLACES

    def counted(self, nodes: Iterable[Node]) -> tuple[list[str], list[str]]:
        """What tells what a loop counts in one round from what it counts in another: parts of the
        batch, and numbers that their elements are compared with. Not sizes, which differ between
        workers, nor what follows from parameters.

        Args:
            nodes: whose elements are counted.
        """
        parts, numbers = set(), set()
        queue = list(nodes)
        seen = set(queue)
        while queue:
            node = queue.pop()
            if node in self._parts:
                parts.add(self._parts[node])
            elif node.target in _COMPARISONS:
                other = node.args[1]
                if isinstance(other, bool | int | float):
                    numbers.add(str(other))
            new = [] if node.target in SIZES else set(node.all_input_nodes) - seen
            seen.update(new)
            queue += new
        return sorted(parts), sorted(numbers)


def _told_by(one: Divisor | Count) -> Node:
    """The line of which node a total is of."""
    if isinstance(one, Count):
        return one.terms[0]
    return one.value if one.total is None else one.total


def _counts(one: Divisor | Count) -> list[Node]:
    """What a total counts elements of, where that follows from the batch alone."""
    if isinstance(one, Count):
        return [one.source] if one.source is not None and one.each is not None else []
    if one.total is not None:
        return [one.total]
    loss: Any = one.value.args[0]
    return [loss.args[1]]
