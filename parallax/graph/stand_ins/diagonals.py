"""``trace``, ``diag`` and ``fill_diagonal_``, which ask for sizes as numbers, written as views."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from parallax.graph.common.replaced import replaced


def diagonals_of_any_size() -> AbstractContextManager[None]:
    """Compute them of matrices whose sizes are symbols."""
    kind: Any = torch.Tensor
    original: Callable[..., torch.Tensor] = kind.fill_diagonal_

    def diag(input: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
        if input.dim() == 1:
            return torch.diag_embed(input, diagonal)
        if input.dim() != 2:
            raise RuntimeError(f"diag(): supports 1D or 2D tensors, got {input.dim()}D")
        return input.diagonal(diagonal).clone()

    def trace(input: torch.Tensor) -> torch.Tensor:
        if input.dim() != 2:
            raise RuntimeError(f"trace: expected a matrix, but got a tensor with dim {input.dim()}")
        return input.diagonal().sum()

    def fill_diagonal_(self: torch.Tensor, fill_value: float, wrap: bool = False) -> torch.Tensor:
        if self.dim() != 2 or wrap:
            return original(self, fill_value, wrap)
        self.diagonal().fill_(fill_value)
        return self

    methods = [(kind, "fill_diagonal_", fill_diagonal_)]
    both = [(owner, one.__name__, one) for owner in (kind, torch) for one in (diag, trace)]
    return replaced(*methods, *both)
