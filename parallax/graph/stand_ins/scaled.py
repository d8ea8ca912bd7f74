"""``torch.amp.GradScaler`` in a step that is captured.

Scaling a loss is an operation like others, by a tensor that is state of the run. Unscaling divides
the gradients of all workers and looks whether all are finite; where they are not, the update is
left out (:mod:`parallax.graph.symbols.endings`), on all workers. The scale itself is changed on the
host, after the step, by what was found.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.amp import GradScaler

from parallax.errors import UnsupportedError
from parallax.graph.common.recording import Call, Recording
from parallax.graph.common.replaced import replaced
from parallax.graph.common.user_code import user_line


def scalers_recorded(recording: Recording) -> AbstractContextManager[None]:
    """Let scalers unscale and look at gradients in the graph, and adapt their scale after it."""
    return replaced(
        *((GradScaler, name, function) for name, function in _methods(recording).items())
    )


def _methods(recording: Recording) -> dict[str, Callable[..., Any]]:
    original = {name: getattr(GradScaler, name) for name in ("step", "update")}
    found: dict[tuple[int, int], torch.Tensor] = {}
    stepped: set[tuple[int, int]] = set()

    def unscale_(self: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        key = id(self), id(optimizer)
        if not self.is_enabled():
            return
        if key in found:
            raise RuntimeError(
                "unscale_() is being called after step()."
                if key in stepped
                else "unscale_() has already been called on this optimizer since the last update()."
            )
        found[key] = _unscale(self, optimizer)

    def step(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        key = id(self), id(optimizer)
        if not self.is_enabled():
            return original["step"](self, optimizer, *args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        if key in stepped:
            raise RuntimeError("step() has already been called since the last update().")
        if stepped:
            raise UnsupportedError(
                "A GradScaler steps a second optimizer of the step: each update may be left out.",
                hint="one optimizer with groups of parameters; or bfloat16, which needs no scaler.",
                where=user_line(),
            )
        if key not in found:
            unscale_(self, optimizer)
        stepped.add(key)
        return None if found[key] else optimizer.step(*args, **kwargs)

    def update(self: GradScaler, new_scale: float | torch.Tensor | None = None) -> None:
        if not self.is_enabled():
            return
        own = [key for key in found if key[0] == id(self)]
        if new_scale is None and not own:
            raise AssertionError("No inf checks were recorded prior to update.")
        now = functools.partial(_update, self, original["update"])
        given = (new_scale, *(found.pop(key) for key in own))
        recording.calls.append(Call(now, False, given))
        stepped.difference_update(own)

    return {"unscale_": unscale_, "step": step, "update": update}


def _unscale(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Divide gradients by the scale, and tell whether any of their numbers is not finite."""
    assert scaler._scale is not None
    factor = scaler._scale.double().reciprocal().float()
    largest = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.dtype is torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            if gradient.layout is not torch.strided:
                raise UnsupportedError(
                    "The step's GradScaler unscales a sparse gradient.",
                    hint="use sparse=False for this embedding: its rows travel all the same.",
                )
            largest.append(torch.linalg.vector_norm(gradient.detach(), math.inf))
            gradient.mul_(factor)
    if not largest:
        raise AssertionError("No inf checks were recorded for this optimizer.")
    return ~torch.stack([one.double() for one in largest]).isfinite().all()


def _update(
    scaler: GradScaler,
    update: Callable[..., None],
    new_scale: float | torch.Tensor | None,
    *found: torch.Tensor,
) -> None:
    """Adapt a scale to what one step has found, as ``GradScaler.update`` does."""
    if new_scale is not None:
        update(scaler, new_scale)
        return
    scale, tracker = scaler._check_scale_growth_tracker("update")
    torch._amp_update_scale_(
        scale,
        tracker,
        torch.stack(found).any().float().to(scale.device),
        scaler._growth_factor,
        scaler._backoff_factor,
        scaler._growth_interval,
    )
