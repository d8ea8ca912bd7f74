"""1-bit SGD: the sign of each element, and what the two signs stand for in each block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallax.strategy.encoders import BlockEncoder, Option

BITS = 8


class OneBit(BlockEncoder):
    """Each element as one bit; 1/8 byte an element, and 8 for each block.

    The bit says whether an element is at least 0. It is decoded as the mean of the block's elements
    that are, or of those that are not, which is what loses least; the loss is kept as a residual
    and added to the next gradient (Seide, Fu, Droppo, Li, Yu: 1-bit stochastic gradient descent,
    2014, who take a column of the weight matrix for a block). Residuals are kept where gradients
    are encoded and where their sums are, as there. In a block with infinity the elements of its
    sign become infinite and all others NaN; in one with NaN all become NaN.

    Options: ``block``, elements with the same two means (1024).
    """

    name = "onebit"
    options = {"block": Option(1024, 64, 1 << 16, step=BITS)}

    @property
    def block(self) -> int:
        return int(self.values["block"])

    @property
    def fields(self) -> tuple[tuple[torch.dtype, int], ...]:
        return ((torch.float32, 2), (torch.uint8, self.block // BITS))

    def encode(self, values: torch.Tensor, fields: Sequence[torch.Tensor]) -> None:
        means, bits = fields
        # As floats at once: by way of bools it takes ten times as long.
        signs = torch.ge(values, 0.0, out=torch.empty_like(values, dtype=torch.float32))
        above = signs.sum(1)
        torch.div(values.clamp(min=0.0).sum(1), above.clamp(min=1.0), out=means[:, 0])
        below = (self.block - above).clamp_(min=1.0)
        torch.div(values.clamp(max=0.0).sum(1), below, out=means[:, 1])
        weights = 2.0 ** torch.arange(BITS, dtype=signs.dtype, device=values.device)
        bits.copy_(torch.mv(signs.view(-1, BITS), weights).view(bits.shape))

    def decode(self, fields: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        means, bits = fields
        table = torch.arange(1 << BITS, device=out.device).view(-1, 1)
        table = (table >> torch.arange(BITS, device=out.device)) & 1
        places = bits.reshape(-1).to(torch.int32)
        torch.index_select(table.to(out.dtype), 0, places, out=out.view(-1, BITS))
        above, below = means[:, :1].to(out.dtype), means[:, 1:].to(out.dtype)
        out.mul_(above - below).add_(below)


ENCODER = OneBit
