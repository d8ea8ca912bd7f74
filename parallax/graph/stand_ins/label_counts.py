"""``torch.bincount`` of labels, of which a batch decides how many numbers it gives.

Where the step says how many it expects, and the batch that is captured has no label beyond them,
they are a sum over its rows, of a size that the graph knows. Later labels beyond them are left out.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from parallax.graph.common.replaced import replaced


def label_counts_by_rows() -> AbstractContextManager[None]:
    """Add up ones, or weights, by label."""
    original = torch.bincount

    def bincount(
        input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
    ) -> torch.Tensor:
        result = original(input, weights, minlength)
        size = _decided(result.shape[0])
        if not minlength or size is None or size > minlength:
            return result
        is_expected = input < minlength
        each = is_expected if weights is None else torch.where(is_expected, weights, 0)
        zeros = torch.zeros(minlength, dtype=_type(weights), device=input.device)
        return zeros.index_add(0, input.clamp(max=minlength - 1), each.to(zeros.dtype))

    return replaced((torch, "bincount", bincount), (torch.Tensor, "bincount", bincount))


def _type(weights: torch.Tensor | None) -> torch.dtype:
    """That of the numbers, which the stand-in for them does not have in torch 2.11."""
    if weights is None:
        return torch.int64
    return torch.float32 if weights.dtype is torch.float32 else torch.float64


def _decided(size: Any) -> int | None:
    """A size of the batch that is captured, if it follows from it alone."""
    if not isinstance(size, torch.SymInt):
        return None
    value_of = getattr(size.node.shape_env, "value_of", None)
    return None if value_of is None else value_of(size.node.expr)
