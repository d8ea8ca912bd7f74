"""What operations of a graph do to memory and to random numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten: Any = torch.ops.aten

_OF_NUMBERS = {operator.add.__module__, math.floor.__module__, torch.sym_max.__module__}
BATCH_NORMS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default}
"""What normalises over a batch, with the same arguments and first results. Their schemas do not
tell that they change the running mean and variance."""


def add_call(graph: Graph, target: Any, *args: Any, **named: Any) -> Node:
    """A call at the graph's insertion point, with the example value that it gives."""
    values, others = map_arg((args, named), lambda source: source.meta["val"])
    value = target(*values, **others)
    node: Node = graph.call_function(target, args, named)
    node.meta["val"] = value
    return node


def ancestors(
    nodes: Iterable[Node], writes: Mapping[Node, Iterable[Node]] = MappingProxyType({})
) -> set[Node]:
    """What nodes follow from, with themselves.

    Args:
        nodes: of a graph.
        writes: by tensor, what changes it in place, from which it follows, too.
    """
    found: set[Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue += [*node.all_input_nodes, *writes.get(node, ())]
    return found


def note_detached(node: Node) -> None:
    """Remember of what uses a detached tensor that no gradient flows through this input."""
    for user in node.users:
        places = {place for place, one in enumerate(_inputs(user)) if one is node}
        user.meta["detached"] = frozenset(places | user.meta.get("detached", set()))


def with_gradient(node: Node) -> set[Node]:
    """The inputs of a node which are not detached there."""
    detached = node.meta.get("detached", ())
    return {one for place, one in enumerate(_inputs(node)) if place not in detached}


def _inputs(node: Node) -> list[Node]:
    """Those of a node, as often and in the order in which it has them."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def has_one_element(node: Any) -> bool:
    """Whether a node is a tensor that has one element for all batches."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    count = value.numel() if isinstance(value, torch.Tensor) else None
    return isinstance(count, int) and count == 1


def gradient_of(node: Node) -> tuple[int, str] | None:
    """The operation of whose gradient something is computed: PyTorch's number of it, and its name
    in small letters."""
    found = node.meta.get("backward_of")
    return None if found is None else (found[0], found[1].lower())


def is_call(node: Node, number: int, name: str) -> bool:
    """Whether a node is the operation that :func:`gradient_of` tells of."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.meta.get("forward") != number:
        return False
    # What is not differentiated has the number of an operation before it.
    return name.startswith(schema.name.split("::")[-1].removesuffix("_forward").replace("_", ""))


def is_view(node: Node) -> bool:
    """Whether the result of a node may share memory with its input."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True
    return any(result.alias_info is not None for result in schema.returns)


def is_view_of_torch(node: Node) -> bool:
    """The same of PyTorch's operations: not what Python does, such as taking one of several."""
    return isinstance(node.target, torch._ops.OpOverload) and is_view(node)


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_write(node: Node) -> bool:
    """Whether a node changes one of its arguments in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def must_stay(node: Node) -> bool:
    """Whether it matters what runs before a node: random numbers, changes in place, exchanges."""
    if not isinstance(node.target, torch._ops.OpOverload):
        # Numbers of Python's, such as sizes, are computed by these.
        return getattr(node.target, "__module__", "") not in _OF_NUMBERS
    return is_write(node) or is_random(node)


def written_inputs(node: Node) -> list[Node]:
    """The inputs that an operation changes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    if node.target in BATCH_NORMS:
        return [one for one in node.args[3:5] if isinstance(one, Node) and node.args[5]]
    found = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else [value]
        found += [one for one in values if isinstance(one, Node)]
    return found


def returned_input(node: Node) -> Node | None:
    """The input that an operation changes and returns, as ``add_`` does."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns or node.target in BATCH_NORMS:
        return None
    alias = schema.returns[0].alias_info
    written = written_inputs(node) if alias is not None and alias.is_write else []
    return written[0] if written else None
