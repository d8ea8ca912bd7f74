"""Lengths of sequences that lie in one padded tensor, looked at when the step runs."""

from __future__ import annotations

import torch

from parallax.errors import BatchError


@torch.library.custom_op("parallax::checked_lengths", mutates_args=())
def checked_lengths(lengths: torch.Tensor, steps: int) -> torch.Tensor:
    """The lengths, [batch], if they can be those of sequences of at most ``steps`` steps.

    Raises:
        BatchError: if one is below one, or above ``steps``.
    """
    least, most = (int(lengths.min()), int(lengths.max())) if lengths.numel() else (1, 1)
    if least < 1 or most > steps:
        raise BatchError(
            f"Sequences are packed with lengths from {least} to {most}, "
            f"and each must be between 1 and {steps}, the steps of the padded tensor.",
            hint="see that the lengths belong to this tensor, and leave empty sequences out.",
        )
    return lengths.clone()


@checked_lengths.register_fake
def _(lengths: torch.Tensor, steps: int) -> torch.Tensor:
    return torch.empty_like(lengths)


@torch.library.custom_op("parallax::if_full", mutates_args=())
def if_full(places: torch.Tensor, lengths: torch.Tensor, steps: int) -> torch.Tensor:
    """The places, if one of the lengths, [batch], is ``steps``, so that no step is padding alone.

    Raises:
        BatchError: if none is.
    """
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest != steps:
        raise BatchError(
            f"The longest sequence of this worker's batch has {longest} of {steps} steps. "
            "pad_packed_sequence would drop the others, and a captured step does not.",
            hint="pass total_length=x.shape[1] (the steps of the tensor that was packed) to "
            "pad_packed_sequence, or cut the batch to its longest sequence before the step.",
        )
    return places.clone()


@if_full.register_fake
def _(places: torch.Tensor, lengths: torch.Tensor, steps: int) -> torch.Tensor:
    return torch.empty_like(places)
