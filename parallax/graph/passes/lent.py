"""Gradients of zero for what only other workers' batches have gradients of.

A step whose Python decides by values of the batch (``if len(boxes):``) leaves out a part of the
model where a batch has nothing for it. On one device with all workers' batches that part has
gradients, to which the batches without it add nothing.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from parallax.graph.analysis.compute import computes_much
from parallax.graph.common.operations import ancestors
from parallax.graph.common.recording import Act
from parallax.graph.objects.state import Leaf
from parallax.graph.step_graph import GradientPlace, Gradients, StepGraph
from parallax.ops import marks

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Lent:
    """What a worker's step lacks of all workers' steps.

    Args:
        passes: by backward pass, counted from 0 with those that it lacks, the variables that are to
            have a gradient of zero there; whether others had cleared theirs before.
        acts: of all workers, in their order.
        order: of all workers' gradients: their passes and variables.
        tables: of these, those whose gradients are of rows; whether they are sparse tensors.
        reads: of all workers' tables, in the order in which rows are looked up.
        as_products: those of matrices are products of nothing, as strategies may send factors.
    """

    passes: Mapping[int, Mapping[str, bool]] = field(default_factory=dict)
    acts: Sequence[Act] = ()
    order: Sequence[tuple[int, str]] = ()
    tables: Mapping[str, bool] = field(default_factory=dict)
    reads: Sequence[str] = ()
    as_products: bool = True

    @property
    def is_any(self) -> bool:
        """Whether something is lacking."""
        return bool(self.passes or self.acts)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The variables that are to have gradients of zero."""
        return frozenset(name for names in self.passes.values() for name in names)

    def lookups(self, tensors: Sequence[Leaf], number: int) -> torch.Tensor | None:
        """A number that is zero, and follows from no row of each table.

        Args:
            tensors: the state.
            number: of the backward pass.
        """
        found: torch.Tensor | None = None
        for leaf in tensors:
            if leaf.name not in self.passes.get(number, {}) or leaf.name not in self.tables:
                continue
            # As many as are chosen, which torch does not know to be none: else it looks up nothing;
            # and their gradient has to need them.
            ids = torch.zeros(1, dtype=torch.bool, device=leaf.value.device).nonzero()[:, 0]
            nothing = F.embedding(ids, leaf.value, sparse=self.tables[leaf.name]).square().sum()
            found = nothing if found is None else found + nothing
        return found

    def gradient(self, variable: torch.Tensor) -> torch.Tensor:
        """A gradient of zero, of a variable that is no table."""
        if not self.as_products or variable.dim() != 2:
            return torch.zeros_like(variable)
        rows, columns = (variable.new_zeros(0, size) for size in variable.shape)
        return torch.mm(rows.t(), columns)


NOTHING_LENT = Lent()
_OF_ROWS = {torch.ops.aten.embedding_dense_backward.default}
_LOOKUPS = {torch.ops.aten.embedding.default}
_SUMS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
_MOST_NODES = 6
"""Of a gradient of zero, with the variable and the mark."""


def gradients_of(step: StepGraph, passes: Mapping[str, Mapping[int, bool]]) -> Gradients:
    """What a step has gradients of, so that other workers can have them as zeros.

    Args:
        step: as it was captured.
        passes: by variable, the backward passes that it has a gradient of, and whether it had none
            before.
    """
    order = {node: place for place, node in enumerate(step.graph.nodes)}
    found: dict[str, list[GradientPlace]] = {}
    for mark in step.graph.find_nodes(op="call_function", target=marks.GRADIENT):
        name: Any = mark.args[1]
        table = step.placeholder(name)
        if name not in passes or name in found or table is None:
            continue
        form = _form(mark)
        readers = [node for node in table.users if node.target in _LOOKUPS]
        if form != "whole":
            ids = ancestors([node.args[1] for node in readers])  # type: ignore[misc]
            form = "late" if not readers or any(map(computes_much, ids)) else form
        read = min((order[node] for node in readers), default=0)
        found[name] = [
            GradientPlace(name, number, form, read, anew) for number, anew in passes[name].items()
        ]
    return tuple(place for places in found.values() for place in places)


def _form(mark: Node) -> str:
    if mark.meta["val"].layout is not torch.strided:
        return "sparse"
    queue: list[Any] = [mark.args[0]]
    while queue:
        node = queue.pop()
        if node.target in _OF_ROWS:
            return "rows"
        if node.target in _SUMS:
            queue += node.args[:2]
    return "whole"


class Done(NamedTuple):
    """What a worker's step does that others may lack."""

    acts: Sequence[Act]
    gradients: Gradients


def missing(own: Done, of_all: Sequence[Done]) -> Lent | None:
    """What a worker lacks of all workers' steps; None if it cannot be told where it belongs."""
    acts = _merged_acts([one.acts for one in of_all])
    if acts is None or any(act.by_values for act in acts if act not in own.acts):
        return None
    passes: dict[int, dict[str, bool]] = {}
    tables = {}
    known = {(place.name, place.number) for place in _renumbered(own, acts)}
    for place in (place for one in of_all for place in _renumbered(one, acts)):
        if (place.name, place.number) not in known and place.form != "late":
            names = passes.setdefault(place.number, {})
            names[place.name] = names.get(place.name, False) or place.anew
            if place.form != "whole":
                tables[place.name] = place.form == "sparse"
    return Lent(
        passes,
        acts if len(own.acts) < len(acts) else (),
        sorted(
            _merged([[one[:2][::-1] for one in _in_order(done, acts)] for done in of_all]),
            key=lambda one: one[0],
        ),
        tables,
        _merged(
            [
                _names(sorted(one.gradients, key=lambda place: place.read), read=True)
                for one in of_all
            ]
        ),
    )


def _in_order(done: Done, acts: Sequence[Act]) -> list[GradientPlace]:
    return sorted(_renumbered(done, acts), key=lambda place: place.number)


def _names(gradients: Gradients, read: bool = False) -> list[str]:
    """Of variables with gradients, or of those that are tables."""
    return list(dict.fromkeys(one.name for one in gradients if one.read or not read))


def _renumbered(done: Done, acts: Sequence[Act]) -> Iterator[GradientPlace]:
    """A worker's gradients, by backward passes as all workers' acts count them."""
    numbers, number, own = [], 0, deque(done.acts)
    for act in acts:
        is_own = bool(own) and own[0] == act
        if is_own:
            own.popleft()
        if act.kind == "backward":
            if is_own:
                numbers.append(number)
            number += 1
    for place in done.gradients:
        if place.number < len(numbers):
            yield place._replace(number=numbers[place.number])


def _merged_acts(lists: Sequence[Sequence[Act]]) -> list[Act] | None:
    """The acts of all workers; None if they have no common order, or some repeat an update more
    often than others, of which it is not known which are the same."""
    counts = [Counter(act for act in acts if act.updates) for acts in lists]
    if any(
        count[act] not in (0, most) for act, most in _repeated(counts).items() for count in counts
    ):
        return None
    order = _merged([list(_with_turns(acts)) for acts in lists], lambda one: one[0].lines)
    places = {act: place for place, act in enumerate(order)}
    for acts in lists:
        found = [places[act] for act in _with_turns(acts)]
        if found != sorted(found):
            return None
    return [act for act, _ in order]


def _repeated(counts: Sequence[Counter[Act]]) -> dict[Act, int]:
    most = {act: max(count[act] for count in counts) for one in counts for act in one}
    return {act: number for act, number in most.items() if number > 1}


def _with_turns(acts: Sequence[Act]) -> Iterator[tuple[Act, int]]:
    """Acts, each with how often it was done before."""
    before: Counter[Act] = Counter()
    for act in acts:
        yield act, before[act]
        before[act] += 1


def _merged(
    lists: Sequence[Sequence[_Item]], place_in_code: Callable[[_Item], Any] = lambda item: 0
) -> list[_Item]:
    """All items of lists, in the order of the longest one; of others, behind what is before."""
    order: list[_Item] = []
    for items in sorted(lists, key=len, reverse=True):
        place = 0
        for number, item in enumerate(items):
            if item in order:
                place = order.index(item) + 1
                continue
            known = (order.index(one) for one in items[number:] if one in order)
            limit = next(known, len(order))
            while place < limit and place_in_code(order[place]) < place_in_code(item):
                place += 1
            order.insert(place, item)
            place += 1
    return order


def put_in_order(step: StepGraph, lent: Lent) -> None:
    """Let gradients of zero, and lookups of nothing, come where other workers have theirs: they
    depend on nothing."""
    if not lent.passes:
        return
    marked: dict[tuple[int, str], Node] = {}
    for mark in step.graph.find_nodes(op="call_function", target=marks.GRADIENT):
        marked.setdefault((mark.meta["backward_pass"], str(mark.args[1])), mark)
    in_order = [
        (name, marked[number, name]) for number, name in lent.order if (number, name) in marked
    ]
    _move(step.graph, lent, in_order)
    _put_off(step.graph, lent, in_order)
    order = {node: place for place, node in enumerate(step.graph.nodes)}
    read = []
    for name in lent.reads:
        users = [] if (table := step.placeholder(name)) is None else [*table.users]
        if readers := [node for node in users if node.target in _LOOKUPS]:
            read.append((name, min(readers, key=order.__getitem__)))
    _move(step.graph, lent, read)


def _put_off(graph: Graph, lent: Lent, in_order: Sequence[tuple[str, Node]]) -> None:
    """Move marks that come too early behind those that they follow."""
    before: Node | None = None
    for name, mark in in_order:
        if before is not None and name in lent.names:
            order = {node: place for place, node in enumerate(graph.nodes)}
            first = min((order[user] for user in mark.users), default=len(order))
            if order[mark] < order[before] < first:
                before.append(mark)
        before = mark


def _move(graph: Graph, lent: Lent, in_order: Sequence[tuple[str, Node]]) -> None:
    """Move nodes of what is lent that come too late before those that follow them."""
    following: Node | None = None
    for name, node in reversed(in_order):
        if following is not None and name in lent.names:
            order = {one: place for place, one in enumerate(graph.nodes)}
            made = sorted(ancestors([node]), key=order.__getitem__)
            for one in made if len(made) <= _MOST_NODES else ():
                if order[one] > order[following]:
                    following.prepend(one)
        following = node
