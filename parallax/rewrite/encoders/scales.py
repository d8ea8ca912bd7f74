"""What encoders that scale blocks share."""

from __future__ import annotations

import torch


def largest_finite(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block among its finite elements: [blocks, 1] of [blocks, n]."""
    return values.abs().nan_to_num_(0.0, 0.0, 0.0).amax(1, keepdim=True)
