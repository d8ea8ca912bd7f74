"""How many elements tensors of a captured graph have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

Number = Any
"""A number, or an expression over sizes of the batch and of selections."""


def how_many(node: Node) -> Number | None:
    """How many elements a tensor has; None for what is none."""
    value = node.meta.get("val")
    return product(value.shape) if isinstance(value, torch.Tensor) else None


def product(sizes: Iterable[int | torch.SymInt]) -> Number:
    """All sizes, multiplied."""
    whole: Number = 1
    for size in sizes:
        whole = whole * expression(size)
    return whole


def expression(size: int | torch.SymInt) -> Number:
    """A size as it follows from others; a number if it does not."""
    if isinstance(size, torch.SymInt):
        return int(size.node.expr) if size.node.expr.is_number else size.node.expr
    return size
