"""Let each matrix product run in the faster of the libraries that PyTorch brings.

PyTorch sends products of float32 matrices on the CPU to its BLAS. oneDNN, which it calls for
convolutions and half types, has such products too; which of the two is faster depends on the
processor (on some of AMD's oneDNN takes half the time of MKL) and on the shapes. Both are timed,
once for every shape, and the product is replaced where oneDNN clearly wins.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.common.sizes import same_shape, size_of, sizes_of
from parallax.ops import steps
from parallax.ops.gru import GRU, GRU_BACKWARD
from parallax.ops.kernels import onednn_product
from parallax.ops.recurrent import LSTM, LSTM_BACKWARD
from parallax.ops.rnn import RNN, RNN_BACKWARD
from parallax.runtime.compute.timing import is_clearly_faster, is_plain

aten: Any = torch.ops.aten

MOST_NUMBERS = 1 << 24
"""In all matrices of a product that is timed; of a larger one a smaller likeness is."""

_LAYERS: dict[Any, tuple[int, int, bool]] = {
    LSTM: (4, 1, False),
    LSTM_BACKWARD: (7, 5, True),
    GRU: (3, 1, False),
    GRU_BACKWARD: (5, 4, True),
    RNN: (2, 1, False),
    RNN_BACKWARD: (1, 2, True),
}
"""By operation, which of its arguments tells the batch, [(time,) batch, hidden], which is the
weight of outputs, and whether it multiplies with that as it is, not transposed."""


@dataclass(frozen=True)
class Product:
    """``[rows, inner] @ [inner, columns]`` in float32, and how its factors lie in memory."""

    rows: int
    inner: int
    columns: int
    left_turned: bool
    right_turned: bool
    bias: bool
    step: int = 0
    """Numbers from one row (or column, if it is turned) of the left factor to the next, where that
    is a part of a wider matrix."""
    again: bool = False
    """With the same right factor again and again, as in steps of a recurrent layer: oneDNN brings
    it in order once. Another matrix is added."""

    def likeness(self) -> Product:
        """The product itself, or one small enough to be timed: its longest sides are halved."""
        rows, inner, columns = self.rows, self.inner, self.columns
        while rows * inner + inner * columns + rows * columns > MOST_NUMBERS:
            longest = max(rows, inner, columns)
            rows, inner, columns = (
                side // 2 if side == longest else side for side in (rows, inner, columns)
            )
        step = min(self.step, MOST_NUMBERS // max(rows, inner))
        return dataclasses.replace(self, rows=rows, inner=inner, columns=columns, step=step)


def has_onednn() -> bool:
    """Whether this build of PyTorch has oneDNN's product."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )


def use_faster_products(graph: Graph, is_faster: Callable[[Product], bool] | None = None) -> int:
    """Replace the products of a graph that oneDNN computes faster. Equal up to rounding.

    Args:
        graph: in which nodes carry example values in ``meta["val"]``.
        is_faster: answers for a product; by timing both unless given.

    Returns:
        How many were replaced.
    """
    if is_faster is None:
        if not has_onednn():
            return 0
        is_faster = onednn_is_faster
    replaced = 0
    for node in list(graph.nodes):
        if node.target in _LAYERS:
            replaced += _in_layer(node, is_faster)
            continue
        factors = _factors(node)
        if factors is None or not is_faster(_product(*factors)):
            continue
        left, right, bias = factors
        with graph.inserting_before(node):
            turned = right.args[0] if right.target is aten.t.default else None
            if turned is None:
                turned = graph.call_function(aten.t.default, (right,))
                turned.meta["val"] = right.meta["val"].t()
            new = graph.call_function(onednn_product, (left, turned, bias))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        if not right.users:
            graph.erase_node(right)
        replaced += 1
    return replaced


def _in_layer(layer: Node, is_faster: Callable[[Product], bool]) -> bool:
    """Let the steps of a recurrent layer compute their products in oneDNN if that is faster."""
    *places, backward = _LAYERS[layer.target]
    told, weight = (layer.args[place] for place in places)
    assert isinstance(told, Node)
    assert isinstance(weight, Node)
    state, matrix = told.meta.get("val"), weight.meta.get("val")
    if not is_plain(state) or not is_plain(matrix):
        return False
    columns, inner = sizes_of(matrix)
    if backward:
        columns, inner = inner, columns
    rows = sizes_of(state)[-2]
    if not is_faster(Product(rows, inner, columns, False, not backward, False, again=True)):
        return False
    layer.kwargs = {**layer.kwargs, "onednn": True}
    return True


def _factors(node: Node) -> tuple[Node, Node, Node | None] | None:
    """Left, right and bias of a product that both libraries can compute."""
    bias: Any = None
    left: Any
    right: Any
    if node.target is aten.mm.default:
        left, right = node.args
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, left, right = node.args
    else:
        return None
    values = [factor.meta.get("val") for factor in (left, right)]
    if not all(is_plain(value) and _turned(value) is not None for value in values):
        return None
    if not _is_tight(values[1]):
        return None  # oneDNN would take seconds to bring it in order
    if bias is not None:
        added = bias.meta.get("val")
        if added is None or not same_shape(added.shape, right.meta["val"].shape[1:]):
            return None
    return left, right, bias


def _turned(value: torch.Tensor) -> bool | None:
    """Whether a matrix, or the wider one of which it is a part, lies column by column; None if it
    lies in neither way."""
    if _is_tight(value):
        return not value.is_contiguous()
    steps = [size_of(step) or 0 for step in value.stride()]
    sizes = sizes_of(value)
    if steps[1] == 1 and steps[0] >= sizes[1]:
        return False
    return True if steps[0] == 1 and steps[1] >= sizes[0] else None


def _is_tight(value: torch.Tensor) -> bool:
    return value.is_contiguous() or value.t().is_contiguous()


def _product(left: Node, right: Node, bias: Node | None) -> Product:
    one, other = left.meta["val"], right.meta["val"]
    rows, inner = sizes_of(one)
    return Product(
        rows,
        inner,
        sizes_of(other)[1],
        bool(_turned(one)),
        bool(_turned(other)),
        bias is not None,
        0 if _is_tight(one) else max(size_of(step) or 0 for step in one.stride()),
    )


@functools.cache
def onednn_is_faster(product: Product) -> bool:
    """Time both libraries on matrices of these shapes, with this process's threads."""
    product = product.likeness()
    left = _matrix(product.rows, product.inner, product.left_turned, product.step)
    right = _matrix(product.inner, product.columns, product.right_turned)
    with torch.no_grad():
        if product.again:
            added = _matrix(product.rows, product.columns, False)
            packed, usual = (steps.product(right.t(), onednn) for onednn in (True, False))
            return is_clearly_faster(lambda: packed(left, added), lambda: usual(left, added))
        bias = _matrix(1, product.columns, False)[0] if product.bias else None
        return is_clearly_faster(
            lambda: onednn_product(left, right.t(), bias),
            lambda: torch.mm(left, right) if bias is None else torch.addmm(bias, left, right),
        )


def _matrix(rows: int, columns: int, turned: bool, step: int = 0) -> torch.Tensor:
    first, second = (columns, rows) if turned else (rows, columns)
    wide = torch.ones((first, max(step, second)), dtype=torch.float32)  # not the default type
    made = wide[:, :second]
    return made.t() if turned else made
