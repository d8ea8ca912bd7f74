"""Which tensors of a graph share memory, and what changes it."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch.fx import Node

from parallax.graph.common.operations import (
    is_view,
    is_view_of_torch,
    returned_input,
    written_inputs,
)


def base_of(node: Node) -> Node:
    """The node whose memory a tensor is, or may be, a view of."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def uses_of(base: Node) -> Iterator[tuple[Node, Node]]:
    """A tensor, and all that may be views of it, each with every node that takes it."""
    aliases = [base]
    for alias in aliases:
        for user in alias.users:
            yield alias, user
            if user.op == "call_function" and is_view(user):
                aliases.append(user)


def writes_to(base: Node) -> Iterator[Node]:
    """The nodes that change a tensor, or a view of it, in place."""
    return (user for alias, user in uses_of(base) if alias in written_inputs(user))


def known_after(mark: Node) -> Node:
    """The node that computes a gradient; the mark itself if the tensor is changed later on."""
    source = mark.args[0]
    assert isinstance(source, Node)
    base = base_of(source)
    if base.op != "call_function" or any(True for _ in writes_to(base)):
        return mark
    return base


def memory_of(node: Node) -> Node:
    """Where a tensor lies that may be a view, or what an operation in place returned."""
    while node.op == "call_function":
        source = returned_input(node)
        if source is None and is_view(node) and node.all_input_nodes:
            source = node.all_input_nodes[0]
            if node.target is operator.getitem and not is_view_of_torch(source):
                break  # Each of several results has memory of its own.
        if source is None:
            break
        node = source
    return node


def tensor_of(node: Node) -> Node:
    """The tensor that an operation has changed in place and returned; else the node."""
    while (written := returned_input(node)) is not None:
        node = written
    return node
