"""Updates of several variables by one kernel each: PyTorch's fused optimizers.

A kernel reads and writes every number once, where the operations that an optimizer is made of go
through memory four times (SGD with momentum) to ten times (Adam).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("parallax", "FRAGMENT")
_LIBRARY.define(
    "sgd_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] buffers, float rate, "
    "float decay, float momentum, float dampening, bool nesterov) -> ()"
)
_LIBRARY.define(
    "adam_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] means, Tensor(c!)[] squares, "
    "float[] steps, float rate, float beta1, float beta2, float decay, float tiny, "
    "bool decoupled) -> ()"
)
# With what changes from step to step on the device, in float64: a recorded call reads it there.
_LIBRARY.define(
    "sgd_by_tensors_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] buffers, "
    "Tensor rate, float decay, float momentum, float dampening, bool nesterov) -> ()"
)
_LIBRARY.define(
    "adam_by_tensors_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] means, "
    "Tensor(c!)[] squares, Tensor[] steps, Tensor rate, float beta1, float beta2, float decay, "
    "float tiny, bool decoupled) -> ()"
)


def sgd(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    rate: float | torch.Tensor,
    decay: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
) -> None:
    """Steps of ``torch.optim.SGD``, in place.

    Args:
        parameters, gradients: equally many, of one type.
        buffers: of the momentum, as many; none without.
        rate: the learning rate.
        decay: of the weights, part of the gradient.
        momentum: what remains of a buffer.
        dampening: what is not added to it of the gradient.
        nesterov: whether the gradient counts once more.
    """
    columns = [parameters, gradients, *([buffers] if buffers else [])]
    rate = _rate(rate)
    with _Aligned(columns, changed=(0, 2)) as (own, given, *momenta):
        torch._fused_sgd_(
            own,
            given,
            momenta[0] if momenta else [],
            weight_decay=decay,
            momentum=momentum,
            lr=rate,
            dampening=dampening,
            nesterov=nesterov,
            maximize=False,
            is_first_step=False,
        )


def adam(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    means: Sequence[torch.Tensor],
    squares: Sequence[torch.Tensor],
    steps: Sequence[float] | Sequence[torch.Tensor],
    rate: float | torch.Tensor,
    beta1: float,
    beta2: float,
    decay: float,
    tiny: float,
    decoupled: bool,
) -> None:
    """Steps of ``torch.optim.Adam``, or of ``AdamW`` where the decay is ``decoupled``, in place.

    Args:
        parameters, gradients, means, squares: equally many, of one type.
        steps: of each, counted from one, this one included.
        rate: the learning rate.
        beta1, beta2: what remains of the means and of the means of squares.
        decay: of the weights.
        tiny: added to roots.
        decoupled: weights decay by themselves, not through the gradient.
    """
    counts = _counts(steps, parameters[0].device)
    rate = _rate(rate)
    update: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    columns = [parameters, gradients, means, squares]
    with _Aligned(columns, changed=(0, 2, 3)) as (own, given, first, second):
        update(
            own,
            given,
            first,
            second,
            [],
            counts,
            lr=rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=tiny,
            amsgrad=False,
            maximize=False,
        )


def _rate(rate: float | torch.Tensor) -> float | torch.Tensor:
    """A learning rate as the kernels want it: those on CUDA read it in float32."""
    if isinstance(rate, torch.Tensor) and rate.device.type == "cuda":
        return rate.float()
    return rate


def _counts(
    steps: Sequence[float] | Sequence[torch.Tensor], device: torch.device
) -> Sequence[torch.Tensor]:
    """Numbers of steps as the kernels want them."""
    if isinstance(steps[0], torch.Tensor):
        return torch.stack(list(steps)).float().unbind()  # type: ignore[arg-type]
    tensors = {step: torch.tensor(step, dtype=torch.float32, device=device) for step in set(steps)}
    return [tensors[step] for step in steps]


class _Aligned:
    """Tensors as the kernels want them: those of one variable with their numbers in one order.

    What lies otherwise is copied, and what the kernel changes of it is copied back.
    """

    def __init__(self, columns: Sequence[Sequence[torch.Tensor]], changed: Sequence[int]) -> None:
        self._columns = [list(column) for column in columns]
        self._changed = changed
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> list[list[torch.Tensor]]:
        for row, tensors in enumerate(zip(*self._columns, strict=True)):
            if all(tensor.is_contiguous() for tensor in tensors) or _lie_alike(tensors):
                continue
            for number, tensor in enumerate(tensors):
                if tensor.is_contiguous():
                    continue
                self._columns[number][row] = copy = tensor.contiguous()
                if number in self._changed:
                    self._back.append((tensor, copy))
        return self._columns

    def __exit__(self, *error: object) -> None:
        for tensor, copy in self._back:
            tensor.copy_(copy)


def _lie_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all fill the same memory in the same order, if not the usual one."""
    strides = tensors[0].stride()
    if any(tensor.stride() != strides for tensor in tensors):
        return False
    sizes = sorted(zip(strides, tensors[0].shape, strict=True))
    whole = 1
    for stride, size in sizes:
        if size != 1 and stride != whole:
            return False
        whole *= size
    return whole == math.prod(tensors[0].shape)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("sgd_", sgd, _key)
    _LIBRARY.impl("adam_", adam, _key)
    _LIBRARY.impl("sgd_by_tensors_", sgd, _key)
    _LIBRARY.impl("adam_by_tensors_", adam, _key)

for _name in ("sgd_", "adam_", "sgd_by_tensors_", "adam_by_tensors_"):
    torch.library.register_fake(f"parallax::{_name}", lambda *arguments: None, lib=_LIBRARY)

SGD: Any = torch.ops.parallax.sgd_.default
ADAM: Any = torch.ops.parallax.adam_.default
SGD_BY_TENSORS: Any = torch.ops.parallax.sgd_by_tensors_.default
ADAM_BY_TENSORS: Any = torch.ops.parallax.adam_by_tensors_.default
UPDATES = (SGD, ADAM)
