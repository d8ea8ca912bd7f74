"""Tensors without storage are laid out as kernels lay out the real ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors_help import alone
from torch import nn
from user_cases import squares

from parallax.graph.common.torch_internals import ShapeEnv, fake_like, fake_mode

aten: Any = torch.ops.aten
SHAPE = (2, 3, 4, 5)
ORDERS = [(0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 1, 3), (0, 1, 3, 2), (0, 3, 1, 2), (3, 2, 1, 0)]
ONE = torch.ones((), dtype=torch.float64)
SCALE = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
CHANNELS = SCALE[:3]


def _group_norm(gradient: torch.Tensor, x: torch.Tensor) -> Any:
    if not gradient.is_contiguous():
        raise RuntimeError("autograd puts gradients in order before it calls this")
    _, mean, root = aten.native_group_norm(x, CHANNELS, CHANNELS, 2, 3, 20, 3, 1e-5)
    return aten.native_group_norm_backward(
        gradient, x, mean, root, CHANNELS, 2, 3, 20, 3, [True] * 3
    )


def _layer_norm(gradient: torch.Tensor, x: torch.Tensor) -> Any:
    _, mean, root = aten.native_layer_norm(x, [5], SCALE, SCALE, 1e-5)
    return aten.native_layer_norm_backward(gradient, x, [5], mean, root, SCALE, SCALE, [True] * 3)


def _attention(gradient: torch.Tensor, query: torch.Tensor) -> Any:
    if query.stride(-1) != 1 or gradient.stride(-1) != 1:
        raise RuntimeError("attention puts such operands in order before it calls this")
    given = aten._scaled_dot_product_flash_attention_for_cpu(query, query, query, 0.0, True)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, query, query, *given, 0.0, True
    )


Function = Callable[..., Any]


def _batch_norm(gradient: torch.Tensor, x: torch.Tensor) -> Any:
    _, mean, root = aten.native_batch_norm(x, CHANNELS, None, None, None, True, 0.1, 1e-5)
    return aten.native_batch_norm_backward(
        gradient, x, CHANNELS, None, None, mean, root, True, 1e-5, [True] * 3
    )


ONE_OPERAND: dict[str, Function] = {
    **{
        name: getattr(aten, name)
        for name in [
            "relu",
            "silu",
            "mish",
            "gelu",
            "softplus",
            "hardtanh",
            "log_sigmoid_forward",
            "clone",
        ]
    },
    "roll": lambda x: aten.roll(x, [1], [2]),
    "flip": lambda x: aten.flip(x, [2]),
    "cumsum": lambda x: aten.cumsum(x, 1),
    "softmax": lambda x: aten._softmax(x, 2, False),
    "log_softmax": lambda x: aten._log_softmax(x, 2, False),
    "sort": lambda x: aten.sort(x, 1),
    "sum": lambda x: aten.sum(x, [1], True),
    "layer_norm": lambda x: aten.native_layer_norm(x, [5], None, None, 1e-5),
    "batch_norm": lambda x: aten.native_batch_norm(x, CHANNELS, None, None, None, True, 0.1, 1e-5),
    "pad": lambda x: aten.constant_pad_nd(x, [1, 1]),
    "max_pool": lambda x: aten.max_pool2d_with_indices(x, [2, 2]),
    "stack": lambda x: aten.stack([x, x], 1),
    "cat": lambda x: aten.cat([x, x], 2),
    "repeat": lambda x: aten.repeat(x, [1, 2, 1, 1]),
    "index": lambda x: aten.index_select(x, 1, torch.tensor([1, 0])),
    "triu": aten.triu,
}
TWO_OPERANDS: dict[str, Function] = {
    **{name: getattr(aten, name) for name in ["add", "mul", "div", "maximum", "atan2"]},
    **{
        f"{name}_backward": getattr(aten, f"{name}_backward")
        for name in ("sigmoid", "tanh", "silu", "mish", "hardswish", "hardsigmoid", "gelu")
    },
    "log_sigmoid_backward": lambda g, x: aten.log_sigmoid_backward(g, x, x),
    "softplus_backward": lambda g, x: aten.softplus_backward(g, x, 1, 20),
    "hardtanh_backward": lambda g, x: aten.hardtanh_backward(g, x, -1, 1),
    "leaky_relu_backward": lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
    "elu_backward": lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "threshold_backward": lambda g, x: aten.threshold_backward(g, x, 0.1),
    "softshrink_backward": lambda g, x: aten.softshrink_backward(g, x, 0.1),
    "logit_backward": lambda g, x: aten.logit_backward(g, x, 0.1),
    "dropout_backward": lambda g, x: aten.native_dropout_backward(g, x > 0.5, 2.0),
    "softmax_backward": lambda g, x: aten._softmax_backward_data(g, x, 2, torch.float64),
    "log_softmax_backward": lambda g, x: aten._log_softmax_backward_data(g, x, 2, torch.float64),
    "mse": lambda x, y: aten.mse_loss(x, y, 0),
    "mse_backward": lambda x, y: aten.mse_loss_backward(ONE, x, y, 1),
    "smooth_l1_backward": lambda x, y: aten.smooth_l1_loss_backward(ONE, x, y, 1, 1.0),
    "huber_backward": lambda x, y: aten.huber_loss_backward(ONE, x, y, 1, 1.0),
    "binary": lambda x, y: aten.binary_cross_entropy(x, y, None, 0),
    "binary mean": lambda x, y: aten.binary_cross_entropy(x, y),
    "binary_backward": lambda x, y: aten.binary_cross_entropy_backward(ONE, x, y),
    "gather": lambda x, y: aten.gather(x, 1, (y * 0).long()),
    "index_add": lambda x, y: aten.index_add(x, 1, torch.arange(3), y),
    "where": lambda x, y: aten.where(x > 0.5, x, y),
    "batch_norm_backward": _batch_norm,
    "layer_norm_backward": _layer_norm,
    "glu_backward": lambda g, x: aten.glu_backward(g[..., :2], x[..., :4], 3),
    "group_norm_backward": _group_norm,
    "reflection_backward": lambda g, x: aten.reflection_pad2d_backward(
        F.pad(g, (1, 1, 1, 1)), x, [1] * 4
    ),
    "attention_backward": _attention,
}


def _operands(count: int) -> Iterator[tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    for orders in itertools.product(ORDERS, repeat=count):
        yield tuple(
            torch.rand([SHAPE[i] for i in order], dtype=torch.float64).permute(
                [order.index(i) for i in range(4)]
            )
            for order in orders
        )


def _strides(results: Any) -> list[list[int]]:
    """Of all tensors, in dimensions where they matter."""
    flat = [one for one in torch.utils._pytree.tree_leaves(results) if one is not None]
    return [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in flat]


CASES = {
    **{name: (function, 1) for name, function in ONE_OPERAND.items()},
    **{name: (function, 2) for name, function in TWO_OPERANDS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_layouts_are_those_of_the_kernels(name: str) -> None:
    function, count = CASES[name]
    mode = fake_mode(ShapeEnv())
    for operands in _operands(count):
        try:
            real = function(*operands)
        except RuntimeError:  # it refuses this layout
            continue
        fakes = [fake_like(mode, one, one.device) for one in operands]
        with mode:
            believed = function(*fakes)
        assert _strides(believed) == _strides(real), [one.stride() for one in operands]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("permuted", [False, True])
def test_gradients_of_group_norm(channels_last: bool, permuted: bool) -> None:
    """Its kernel takes the gradient for one in order, and autograd puts it so if it is not."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3)
            )
            self.last = nn.GroupNorm(4, 8)
            self.double()
            if channels_last:
                self.to(memory_format=torch.channels_last)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if channels_last:
                x = x.to(memory_format=torch.channels_last)
            x = self.last(self.layers(x))
            x = x.permute(0, 2, 3, 1) if permuted else x
            return F.softplus(x).reshape(len(x), -1)

    batch = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    plain, captured = Net(), Net()
    expected, runner = squares(plain), alone(squares(captured))
    for _ in range(3):
        assert (expected(batch) - runner.run(batch)).abs() < 1e-12
    for left, right in zip(plain.parameters(), captured.parameters(), strict=True):
        assert (left - right).abs().max() < 1e-12
