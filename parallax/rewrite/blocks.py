"""Update a large shard block by block, with the gradient of one block at a time.

An optimizer that changes every row in every step (Adam) needs a gradient for all rows, although a
step looks up few. Instead of a gradient as large as the shard, and temporaries as large, the
update's operations are put in a function of their own that runs on blocks of rows: what is needed
besides the state is one block, which stays in the cache from one operation to the next.

The same holds for a gradient that came as factors: each block is multiplied when it is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from parallax.graph.analysis.layout import Component
from parallax.graph.common.operations import is_write
from parallax.ops.factors import update_by_product
from parallax.ops.resources import update_in_blocks
from parallax.rewrite.context import Rewriting
from parallax.rewrite.touched_rows import ignores_zeros, keeps_zero, spread_where_needed

aten: Any = torch.ops.aten


def can_update_in_blocks(work: Rewriting, name: str, marks: list[Node]) -> bool:
    """Whether the update of ``name`` may run block by block; asked before it is rewritten."""
    if work.analysis.variables[name].lazy or len(marks) != 1:
        return False
    return _split(work, work.analysis.components[name], marks[0]) is not None


def split_updates(work: Rewriting) -> None:
    """Rewrite the updates of row-sharded variables whose gradient is needed in all rows, and of
    variables whose gradients are left as factors."""
    for name, (ids, rows) in work.blocked.items():
        component = work.analysis.components[name]
        found = _split(work, component, rows)
        assert found is not None
        zeros, full = found
        _outline(work, name, component, ids, zeros, full)
    for name, factors in work.multiplied.items():
        _multiply(work, name, factors)


def _split(
    work: Rewriting, component: Component, gradient: Node
) -> tuple[list[Node], list[Node]] | None:
    """Members that are zero in untouched rows, and those that need all rows; None if mixed."""
    zeros: dict[Node, None] = {gradient: None}
    full: dict[Node, None] = {}
    if component.sized or component.obstacle:
        return None
    for node in work.graph.nodes:
        if node not in component.members or node in zeros or node.op == "placeholder":
            continue
        returned = any(user.op == "output" for user in node.users)
        if keeps_zero(node, zeros) and not returned:
            if full and node.args[0] in zeros and is_write(node):
                return None
            zeros[node] = None
        else:
            full[node] = None
    for reduction in component.reductions:
        if reduction.node.args[0] not in zeros or not ignores_zeros(reduction):
            return None
    if not full or any(
        user not in full and user.op != "output" for node in full for user in node.users
    ):
        return None
    return None if _is_read_meanwhile(work, component, full) else (list(zeros), list(full))


def _is_read_meanwhile(work: Rewriting, component: Component, full: dict[Node, None]) -> bool:
    """Whether it matters that the update runs at the place of its last operation.

    It does if, between the first and the last, others read the state, or change in place what the
    update reads (ASGD counts its averaging weight on).
    """
    order = work.order()
    first, last = min(order[n] for n in full), max(order[n] for n in full)

    def meanwhile(user: Node) -> bool:
        return first < order[user] < last and user not in full

    states = [node for node in component.members if node.op == "placeholder"]
    if any(meanwhile(user) for node in states for user in node.users):
        return True
    sources = {source for node in full for source in node.all_input_nodes}
    return any(
        meanwhile(user) and is_write(user) and user.args[0] is source
        for source in sources - set(full)
        for user in source.users
    )


def _multiply(work: Rewriting, name: str, factors: Node) -> None:
    """Let an update multiply factors itself, a block of rows at a time."""
    full = _behind(work, name, factors)
    assert full is not None

    def call(update: Node, shards: list[Node], others: list[Node]) -> Node:
        return work.call(update_by_product, update, factors, shards, others)

    _put_in_function(work, work.analysis.components[name], full, [factors], call)


def can_multiply_in_blocks(work: Rewriting, name: str, gradient: Node) -> bool:
    """Whether the update of ``name`` may multiply its gradient's factors block by block."""
    return _behind(work, name, gradient) is not None


def _behind(work: Rewriting, name: str, gradient: Node) -> list[Node] | None:
    """The whole update, if nothing but the update needs the gradient or what follows from it."""
    component = work.analysis.components[name]
    if component.sized or component.reductions or component.variables != {name}:
        return None
    if component.obstacle or len(work.analysis.gradients[name]) != 1:
        return None
    full = {
        node: None
        for node in work.graph.nodes
        if node in component.members and node.op == "call_function" and node is not gradient
    }
    if not full or any(
        user not in full and user.op != "output" for node in full for user in node.users
    ):
        return None
    if any(user not in full for user in gradient.users):
        return None
    return None if _is_read_meanwhile(work, component, full) else list(full)


def _outline(
    work: Rewriting,
    name: str,
    component: Component,
    ids: Node,
    zeros: list[Node],
    full: list[Node],
) -> None:
    count = work.own_rows(name)
    for node in zeros[1:]:
        ids = spread_where_needed(work, node, set(zeros), ids, count)
        for source in node.all_input_nodes:
            if source in component.members and source not in zeros:
                with work.graph.inserting_before(node):  # a value for each row, such as a mask
                    rows = work.call(aten.index_select.default, source, 0, ids)
                node.replace_input_with(source, rows)
    inside = set(full)
    sources = dict.fromkeys(s for node in full for s in node.all_input_nodes if s not in inside)
    gradients = [node for node in sources if node in zeros]

    def call(update: Node, shards: list[Node], others: list[Node]) -> Node:
        return work.call(update_in_blocks, update, ids, gradients, shards, others, count)

    _put_in_function(work, component, full, gradients, call)


def _put_in_function(
    work: Rewriting,
    component: Component,
    full: list[Node],
    gradients: list[Node],
    call: Callable[[Node, list[Node], list[Node]], Node],
) -> None:
    """Replace an update by the call of a function of its gradients, its state, and other values.

    Args:
        work: the rewriting.
        component: that the update is of.
        full: its operations.
        gradients: what the function is given first.
        call: makes the node that calls it, of the function, the state and the other values.
    """
    inside = set(full)
    outside = list(
        dict.fromkeys(s for node in full for s in node.all_input_nodes if s not in inside)
    )
    shards = [node for node in outside if node in component.members and node not in gradients]
    others = [node for node in outside if node not in component.members and node not in gradients]
    created = [node for node in full if any(user.op == "output" for user in node.users)]
    body = Graph()
    copies = {node: body.placeholder(node.name) for node in (*gradients, *shards, *others)}
    for node in full:
        copies[node] = body.node_copy(node, lambda source: copies[source])
    body.output(tuple(copies[node] for node in created))
    module = work.step.graph_module
    attribute = f"update_{sum(name.startswith('update_') for name, _ in module.named_children())}"
    module.add_submodule(attribute, GraphModule(torch.nn.Module(), body))
    with work.graph.inserting_after(full[-1]):
        update = work.graph.get_attr(attribute)
    with work.graph.inserting_after(update):
        made = call(update, shards, others)
    with work.graph.inserting_after(made):
        for index, node in reversed(list(enumerate(created))):
            value = work.graph.call_function(operator.getitem, (made, index))
            value.meta.update(node.meta)
            node.replace_all_uses_with(value, delete_user_cb=lambda user: user.op == "output")
    for node in reversed(full):
        work.graph.erase_node(node)
