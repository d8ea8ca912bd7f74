"""Which gradients the graph does more with than to read them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.common.aliases import memory_of, writes_to
from parallax.ops.resources import wait_gradients
from parallax.rewrite.context import Rewriting

aten: Any = torch.ops.aten


def note_changed_gradients(work: Rewriting) -> None:
    """Tell the runtime which sums must be this worker's own: others may read the same memory."""
    for node in work.graph.nodes:
        if node.target is wait_gradients:
            found = [user for user in node.users if user.target is operator.getitem]
            written = (one for one in found if next(writes_to(one), None) is not None)
            changed = tuple(sorted(int(str(one.args[1])) for one in written))
            if changed:
                node.args = (node.args[0], changed)


def copy_given_away(work: Rewriting) -> None:
    """Copy sums that are among the graph's results: where they lie, those of the next step will."""
    output = next(node for node in reversed(work.graph.nodes) if node.op == "output")
    values: Any = output.args[0]
    copies: dict[Node, Node] = {}
    for value in values:
        if isinstance(value, Node) and value not in copies and _is_sum(memory_of(value)):
            with work.graph.inserting_before(output):
                copies[value] = work.call(aten.clone.default, value)
            copies[value].meta["val"] = value.meta.get("val")
    if copies:
        output.args = (type(values)(copies.get(value, value) for value in values),)


def _is_sum(memory: Node) -> bool:
    given = memory.args[0] if memory.target is operator.getitem else None
    return isinstance(given, Node) and given.target is wait_gradients
