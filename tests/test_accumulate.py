"""Sums in place: the same numbers, and never into a tensor that someone else sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from parallax.graph.passes.cleanup import remove_dead
from parallax.rewrite.accumulate import accumulate_in_place

Function = Callable[[torch.Tensor, torch.Tensor], object]


def _products(a: torch.Tensor, b: torch.Tensor) -> object:
    return a @ b + b @ a + a.exp()


def _shared(a: torch.Tensor, b: torch.Tensor) -> object:
    left = a @ b
    total = left + b.exp()
    return total, left  # left is returned as well


def _inputs(a: torch.Tensor, b: torch.Tensor) -> object:
    return a + b  # nobody may write to what the caller passes


def _views(a: torch.Tensor, b: torch.Tensor) -> object:
    left = a.exp()
    view = left.view(-1)
    return left + b.exp(), view


def _written_between(a: torch.Tensor, b: torch.Tensor) -> object:
    factor = a.exp()
    left, product = b.exp(), factor @ b
    factor.mul_(2)  # the product was taken of the old value
    return left + product, factor


def _twice(a: torch.Tensor, b: torch.Tensor) -> object:
    left = a @ b
    return left + left


def _broadcast(a: torch.Tensor, b: torch.Tensor) -> object:
    return a.exp() + b.sum(0)


def _laid_out(a: torch.Tensor, b: torch.Tensor) -> object:
    # The sum lies as its first operand does, by columns, and is viewed as such (rotary embeddings).
    return (a.exp().t() * 2 + b.exp()).t().reshape(-1)


CASES: dict[str, tuple[Function, set[str]]] = {
    "products": (_products, {"addmm_", "add_"}),
    "shared": (_shared, {"add_"}),
    "inputs": (_inputs, set()),
    "views": (_views, {"add_"}),
    "written_between": (_written_between, {"add_"}),
    "twice": (_twice, set()),
    "broadcast": (_broadcast, set()),
    "laid_out": (_laid_out, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_sums_in_place_are_equal_and_private(name: str) -> None:
    function, expected = CASES[name]
    torch.manual_seed(3)
    a = torch.randn(4, 4, dtype=torch.float64)
    b = torch.randn(4, 4, dtype=torch.float64)
    module = make_fx(function, tracing_mode="fake")(a, b)
    accumulate_in_place(module.graph)
    remove_dead(module.graph)
    module.recompile()
    used = {
        str(node.target).split(".")[1] for node in module.graph.nodes if "aten" in str(node.target)
    }
    assert {kind for kind in used if kind in ("add_", "addmm_")} == expected
    wanted = torch.utils._pytree.tree_leaves(function(a.clone(), b.clone()))
    before = a.clone(), b.clone()
    found = torch.utils._pytree.tree_leaves(module(a, b))
    for left, right in zip(wanted, found, strict=True):
        assert (left - right).abs().max() < 1e-14
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
