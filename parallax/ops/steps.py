"""What recurrent layers that take one step after another share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch


def order(steps: int, reverse: bool) -> range:
    """Numbers of the steps as a layer takes them."""
    return range(steps - 1, -1, -1) if reverse else range(steps)


def before(output: torch.Tensor, hidden: torch.Tensor, reverse: bool) -> torch.Tensor:
    """What each step was given of the one before it, [time, batch, output]: ``hidden`` first."""
    first = hidden.unsqueeze(0)
    return torch.cat([output[1:], first] if reverse else [first, output[:-1]])


def or_zeros(gradient: torch.Tensor | None, of: torch.Tensor) -> torch.Tensor:
    """The gradient of something, also where there is none."""
    return torch.zeros_like(of) if gradient is None else gradient


def operations(
    sequence: Sequence[int], weight: Sequence[int], projection: Sequence[int] | None = None
) -> int:
    """Of the products along a chain of steps, forward or backward alike.

    Args:
        sequence: its sizes, [time, batch, ...].
        weight, projection: sizes of what each step multiplies with.
    """
    return 2 * sequence[0] * sequence[1] * (math.prod(weight) + math.prod(projection or [0]))


def product(weight: torch.Tensor, onednn: bool) -> Callable[..., torch.Tensor]:
    """What computes ``x @ weight.t()``, plus another matrix unless that is None, again and again.

    oneDNN is given the weight in an order of its own, once for all products.
    """
    if not onednn:
        turned = weight.t()
        return lambda x, added: x @ turned if added is None else torch.addmm(added, x, turned)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    linear = torch.ops.mkldnn._linear_pointwise

    def multiply(x: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = (
            linear(x, packed, None, "none", [], "")
            if added is None
            else linear.binary(x, added, packed, None, "add")
        )
        return result

    return multiply


__all__ = ["before", "operations", "or_zeros", "order", "product"]
