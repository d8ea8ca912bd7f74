"""Sparse variables that are read in bags: owners sum the rows of a bag before they travel."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.lookups import Lookup, bag_of
from parallax.graph.analysis.variables import Variable
from parallax.ops.resources import pull_bags, pulled_bags, push_bags, receive_bags
from parallax.ops.specs import BagFeature, BagsSpec
from parallax.rewrite.context import Rewriting
from parallax.rewrite.early import known_early
from parallax.rewrite.synchronizers.sparse import (
    hand_over,
    table_spec,
    together,
    updates_touched_rows,
)
from parallax.strategy.cost import part_of_exchange, row_bytes, touched_rows
from parallax.strategy.data import VariableStrategy
from parallax.strategy.registry import MessageKind, Synchronizer

aten: Any = torch.ops.aten


@dataclass
class _Group:
    """Lookups of one stage, exchanged together."""

    lookups: list[Lookup] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    resource: Node | None = None
    handle: Node | None = None

    def feature(self, output: Node | None) -> int:
        """The lookup, by its number, of which ``output`` is one."""
        return next(i for i, lookup in enumerate(self.lookups) if lookup.node is output)


def synchronize_bags(work: Rewriting) -> None:
    """Replace bags by sums that owners make, and their gradients by a push to the owners."""
    groups: dict[Any, _Group] = {}
    order = work.order()
    found = [lk for name in work.names_with("bags") for lk in work.analysis.lookups[name]]
    for lookup in sorted(found, key=lambda item: order[item.node]):
        groups.setdefault(work.analysis.stages[lookup.node], _Group()).lookups.append(lookup)
    for group in groups.values():
        _fetch(work, group)
    terms = _terms(work)
    for phase in work.phases:
        for group in groups.values():
            marks = [mark for mark in phase.marks if mark in terms and _belongs(group, terms[mark])]
            for part in together(work, marks):
                for several in _one_of_each(part):
                    _push(work, group, several, terms, phase.first_use)
    for lookup in found:
        _erase_with_gradients(work, lookup.node)


def _fetch(work: Rewriting, group: _Group) -> None:
    group.tables = list(dict.fromkeys(lookup.variable for lookup in group.lookups))
    group.touched = {name for name in group.tables if updates_touched_rows(work, name)}
    tables = tuple(
        table_spec(work, name, group.lookups, name in group.touched) for name in group.tables
    )
    features = tuple(
        BagFeature(
            table=group.tables.index(lookup.variable),
            mean=len(lookup.node.args) > 4 and bool(lookup.node.args[4] == 1),
            last_offset=bool(len(lookup.node.args) > 7 and lookup.node.args[7]),
        )
        for lookup in group.lookups
    )
    group.resource = work.resource(BagsSpec(tables, features), "bags")
    pairs = [[lookup.ids, _offsets(lookup)] for lookup in group.lookups]
    first = group.lookups[0].node
    inputs = [node for pair in pairs for node in pair if isinstance(node, Node)]
    shards = [table for name in group.tables if (table := work.step.placeholder(name)) is not None]
    start = known_early(work, inputs, first, shards)
    with work.graph.inserting_before(start):
        group.handle = work.call(pull_bags, group.resource, pairs, shards)
    with work.graph.inserting_before(first):
        pulled = work.call(pulled_bags, group.resource, group.handle)
        for index, lookup in enumerate(group.lookups):
            sums = work.item(pulled, index)
            for user in list(lookup.node.users):
                if user.target is operator.getitem and user.args[1] == 0:
                    sums.meta.update(user.meta)
                    user.replace_all_uses_with(sums)


def _offsets(lookup: Lookup) -> Node | int:
    """Where bags begin; or, if all have equally many ids as a tensor of two dimensions gives them,
    how many that is."""
    ids, offsets = lookup.node.args[1:3]
    assert isinstance(ids, Node)
    assert isinstance(offsets, Node)
    readers = [str(user.target) for user in offsets.users]
    if offsets.target is aten.arange.start_step and all("embedding_bag" in r for r in readers):
        bounds: tuple[Any, ...] = (*offsets.args, 1)
        start, end, step = bounds[:3]
        last = len(lookup.node.args) > 7 and lookup.node.args[7]
        if start == 0 and end == ids.meta["val"].numel() and end % step == 0 and not last:
            return int(step)
    return offsets


def _erase_with_gradients(work: Rewriting, node: Node) -> None:
    """Erase what is left of a lookup: nothing but its gradient still reads it."""
    for user in list(node.users):
        _erase_with_gradients(work, user)
    work.graph.erase_node(node)


def _terms(work: Rewriting) -> dict[Node, tuple[Node, ...]]:
    """By mark, the gradients of bags that make up a gradient of the whole table."""
    return {
        mark: rows.terms
        for name in work.names_with("bags")
        if name in work.analysis.gradients  # else a step without them
        for mark, rows in zip(
            work.analysis.gradients[name], work.analysis.row_gradients(name), strict=True
        )
    }


def _belongs(group: _Group, terms: tuple[Node, ...]) -> bool:
    return any(lookup.node is bag_of(terms[0]) for lookup in group.lookups)


def _one_of_each(marks: list[Node]) -> list[list[Node]]:
    """Owners add up all that a message has for a table: gradients of one table travel apart."""
    messages: list[list[Node]] = []
    for mark in marks:
        for message in messages:
            if all(other.args[1] != mark.args[1] for other in message):
                message.append(mark)
                break
        else:
            messages.append([mark])
    return messages


def _push(
    work: Rewriting,
    group: _Group,
    marks: list[Node],
    terms: dict[Node, tuple[Node, ...]],
    first_use: Node,
) -> None:
    pushed = [term for mark in marks for term in terms[mark]]
    features = [group.feature(bag_of(term)) for term in pushed]
    order = work.order()
    last = max(marks, key=order.__getitem__)
    with work.graph.inserting_before(last):
        gradients = [term.args[0] for term in pushed]
        pending = work.call(push_bags, group.resource, group.handle, features, gradients)
    tables = [group.tables.index(str(mark.args[1])) for mark in marks]
    with work.graph.inserting_before(first_use):
        received = work.call(receive_bags, group.resource, pending, tables)
        for index, mark in enumerate(marks):
            hand_over(work, mark, work.item(received, index), str(mark.args[1]) in group.touched)
    for mark in marks:
        work.graph.erase_node(mark)


def _travelled(variable: Variable, choice: VariableStrategy, workers: int) -> tuple[float, float]:
    """Values, and ids with bag sizes, that one worker's lookups need; measured if they were."""
    if variable.travelled:
        return variable.travelled
    touched = touched_rows(variable)
    bags = variable.bags_per_step * (len(choice.owners) or workers)
    if touched <= bags:
        return touched, touched
    return bags, variable.ids_per_step + bags


def _exchanged(variable: Variable, choice: VariableStrategy, workers: int, hosts: int) -> float:
    """Ids, bag sizes, and values with their gradients."""
    values, numbers = _travelled(variable, choice, workers)
    return (workers - 1) / workers * (2 * values * row_bytes(variable) + 4 * numbers)


def _part(kind: MessageKind, variable: Variable, choice: VariableStrategy, workers: int) -> float:
    values, numbers = _travelled(variable, choice, workers)
    return part_of_exchange(kind, numbers, values, row_bytes(variable))


def _problems(
    choice: VariableStrategy, variable: Variable, workers: int
) -> list[tuple[str, str, str]]:
    if variable.bags:
        return []
    remedy = "use rows"
    return [("synchronizer", "bags is for variables that are read in bags only", remedy)]


SYNCHRONIZER = Synchronizer(
    "bags",
    _exchanged,
    synchronize_bags,
    part=_part,
    messages=("ids", "rows", "rows"),
    sparse=True,
    sharded=True,
    bags=True,
    some=True,
    partitions=("cyclic", "whole"),
    check=_problems,
)
