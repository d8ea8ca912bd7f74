"""What an operation of a graph changes in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

aten: Any = torch.ops.aten


def written_inputs(node: Node) -> list[Node]:
    """The inputs that an operation changes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    if node.target is aten.native_batch_norm.default:
        # Its schema does not tell of the running mean and variance.
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
    if schema is None or not schema.returns or node.target is aten.native_batch_norm.default:
        return None
    alias = schema.returns[0].alias_info
    written = written_inputs(node) if alias is not None and alias.is_write else []
    return written[0] if written else None
