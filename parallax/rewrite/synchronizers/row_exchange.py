"""What row servers and AllGather of sparse gradients share: lookups, and gradients of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.lookups import (
    Lookup,
    gradient_ids,
    resize_zeros,
    row_gradient,
    set_gradient_ids,
    with_rows,
)
from parallax.graph.analysis.variables import is_empty, origin
from parallax.ops.resources import pull_rows, pulled_rows, push_rows, receive_rows, unique_rows
from parallax.ops.specs import RowsSpec
from parallax.rewrite.context import Rewriting
from parallax.rewrite.early import known_early
from parallax.rewrite.synchronizers.sparse import (
    hand_over,
    table_spec,
    together,
    updates_touched_rows,
)

aten: Any = torch.ops.aten


@dataclass
class _Group:
    """Lookups of one stage and one hierarchy, exchanged together."""

    sharded: bool
    by_host: bool
    lookups: list[Lookup] = field(default_factory=list)
    resource: Node | None = None
    handle: Node | None = None
    tables: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    counts: dict[str, Node] = field(default_factory=dict)
    positions: dict[tuple[str, Node], Node] = field(default_factory=dict)


def synchronize_rows(work: Rewriting) -> None:
    """Replace lookups by pulled rows, and row gradients by their push to the owners."""
    groups = _groups(work)
    for group in groups:
        _fetch(work, group)
    for phase in work.phases:
        by_group: dict[int, list[Node]] = {}
        for mark in phase.marks:
            number = _group_of(work, groups, mark)
            if number is not None:
                by_group.setdefault(number, []).append(mark)
        for number, marks in by_group.items():
            for part in together(work, marks):
                _push(work, groups[number], part, phase.first_use)


def _groups(work: Rewriting) -> list[_Group]:
    groups: dict[Any, _Group] = {}
    order = work.order()
    for synchronizer in ("rows", "allgather"):
        found = [
            lookup
            for name in work.names_with(synchronizer)
            for lookup in work.analysis.lookups[name]
        ]
        for lookup in sorted(found, key=lambda item: order[item.node]):
            by_host = work.strategy.variables[lookup.variable].hierarchy == "hosts"
            key = (synchronizer, by_host, work.analysis.stages[lookup.node])
            new = _Group(synchronizer == "rows", by_host)
            groups.setdefault(key, new).lookups.append(lookup)
    return list(groups.values())


def _fetch(work: Rewriting, group: _Group) -> None:
    group.tables = list(dict.fromkeys(lookup.variable for lookup in group.lookups))
    group.touched = {name for name in group.tables if updates_touched_rows(work, name)}
    group.resource = work.resource(
        RowsSpec(
            tuple(
                table_spec(work, name, group.lookups, name in group.touched)
                for name in group.tables
            ),
            group.sharded,
            group.by_host,
        ),
        "rows",
    )
    ids: list[list[Node]] = [
        list(dict.fromkeys(lk.ids for lk in group.lookups if lk.variable == name))
        for name in group.tables
    ]
    shards = [table for name in group.tables if (table := work.step.placeholder(name)) is not None]
    every = [node for nodes in ids for node in nodes]
    start = known_early(work, every, group.lookups[0].node, shards if group.sharded else ())
    with work.graph.inserting_before(start):
        if group.sharded:
            messages = _messages(work, group)
            fetched = work.call(pull_rows, group.resource, ids, shards, messages)
        else:
            fetched = work.call(unique_rows, group.resource, ids)
        index = 0
        for name, nodes in zip(group.tables, ids, strict=True):
            group.counts[name] = work.item(fetched, index)
            for offset, node in enumerate(nodes, 1):
                group.positions[name, node] = work.item(fetched, index + offset)
            index += 1 + len(nodes)
        group.handle = work.item(fetched, index)
    if group.sharded:
        _read_pulled(work, group)


def _messages(work: Rewriting, group: _Group) -> list[list[int]]:
    """The tables that are fetched together, in the order in which they are read."""
    order = work.order()
    messages: dict[int, list[int]] = {}
    for lookup in sorted(group.lookups, key=lambda item: order[item.node]):
        table = group.tables.index(lookup.variable)
        number = work.strategy.variables[lookup.variable].pull_group
        if table not in messages.setdefault(number, []):
            messages[number].append(table)
    return list(messages.values())


def _read_pulled(work: Rewriting, group: _Group) -> None:
    """Wait for each table's rows where they are first read."""
    order = work.order()
    rows: dict[str, Node] = {}
    for lookup in sorted(group.lookups, key=lambda item: order[item.node]):
        name = lookup.variable
        if name not in rows:
            with work.graph.inserting_before(lookup.node):
                table = group.tables.index(name)
                rows[name] = work.call(pulled_rows, group.resource, group.handle, table)
        positions = group.positions[name, lookup.ids]
        lookup.node.args = with_rows(lookup, rows[name], positions)


def _group_of(work: Rewriting, groups: list[_Group], mark: Node) -> int | None:
    name = str(mark.args[1])
    if name not in work.names_with("rows", "allgather"):
        return None
    source = mark.args[0]
    assert isinstance(source, Node)
    rows = row_gradient(source, torch.Size(work.analysis.variables[name].shape))
    assert rows is not None
    for number, group in enumerate(groups):
        known = {node for table, node in group.positions if table == name}
        if known and origin(gradient_ids(rows.terms[0]), known) is not None:
            return number
    raise AssertionError(f"the gradient of {name} matches no lookup")


def _push(work: Rewriting, group: _Group, marks: list[Node], first_use: Node) -> None:
    for mark in marks:
        _compact(work, group, mark)
    order = work.order()
    last = max(marks, key=order.__getitem__)
    tables = [group.tables.index(str(mark.args[1])) for mark in marks]
    with work.graph.inserting_before(last):
        pending = work.call(
            push_rows, group.resource, group.handle, tables, [mark.args[0] for mark in marks]
        )
    with work.graph.inserting_before(first_use):
        received = work.call(receive_rows, group.resource, pending)
        for index, mark in enumerate(marks):
            hand_over(work, mark, work.item(received, index), str(mark.args[1]) in group.touched)
    for mark in marks:
        work.graph.erase_node(mark)


def _compact(work: Rewriting, group: _Group, mark: Node) -> None:
    """Let a gradient have one row for each unique id instead of one for each row of the table."""
    name, source = str(mark.args[1]), mark.args[0]
    assert isinstance(source, Node)
    rows = row_gradient(source, torch.Size(work.analysis.variables[name].shape))
    assert rows is not None
    count = group.counts[name]
    known = {node for table, node in group.positions if table == name}
    for term in rows.terms:
        ids = gradient_ids(term)
        start = origin(ids, known)
        assert start is not None
        with work.graph.inserting_before(term):
            positions = ids
            if not is_empty(ids):
                positions = _same_shape(work, ids, start, group.positions[name, start])
        set_gradient_ids(term, positions, count)
    for zeros in rows.zeros:
        resize_zeros(zeros, count)


def _same_shape(work: Rewriting, ids: Node, start: Node, positions: Node) -> Node:
    """``positions``, reshaped as ``start`` was reshaped to ``ids``."""
    if ids is start:
        return positions
    source = ids.args[0]
    assert isinstance(source, Node)
    inner = _same_shape(work, source, start, positions)
    copy = work.graph.node_copy(ids, lambda node: node)
    copy.args = (inner, *ids.args[1:])
    return copy
