"""Kernels that a graph calls directly, and by which name a compiler may call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallax.ops.resources import fixed_sizes

_LIBRARY = torch.library.Library("parallax", "FRAGMENT")
OPERATIONS: dict[Any, Any] = {}
"""By function, the same as an operation that a compiler leaves as it is."""


def publish(function: Callable[..., Any], schema: str, sizes: Callable[..., Any]) -> None:
    """Make an operation of a function, under its own name.

    Args:
        function: that computes on the CPU.
        schema: its arguments and results.
        sizes: makes empty results of the right shapes.
    """
    name = function.__name__
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(f"parallax::{name}", sizes, lib=_LIBRARY)
    OPERATIONS[function] = getattr(torch.ops.parallax, name).default


@fixed_sizes
def onednn_product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``left @ right.t()`` plus ``bias``, by oneDNN."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return result


def _onednn_product_sizes(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return left.new_empty(left.shape[0], right.shape[0])


publish(
    onednn_product, "(Tensor left, Tensor right, Tensor? bias) -> Tensor", _onednn_product_sizes
)
