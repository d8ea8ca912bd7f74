"""Normalisation over the batches of all workers, as operations of the rewritten graph."""

from __future__ import annotations

from typing import Any

import torch

from parallax.ops.resources import effect, fixed_sizes


def kind_of_statistics(kind: torch.dtype) -> torch.dtype:
    """What the statistics of a batch of a type are computed in."""
    return torch.float32 if kind.itemsize < 4 else kind


@effect
@fixed_sizes
def batch_statistics(norms: Any, values: torch.Tensor, epsilon: float) -> list[torch.Tensor]:
    """Of a batch [rows, channels, ...] of all workers, by channel: mean, variance, the inverse of
    the standard deviation, and the variance that running statistics are made of.

    Args:
        norms: the runtime object of a :class:`parallax.ops.specs.BatchNormsSpec`.
        values: this worker's part.
        epsilon: added to the variance.
    """
    found: list[torch.Tensor] = norms.statistics(values, epsilon)
    return found


@fixed_sizes
def normalized(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """A batch [rows, channels, ...] with this mean and variance in place of its own; half types are
    computed in float32's precision."""
    result: torch.Tensor = torch.ops.aten.native_batch_norm(
        values.to(mean.dtype),
        None if weight is None else weight.to(mean.dtype),
        None if bias is None else bias.to(mean.dtype),
        *(mean, variance, False, 0.0, epsilon),
    )[0]
    return result.to(values.dtype)


@effect
@fixed_sizes
def batch_gradients(
    norms: Any,
    gradient: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: list[torch.Tensor],
    epsilon: float,
) -> list[torch.Tensor]:
    """Gradients of the batch (this worker's part), and of weight and bias (its contribution).

    Args:
        norms: the runtime object of a :class:`parallax.ops.specs.BatchNormsSpec`.
        gradient: of the normalised batch.
        values: the batch.
        weight: of each channel; None where all are 1.
        statistics: what :func:`batch_statistics` gave.
        epsilon: as there.
    """
    found: list[torch.Tensor] = norms.gradients(gradient, values, weight, statistics, epsilon)
    return found


__all__ = ["batch_gradients", "batch_statistics", "kind_of_statistics", "normalized"]
