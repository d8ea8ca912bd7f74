"""Reductions over shards: partial values from every worker, combined by all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from parallax.ops.specs import CombineSpec, ReductionSpec
from parallax.runtime.comm.world import World


class Combiner:
    """The runtime of one :class:`CombineSpec`: partial reductions, combined by all alike.

    All partial values are gathered (8 bytes each) and combined by every worker in worker order:
    equal results everywhere, and a NaN stays a NaN, which a MAX reduction would drop.
    """

    def __init__(self, spec: CombineSpec, world: World) -> None:
        self.spec = spec
        self.world = world

    def run(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See :func:`parallax.ops.resources.combine`."""
        parts = torch.stack(list(values))
        gathered = torch.empty(
            self.world.size * len(parts), dtype=torch.float64, device=parts.device
        )
        self.world.all_gather(gathered, parts, "norms").wait()
        table = gathered.view(self.world.size, -1)
        return [
            _combined(table[:, i], spec).to(spec.dtype)
            for i, spec in enumerate(self.spec.reductions)
        ]


def _combined(parts: torch.Tensor, spec: ReductionSpec) -> torch.Tensor:
    if spec.kind == "sum":
        return parts.sum()
    if spec.kind == "mean":
        return parts.sum() / spec.elements
    if spec.kind == "amax" or (spec.kind == "norm" and spec.order == math.inf):
        return parts.amax()
    if spec.kind == "amin" or (spec.kind == "norm" and spec.order == -math.inf):
        return parts.amin()
    if spec.order == 0:
        return parts.sum()
    norm: torch.Tensor = torch.linalg.vector_norm(parts, spec.order)
    return norm
