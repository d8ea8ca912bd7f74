"""Which tensors of a graph share memory, and what changes it."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from parallax.graph.operations import is_view, written_inputs


def base_of(node: Node) -> Node:
    """The node whose memory a tensor is, or may be, a view of."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def writes_to(base: Node) -> Iterator[Node]:
    """The nodes that change a tensor, or a view of it, in place."""
    aliases = [base]
    for alias in aliases:
        for user in alias.users:
            if alias in written_inputs(user):
                yield user
            if user.op == "call_function" and is_view(user):
                aliases.append(user)
