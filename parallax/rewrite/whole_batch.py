"""Gather the rows that a step compares with each other from all workers."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.totals import Batches
from parallax.graph.common.hashes import hash_of
from parallax.graph.common.user_code import line_of
from parallax.graph.step_graph import StepGraph
from parallax.ops.resources import finish, own_part, start
from parallax.ops.whole_batch import (
    OWN_ROWS,
    WHOLE_ROWS,
    GatheredRows,
    WholeBatchSpec,
    count_rows,
    quotient,
)
from parallax.rewrite.context import Pass, Rewriting
from parallax.rewrite.early import at_the_start

aten: Any = torch.ops.aten


def over_whole_batches(batches: Batches) -> Pass:
    """The pass, for steps of workers that compare rows, or other steps beside those."""
    return functools.partial(_gather, batches)


def layout_of(step: StepGraph) -> str:
    """What a step sends to compare rows, or to count them; nothing if it does neither."""
    wanted = step.graph.find_nodes(op="call_function", target=WHOLE_ROWS)
    counts = [
        "their number"
        for one in step.graph.find_nodes(op="call_function", target=count_rows)
        if one.users
    ]
    return "; ".join([*map(str, map(_described, wanted)), *counts])


def _gather(batches: Batches, work: Rewriting) -> None:
    graph = work.graph
    wanted = list(graph.find_nodes(op="call_function", target=WHOLE_ROWS))
    if not wanted and not batches.compared:
        return
    messages = _messages(work, wanted)
    described = [tuple(map(_described, message)) for message in messages]
    layout = hash_of(described) >> 1 if wanted else 0
    line = str(line_of(wanted[0].args[0])) if wanted else ""
    resource = work.resource(WholeBatchSpec((), tuple(described), layout, line), "whole_batch")
    _, awaited = at_the_start(work)
    before = work.step.placeholders()[-1].next
    counts = graph.find_nodes(op="call_function", target=count_rows)
    order = work.order()
    users = [user for one in counts for user in one.users if user.target is not WHOLE_ROWS]
    with graph.inserting_before(before):
        work.call(start, resource, 0, work.size(work.step.rows[0]))
    first = min([awaited, *users], key=order.__getitem__)
    with graph.inserting_before(first):
        count = work.call(finish, resource, 0)
    for one in counts:
        count.meta.update(one.meta)
        one.replace_all_uses_with(count)
    for number, message in enumerate(messages, 1):
        limit = min((user for one in message for user in one.users), key=order.__getitem__)
        last = max(message, key=order.__getitem__)
        with graph.inserting_after(last):
            work.call(start, resource, number, [one.args[0] for one in message])
        with graph.inserting_before(limit):
            found = work.call(finish, resource, number)
            for place, one in enumerate(message):
                item = work.item(found, place)
                item.meta.update(one.meta)
                one.replace_all_uses_with(item)
    for one in (*wanted, *counts):
        graph.erase_node(one)
    for one in graph.find_nodes(op="call_function", target=operator.truediv):
        if _is_of_rows(work, one):
            one.target = quotient
    for one in graph.find_nodes(op="call_function", target=OWN_ROWS):
        whole, _, *places = one.args
        with graph.inserting_before(one):
            own = work.call(own_part, resource, whole, *places)
        own.meta.update(one.meta)
        one.replace_all_uses_with(own)
        graph.erase_node(one)


def _messages(work: Rewriting, wanted: list[Node]) -> list[list[Node]]:
    """What travels together: all that is known before the first of it is used."""
    order = work.order()
    messages: list[list[Node]] = []
    limit = -1
    for node in wanted:
        if not messages or order[node] > limit:
            messages.append([])
            limit = len(order)
        messages[-1].append(node)
        limit = min(limit, *(order[user] for user in node.users))
    return [sorted(one, key=_element_size, reverse=True) for one in messages]


def _is_of_rows(work: Rewriting, node: Node) -> bool:
    """Whether a number follows from how many rows this worker's batch has."""
    value, rows = node.meta.get("val"), work.step.rows[0]
    symbols = value.node.expr.free_symbols if isinstance(value, torch.SymFloat) else ()
    return isinstance(rows, torch.SymInt) and not rows.node.expr.free_symbols.isdisjoint(symbols)


def _element_size(node: Node) -> int:
    return int(node.meta["val"].element_size())


def _described(node: Node) -> GatheredRows:
    _, dim, outer, inner, _ = node.args
    value = node.meta["val"]
    shape = tuple(1 if place == dim else int(size) for place, size in enumerate(value.shape))
    return GatheredRows(value.dtype, shape, dim, outer, inner)  # type: ignore[arg-type]
