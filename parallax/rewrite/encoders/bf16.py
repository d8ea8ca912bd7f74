"""Gradients as bfloat16: half the bytes of float32, the same range, 8 bits of precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallax.strategy.encoders import BlockEncoder, Option


class BFloat16(BlockEncoder):
    """Each element rounded to bfloat16; 2 bytes an element.

    What rounding loses is at most 2⁻⁸ of each element, so residuals are kept only with
    ``feedback=1``. NaN and infinity stay what they are. Rows of tables may travel so as well,
    without blocks and residuals.
    """

    name = "bf16"
    options = {"feedback": Option(0, 0, 1, step=1)}
    cast = torch.bfloat16
    block = 256
    fields = ((torch.bfloat16, block),)

    @property
    def feedback(self) -> bool:
        return bool(self.values["feedback"])

    def encode(self, values: torch.Tensor, fields: Sequence[torch.Tensor]) -> None:
        fields[0].copy_(values)

    def decode(self, fields: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(fields[0])


ENCODER = BFloat16
