"""Sums of products become one product: the same numbers, and never of values that change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from parallax.graph.passes.products import join_products

Function = Callable[[list[torch.Tensor], list[torch.Tensor]], object]


def _summed(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    total = a[0].t() @ b[0]
    for left, right in zip(a[1:], b[1:], strict=True):
        total = total + left.t() @ right
    return total


def _time_steps(a: list[torch.Tensor], b: list[torch.Tensor]) -> object:
    return _summed(a, b)


def _transposed_twice(a: list[torch.Tensor], b: list[torch.Tensor]) -> object:
    products = [(right.t() @ left).t() for left, right in zip(a, b, strict=True)]
    return sum(products[1:], products[0]).t()


def _with_others(a: list[torch.Tensor], b: list[torch.Tensor]) -> object:
    other = torch.ones(a[0].shape[1], b[0].shape[1], dtype=a[0].dtype)
    return (other + _summed(a, b)) + other.exp()


def _returned(a: list[torch.Tensor], b: list[torch.Tensor]) -> object:
    first = a[0].t() @ b[0]
    return first + a[1].t() @ b[1], first  # the first product is wanted by itself


def _written_later(a: list[torch.Tensor], b: list[torch.Tensor]) -> object:
    factor = a[0].exp()
    first = factor.t() @ b[0]
    view = factor.view(-1)
    second = a[1].t() @ b[1]
    view.mul_(2)  # the product was taken of the old value
    return first + second


def _written_before(a: list[torch.Tensor], b: list[torch.Tensor]) -> object:
    factor = a[0].exp().mul_(2)
    return factor.t() @ b[0] + a[1].t() @ b[1]


def _twice(a: list[torch.Tensor], b: list[torch.Tensor]) -> object:
    total = _summed(a, b)
    return total + total


def _wide_factors(a: list[torch.Tensor], b: list[torch.Tensor]) -> object:
    return torch.cat(a * 9).t() @ torch.cat(b * 9) + torch.cat(b * 9).t() @ torch.cat(a * 9)


CASES: dict[str, tuple[Function, int]] = {
    "time_steps": (_time_steps, 1),
    "transposed_twice": (_transposed_twice, 5),
    "with_others": (_with_others, 1),
    "returned": (_returned, 2),
    "written_later": (_written_later, 2),
    "written_before": (_written_before, 1),
    "twice": (_twice, 1),
    "wide_factors": (_wide_factors, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_joined_and_equal(name: str) -> None:
    function, products = CASES[name]
    torch.manual_seed(4)
    a = [torch.randn(3, 8, dtype=torch.float64) for _ in range(5)]
    b = [torch.randn(3, 8, dtype=torch.float64) for _ in range(5)]
    module = make_fx(function, tracing_mode="fake")(a, b)
    join_products(module.graph)
    module.graph.lint()
    module.recompile()
    kinds = [node.target for node in module.graph.nodes]
    assert kinds.count(torch.ops.aten.mm.default) == products
    for node in module.graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.meta["val"], torch.Tensor)
    wanted = torch.utils._pytree.tree_leaves(function(a, b))
    found = torch.utils._pytree.tree_leaves(module(a, b))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
