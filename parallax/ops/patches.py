"""The gradient of a convolution's weight as one product of matrices.

Every number of the weight meets one pixel of each patch of the images, so that the gradient is a
product of the patches and of the gradients of the pixels that they make. oneDNN, which PyTorch
calls for it, brings weights to an order of its own and back: with small images and many channels
that takes several times as long as the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from parallax.ops.kernels import onednn_product, publish
from parallax.ops.resources import fixed_sizes


@fixed_sizes
def weight_gradient(
    gradient: torch.Tensor,
    images: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    onednn: bool = False,
) -> torch.Tensor:
    """The gradient of a weight [out, in, *size] in which every channel meets every other.

    Args:
        gradient: of the images that come out, [batch, out, height, width].
        images: that went in, [batch, in, height, width].
        size, stride, padding, dilation: of the convolution, for height and width.
        onednn: let oneDNN compute the product, of float32 numbers on the CPU.
    """
    left, right = as_matrices(gradient, images, size, stride, padding, dilation)
    product = onednn_product(left.t(), right.t()) if onednn else left.t() @ right
    return product.view(gradient.shape[1], images.shape[1], *size)


def as_matrices(
    gradient: torch.Tensor,
    images: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """U and V whose product U'V is this gradient, [out, in * size], with a row for each pixel that
    comes out. Arguments as of :func:`weight_gradient`."""
    columns = F.unfold(images, tuple(size), tuple(dilation), tuple(padding), tuple(stride))
    return (
        gradient.flatten(2).transpose(1, 2).flatten(0, 1),
        columns.transpose(1, 2).flatten(0, 1),
    )


def _sizes(
    gradient: torch.Tensor, images: torch.Tensor, size: Sequence[int], *rest: Any
) -> torch.Tensor:
    return gradient.new_empty((gradient.shape[1], images.shape[1], *size))


publish(
    weight_gradient,
    "(Tensor gradient, Tensor images, int[] size, int[] stride, int[] padding, int[] dilation, "
    "bool onednn=False) -> Tensor",
    _sizes,
)
