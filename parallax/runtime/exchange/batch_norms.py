"""Normalise over the batches of all workers."""

from __future__ import annotations

from typing import Any

import torch

from parallax.errors import BatchError
from parallax.ops.batch_norms import kind_of_statistics
from parallax.ops.specs import BatchNormsSpec
from parallax.runtime.comm.world import World

aten: Any = torch.ops.aten

# Behind the numbers of the channels of a message.
_ELEMENTS, _ROWS = -2, -1


class BatchNorms:
    """The runtime of one :class:`BatchNormsSpec`: all workers get all others' sums.

    Bytes sent per worker for each layer and pass, of C channels on N workers: 16 (C + 1)(N - 1).
    Means and variances are combined in float64 in the order of workers (Chan, Golub and LeVeque
    1983, equation 2.1), so they are the same everywhere; no sum of squares is taken.
    """

    def __init__(self, spec: BatchNormsSpec, world: World) -> None:
        self.spec = spec
        self.world = world

    def statistics(self, values: torch.Tensor, epsilon: float) -> list[torch.Tensor]:
        """See :func:`parallax.ops.batch_norms.batch_statistics`."""
        kind = kind_of_statistics(values.dtype)
        dimensions = [d for d in range(values.dim()) if d != 1]
        if values.numel():
            variance, mean = torch.var_mean(values.to(kind), dimensions, correction=0)
        else:
            variance = mean = torch.zeros(values.shape[1], dtype=kind, device=values.device)
        parts, counts, _ = self._of_all(values, mean, variance)
        total = counts.sum()
        # A worker that has two knows; the others wait for their device.
        if _elements(values) <= 1 and float(total) <= 1:
            raise BatchError(
                "BatchNorm normalises over all workers' batches, which have one value or none for "
                "each channel.",
                hint="leave out such a batch (drop_last=True), or use GroupNorm.",
            )
        shares = (counts / total).unsqueeze(1)
        means, variances = parts.unbind(1)
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        deviation = (variance + epsilon).rsqrt()
        unbiased = variance * (total / (total - 1))
        return [one.to(kind) for one in (mean, variance, deviation, unbiased)]

    def gradients(
        self,
        gradient: torch.Tensor,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        statistics: list[torch.Tensor],
        epsilon: float,
    ) -> list[torch.Tensor]:
        """See :func:`parallax.ops.batch_norms.batch_gradients`."""
        mean, variance, deviation, _ = statistics
        kind = values.dtype
        gradient, values = gradient.to(mean.dtype), values.to(mean.dtype)
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        # As if mean and variance were constants, which gives the sums along; CUDA asks for what
        # training saves as well.
        if values.numel():
            own, of_weight, of_bias = aten.native_batch_norm_backward(
                gradient, values, scale, mean, variance, mean, deviation, False, epsilon, [True] * 3
            )
        else:  # for which it divides by none
            own = torch.zeros_like(values)
            of_weight = of_bias = torch.zeros_like(mean)
        parts, counts, rows = self._of_all(values, of_weight, of_bias)
        if self.spec.average:
            # Every row weighs the same in the gradient, whichever worker has it.
            parts = parts * (rows / rows[self.world.rank].clamp(min=1)).view(-1, 1, 1)
        by_weight, by_bias = (parts.sum(0) / counts.sum()).to(mean.dtype).unbind(0)
        along = [1, -1, *[1] * (values.dim() - 2)]
        slope = scale * deviation
        of_values = -slope * deviation * by_weight
        constant = -slope * by_bias - of_values * mean
        own = own.add_(constant.view(along)).addcmul_(values, of_values.view(along))
        own_kind = kind if weight is None else weight.dtype
        return [own.to(kind), of_weight.to(own_kind), of_bias.to(own_kind)]

    def _of_all(
        self, values: torch.Tensor, *by_channel: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All workers' numbers [workers, kind, channel], and by worker how many elements a channel
        has, and how many rows."""
        rows, channels = values.shape[:2]
        numbers = torch.cat(by_channel).double()  # which count exactly
        counted = (numbers.new_full((1,), count) for count in (_elements(values), rows))
        sent = torch.cat([numbers, *counted])
        received = sent.new_empty(self.world.size * len(sent))
        self.world.all_gather(received, sent, "batch norms").wait()
        table = received.view(self.world.size, -1)
        parts = table[:, :_ELEMENTS].view(self.world.size, len(by_channel), channels)
        return parts, table[:, _ELEMENTS], table[:, _ROWS]


def _elements(values: torch.Tensor) -> int:
    """How many a channel has."""
    return values.numel() // max(values.shape[1], 1)
