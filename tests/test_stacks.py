"""Stacks of what is permuted and copied afterwards: the same numbers, copied once."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from errors_help import alone
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from parallax.graph.passes.stacks import stack_in_order

aten: Any = torch.ops.aten
SIZES = (2, 3, 4)


def rewritten(function: Any, *tensors: torch.Tensor) -> Any:
    module = make_fx(function, tracing_mode="fake")(*tensors)
    stack_in_order(module.graph)
    module.recompile()
    return module


def copies(module: Any) -> int:
    return len(module.graph.find_nodes(op="call_function", target=aten.clone.default))


@pytest.mark.parametrize("dimension", [0, 1, 2, 3, -1])
def test_every_order_gives_the_same_tensor(dimension: int) -> None:
    parts = [torch.randn(SIZES), torch.randn(*SIZES[::-1]).permute(2, 1, 0)]
    for order in itertools.permutations(range(4)):

        def function(*parts: torch.Tensor, order: Any = order) -> torch.Tensor:
            moved = torch.stack(parts, dimension).permute(order)
            return torch.clone(moved, memory_format=torch.contiguous_format) * 2

        module = rewritten(function, *parts)
        expected, found = function(*parts), module(*parts)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
        assert copies(module) == 0


def test_stacks_with_channels_last_are_left() -> None:
    """Of parts with channels last, torch stacks with channels last, whatever order is asked for."""
    parts = [torch.randn(2, 3, 4, 5) for _ in range(3)]

    def function(*parts: torch.Tensor) -> torch.Tensor:
        moved = torch.stack(parts).permute(1, 0, 4, 2, 3)
        return torch.clone(moved, memory_format=torch.contiguous_format).view(-1)

    module = rewritten(function, *parts)
    assert torch.equal(module(*parts), function(*parts))
    assert copies(module) == 1


@pytest.mark.parametrize("read", ["stack", "permuted", "own strides"])
def test_what_is_read_otherwise_stays(read: str) -> None:
    parts = [torch.randn(SIZES) for _ in range(2)]

    def function(*parts: torch.Tensor) -> Any:
        stacked = torch.stack(parts)
        moved = stacked.permute(1, 0, 2, 3)
        if read == "own strides":
            return torch.clone(moved)
        copied = torch.clone(moved, memory_format=torch.contiguous_format)
        return copied, stacked if read == "stack" else moved * 2

    module = rewritten(function, *parts)
    assert copies(module) == 1
    torch.testing.assert_close(module(*parts), function(*parts), rtol=0, atol=0)


@pytest.mark.usefixtures("one_thread")
def test_attention_trains_as_on_one_device() -> None:
    torch.manual_seed(3)
    heads, width = 2, 6
    model = nn.ModuleList([nn.Linear(width, 3 * width), nn.Linear(width, width)]).double()
    x = torch.randn(4, 5, width, dtype=torch.float64)
    found = []
    for captured in (False, True):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)

        def step(x: torch.Tensor, own: Any = own, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            parts = own[0](x).view(4, 5, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            q, k, v = parts.unbind(0)
            seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            loss = own[1](seen.transpose(1, 2).reshape(4, 5, width)).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        runner = alone(step, model=own, optimizer=optimizer) if captured else None
        found.append([(runner.run if runner else step)(x) for _ in range(3)])
        if runner is not None:
            module = runner._last.step.graph_module  # type: ignore[union-attr]
            assert copies(module) == 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)
