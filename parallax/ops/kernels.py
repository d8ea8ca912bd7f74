"""Kernels that a graph calls directly, and by which name a compiler may call them."""

from __future__ import annotations

from typing import Any

import torch

from parallax.ops.resources import fixed_sizes

_LIBRARY = torch.library.Library("parallax", "FRAGMENT")
_LIBRARY.define("onednn_product(Tensor left, Tensor right, Tensor? bias) -> Tensor")


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


_LIBRARY.impl("onednn_product", onednn_product, "CPU")
torch.library.register_fake("parallax::onednn_product", _onednn_product_sizes, lib=_LIBRARY)

OPERATIONS: dict[Any, Any] = {onednn_product: torch.ops.parallax.onednn_product.default}
"""By function, the same as an operation that a compiler leaves as it is."""
