"""Words that capture leaves in the graph for rewriting to find."""

from __future__ import annotations

import torch

RNG_STATE_BYTES = 5056


@torch.library.custom_op("parallax::gradient", mutates_args=())
def gradient(value: torch.Tensor, name: str, assigned: bool = False) -> torch.Tensor:
    """The gradient of variable ``name`` as backward hands it to whatever comes next; or what the
    step has assigned to its ``.grad``, which may have been aggregated already."""
    return value.clone()


@gradient.register_fake
def _(value: torch.Tensor, name: str, assigned: bool = False) -> torch.Tensor:
    if value.layout is not torch.sparse_coo:
        return value.clone()
    # One stored row: a coalesced gradient whose emptiness no optimizer can ask about.
    rows = torch.empty((1, *value.shape[1:]), dtype=value.dtype, device=value.device)
    ids = torch.empty((1, 1), dtype=torch.int64, device=value.device)
    return torch.sparse_coo_tensor(
        ids, rows, value.shape, is_coalesced=True, check_invariants=False
    )


@torch.library.custom_op("parallax::rng_state", mutates_args=())
def rng_state() -> torch.Tensor:
    """The state of the default generator, for activation checkpointing to replay masks."""
    return torch.default_generator.get_state()


@rng_state.register_fake
def _() -> torch.Tensor:
    return torch.empty(RNG_STATE_BYTES, dtype=torch.uint8)


@torch.library.custom_op("parallax::set_rng_state", mutates_args=())
def set_rng_state(state: torch.Tensor) -> None:
    """Put the default generator back."""
    torch.default_generator.set_state(state)


@set_rng_state.register_fake
def _(state: torch.Tensor) -> None:
    return None


GRADIENT = torch.ops.parallax.gradient.default
RNG_STATE = torch.ops.parallax.rng_state.default
SET_RNG_STATE = torch.ops.parallax.set_rng_state.default
