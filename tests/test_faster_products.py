"""Products that run in another library give the same numbers, and only where that is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from parallax.ops.kernels import onednn_product
from parallax.runtime.compute import products
from parallax.runtime.compute.products import (
    Product,
    has_onednn,
    onednn_is_faster,
    use_faster_products,
)

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="PyTorch was built without oneDNN")
aten: Any = torch.ops.aten


def _graph(function: Any, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def _layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> list[Any]:
    """All products of a linear layer: forward with and without bias, and both gradients."""
    return [torch.addmm(b, x, w.t()), x @ w.t(), g @ w, g.t() @ x]


@needs_onednn
@pytest.mark.parametrize(("rows", "inner", "columns"), [(5, 7, 3), (1, 4, 1), (64, 33, 40)])
def test_every_form_gives_the_same_numbers(rows: int, inner: int, columns: int) -> None:
    torch.manual_seed(rows)
    inputs = [torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(columns)]
    inputs.append(torch.randn(rows, columns))
    module = _graph(_layer, *inputs)
    assert use_faster_products(module.graph, lambda product: True) == 4
    module.recompile()
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert called.count(onednn_product) == 4
    assert not {aten.mm.default, aten.addmm.default} & set(called)
    with torch.no_grad():
        for found, expected in zip(module(*inputs), _layer(*inputs), strict=True):
            assert found.is_contiguous()
            torch.testing.assert_close(found, expected)


def test_shapes_and_layouts_are_what_is_asked_about() -> None:
    asked: list[Product] = []

    def ask(product: Product) -> bool:
        asked.append(product)
        return False

    x, w, b, g = torch.ones(5, 7), torch.ones(3, 7), torch.ones(3), torch.ones(5, 3)
    module = _graph(_layer, x, w, b, g)
    before = str(module.graph)
    assert use_faster_products(module.graph, ask) == 0
    assert str(module.graph) == before
    assert asked == [
        Product(5, 7, 3, left_turned=False, right_turned=True, bias=True),
        Product(5, 7, 3, left_turned=False, right_turned=True, bias=False),
        Product(5, 3, 7, left_turned=False, right_turned=False, bias=False),
        Product(3, 5, 7, left_turned=True, right_turned=False, bias=False),
    ]


@needs_onednn
def test_parts_of_a_wider_matrix() -> None:
    """Such as pieces of a gradient, which are rows of a transposed matrix."""
    torch.manual_seed(1)
    wide, other = torch.randn(6, 20), torch.randn(6, 4)

    def pieces(wide: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
        return [wide.t()[5:12] @ other, wide[:4, :6] @ other, other.t() @ wide[:, 3:9]]

    asked: list[Product] = []
    module = _graph(pieces, wide, other)
    replaced = use_faster_products(
        module.graph, lambda product: bool(asked.append(product)) or True
    )
    assert asked == [
        Product(7, 6, 4, left_turned=True, right_turned=False, bias=False, step=20),
        Product(4, 6, 4, left_turned=False, right_turned=False, bias=False, step=20),
    ]
    assert replaced == 2, "oneDNN is slow where the second factor is such a part"
    module.recompile()
    with torch.no_grad():
        for found, expected in zip(module(wide, other), pieces(wide, other), strict=True):
            torch.testing.assert_close(found, expected)
    assert onednn_is_faster(asked[0]) in (False, True), "it can be timed"


@pytest.mark.parametrize(
    ("left", "right", "bias"),
    [
        (torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64), None),
        (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16), None),
        (torch.ones(0, 3), torch.ones(3, 4), None),
        (torch.ones(2, 0), torch.ones(0, 4), None),
        (torch.ones(2, 6)[:, ::2], torch.ones(3, 4), None),
        (torch.ones(2, 3), torch.ones(3, 4), torch.ones(2, 4)),
        (torch.ones(2, 3), torch.ones(3, 4), torch.ones(1)),
    ],
)
def test_what_the_other_library_does_not_do_stays(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None
) -> None:
    if bias is None:
        module = _graph(torch.mm, left, right)
    else:
        module = _graph(torch.addmm, bias, left, right)
    assert use_faster_products(module.graph, lambda product: True) == 0


@needs_onednn
def test_nan_and_infinity_pass() -> None:
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    x[0, 0], w[1, 1] = torch.nan, torch.inf
    module = _graph(lambda x, w: [x @ w.t()], x, w)
    use_faster_products(module.graph, lambda product: True)
    module.recompile()
    with torch.no_grad():
        torch.testing.assert_close(module(x, w)[0], x @ w.t(), equal_nan=True)


def test_a_large_product_is_timed_by_a_likeness() -> None:
    small = Product(10, 20, 30, False, True, False)
    assert small.likeness() == small
    likeness = Product(8, 25_088, 4096, False, True, True).likeness()
    assert likeness == Product(8, 3136, 4096, False, True, True)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_a_shape_is_timed_in_float32_whatever_the_default_type(bias: bool) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert products.onednn_is_faster(Product(2, 3, 5, True, False, bias)) in (True, False)
    finally:
        torch.set_default_dtype(before)


@needs_onednn
def test_steps_of_a_layer_are_timed_as_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weight brought in order once, and what each step adds: both compute the same."""
    compared: list[list[torch.Tensor]] = []

    def compare(other: Callable[[], torch.Tensor], usual: Callable[[], torch.Tensor]) -> bool:
        compared.append([other(), usual()])
        return True

    monkeypatch.setattr(products, "is_clearly_faster", compare)
    products.onednn_is_faster.cache_clear()
    packed: list[int] = []
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda w: packed.append(1) or reorder(w)
    )
    try:
        for turned in (False, True):
            assert onednn_is_faster(Product(4, 6, 8, False, turned, False, again=True))
    finally:
        products.onednn_is_faster.cache_clear()
    assert len(packed) == 2
    for other, usual in compared:
        torch.testing.assert_close(other, usual)
        torch.testing.assert_close(usual, torch.full((4, 8), 7.0))


@needs_onednn
def test_a_shape_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True])
    monkeypatch.setattr(products, "is_clearly_faster", lambda other, usual: next(answers))
    products.onednn_is_faster.cache_clear()
    try:
        product = Product(2, 3, 4, False, False, False)
        assert products.onednn_is_faster(product)
        assert products.onednn_is_faster(product)
    finally:
        products.onednn_is_faster.cache_clear()
