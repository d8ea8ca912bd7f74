"""Update a large shard block by block, with the gradient of one block at a time.

An optimizer that changes every row in every step (Adam) needs a gradient for all rows, although a
step looks up few. Instead of a gradient as large as the shard, and temporaries as large, the
update's operations are put in a function of their own that runs on blocks of rows: what is needed
besides the state is one block, which stays in the cache from one operation to the next.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule, Node

from parallax.graph.layout import Component
from parallax.graph.stages import is_write
from parallax.ops.resources import update_in_blocks
from parallax.rewrite.context import Rewriting
from parallax.rewrite.touched_rows import ignores_zeros, keeps_zero, spread_where_needed


def can_update_in_blocks(work: Rewriting, name: str, marks: list[Node]) -> bool:
    """Whether the update of ``name`` may run block by block; asked before it is rewritten."""
    if work.analysis.variables[name].lazy or len(marks) != 1:
        return False
    return _split(work, work.analysis.components[name], marks[0]) is not None


def split_updates(work: Rewriting) -> None:
    """Rewrite the updates of row-sharded variables whose gradient is needed in all rows."""
    for number, (name, (ids, rows)) in enumerate(work.blocked.items()):
        component = work.analysis.components[name]
        found = _split(work, component, rows)
        assert found is not None
        zeros, full = found
        _outline(work, name, component, number, ids, zeros, full)


def _split(
    work: Rewriting, component: Component, gradient: Node
) -> tuple[list[Node], list[Node]] | None:
    """Members that are zero in untouched rows, and those that need all rows; None if mixed."""
    zeros: dict[Node, None] = {gradient: None}
    full: dict[Node, None] = {}
    if component.sized:
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


def _outline(
    work: Rewriting,
    name: str,
    component: Component,
    number: int,
    ids: Node,
    zeros: list[Node],
    full: list[Node],
) -> None:
    count = work.own_rows(name)
    for node in zeros[1:]:
        ids = spread_where_needed(work, node, set(zeros), ids, count)
    inside = set(full)
    outside = list(
        dict.fromkeys(s for node in full for s in node.all_input_nodes if s not in inside)
    )
    gradients = [node for node in outside if node in zeros]
    shards = [node for node in outside if node in component.members and node not in zeros]
    others = [node for node in outside if node not in component.members]
    created = [node for node in full if any(user.op == "output" for user in node.users)]
    body = Graph()
    copies = {node: body.placeholder(node.name) for node in (*gradients, *shards, *others)}
    for node in full:
        copies[node] = body.node_copy(node, lambda source: copies[source])
    body.output(tuple(copies[node] for node in created))
    module = work.step.graph_module
    attribute = f"update_{number}"
    module.add_submodule(attribute, GraphModule(torch.nn.Module(), body))
    with work.graph.inserting_after(full[-1]):
        update = work.graph.get_attr(attribute)
    with work.graph.inserting_after(update):
        call = work.call(update_in_blocks, update, ids, gradients, shards, others, count)
    with work.graph.inserting_after(call):
        for index, node in reversed(list(enumerate(created))):
            value = work.graph.call_function(operator.getitem, (call, index))
            value.meta.update(node.meta)
            node.replace_all_uses_with(value, delete_user_cb=lambda user: user.op == "output")
    for node in reversed(full):
        work.graph.erase_node(node)
