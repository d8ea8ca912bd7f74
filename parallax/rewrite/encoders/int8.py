"""Gradients as 8-bit integers with a scale for each block: about a quarter of the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallax.rewrite.encoders.scales import largest_finite
from parallax.strategy.encoders import BlockEncoder, Option

LEVELS = 126
INFINITE, NAN = LEVELS + 1, -(LEVELS + 2)


class Int8(BlockEncoder):
    """Each element as one of 253 levels; 1 byte an element, and 4 for each block.

    Levels are even steps up to the largest finite element of the block, to either side: rounding
    loses at most 1/252 of that element, which is kept as a residual. The other codes stand for
    infinity, minus infinity and NaN.

    Options: ``block``, elements that have one scale (256).
    """

    name = "int8"
    options = {"block": Option(256, 8, 1 << 16, step=8)}

    @property
    def block(self) -> int:
        return int(self.values["block"])

    @property
    def fields(self) -> tuple[tuple[torch.dtype, int], ...]:
        return ((torch.float32, 1), (torch.int8, self.block))

    def encode(self, values: torch.Tensor, fields: Sequence[torch.Tensor]) -> None:
        scale, codes = fields
        # At least so large that its reciprocal is finite.
        torch.div(largest_finite(values).to(torch.float32).clamp_(min=1e-35), LEVELS, out=scale)
        levels = (values * scale.reciprocal()).round_()
        codes.copy_(levels.nan_to_num_(NAN, INFINITE, -INFINITE))

    def decode(self, fields: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        scale, codes = fields
        out.copy_(codes)
        # 1 for levels, 0 for the codes of infinity and NaN for that of NaN: branches would wait for
        # a device, and masks take four times as long.
        valid = out.abs().neg_().add_(INFINITE).clamp_(max=1.0).sqrt_()
        out.div_(valid).mul_(scale)


ENCODER = Int8
