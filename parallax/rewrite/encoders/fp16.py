"""Gradients as float16 with a scale for each block: half the bytes of float32, 11 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallax.rewrite.encoders.scales import largest_finite
from parallax.strategy.encoders import BlockEncoder, Option

# The largest element of a block is brought to between this and twice this; float16 ends at 65,504.
TOP = 2.0**14


class Float16(BlockEncoder):
    """Each element as float16; 2 bytes an element, and 4 for each block of 1,024.

    Gradients are often below 6·10⁻⁵, where float16 loses precision, and may be above 65,504, where
    it ends. So each block is multiplied by a power of two, which is exact, that brings its largest
    finite element to between 2¹⁴ and 2¹⁵: every finite element stays finite, and loses at most
    2⁻¹¹ of itself, or 2⁻³⁹ of the block's largest. NaN and infinity stay what they are. Residuals
    are kept only with ``feedback=1``. The scale is a float32: a float64 gradient above its range
    becomes infinite.
    """

    name = "fp16"
    options = {"feedback": Option(0, 0, 1, step=1)}
    block = 1024
    fields = ((torch.float32, 1), (torch.float16, block))

    @property
    def feedback(self) -> bool:
        return bool(self.values["feedback"])

    def encode(self, values: torch.Tensor, fields: Sequence[torch.Tensor]) -> None:
        scale, halves = fields
        # The exponent bits alone are the power of two just below the largest element. Its
        # reciprocal, times TOP, must be a float32 as well.
        peak = largest_finite(values).to(torch.float32)
        peak.view(torch.int32).bitwise_and_(0x7F800000)
        torch.div(peak.clamp_(min=2.0**-100), TOP, out=scale)
        halves.copy_(values * scale.reciprocal())

    def decode(self, fields: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        scale, halves = fields
        out.copy_(halves).mul_(scale)


ENCODER = Float16
