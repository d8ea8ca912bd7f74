"""Top-k: the largest elements of each block, with their places."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from parallax.strategy.encoders import BlockEncoder, Option


class TopK(BlockEncoder):
    """The ``ratio`` of each block's elements with the largest magnitude; 6 bytes each.

    Of a block of n elements k = ⌈ratio · n⌉ travel, each as a float32 and a place of 2 bytes. All
    others are kept as residual until they have grown (Lin, Han, Mao, Wang, Dally: Deep gradient
    compression, 2018, who choose among a whole gradient: blocks need no search for a threshold, and
    places in them have half the bytes). Among equal magnitudes the first are taken. NaN and
    infinity come first, so up to k of them stay what they are.

    Options: ``ratio`` (0.01), ``block`` (1024).
    """

    name = "topk"
    options = {"ratio": Option(0.01, 1e-4, 1.0), "block": Option(1024, 64, 1 << 15, step=1)}

    @property
    def block(self) -> int:
        return int(self.values["block"])

    @property
    def kept(self) -> int:
        """Elements of a block that travel."""
        # A product such as 0.07 * 100 may be a little above the whole number that it stands for.
        return max(math.ceil(round(self.values["ratio"] * self.block, 6)), 1)

    @property
    def fields(self) -> tuple[tuple[torch.dtype, int], ...]:
        return ((torch.float32, self.kept), (torch.int16, self.kept))

    def encode(self, values: torch.Tensor, fields: Sequence[torch.Tensor]) -> None:
        kept, places = fields
        # Bits of a magnitude are in the order of magnitudes, NaN last. With the place behind them
        # no two are equal, so the choice is the same on any machine.
        bits = values.to(torch.float32).abs().view(torch.int32).to(torch.int64)
        order = torch.arange(self.block - 1, -1, -1, device=values.device)
        chosen = bits.mul_(self.block).add_(order).topk(self.kept, 1, sorted=False).indices
        places.copy_(chosen)
        kept.copy_(values.gather(1, chosen))

    def decode(self, fields: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        kept, places = fields
        out.zero_().scatter_(1, places.to(torch.int64), kept.to(out.dtype))


ENCODER = TopK
