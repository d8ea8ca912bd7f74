"""Gradients of which two factors say all, and are smaller (Poseidon).

The gradient of a fully connected layer's weight [M, N] is U'V, of the output's gradients U [K, M]
and the inputs V [K, N], with one row for each of K samples. Over workers, the sum of the products
is the product of the stacked factors (thesis, section 3.3). The weight of a convolution is the
same case: its gradient follows from the gradients of the images that come out and from those that
went in, and those of all workers are one larger batch.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.common.sizes import BatchSizes, same_shape, size_of, sizes_of

aten: Any = torch.ops.aten

Sizes = tuple[Any, ...]
"""Of a tensor; symbols where they vary."""
_OF_WEIGHT = 1
_OF_BIAS = 2
"""Places of gradients in what convolution_backward gives, and in its mask."""
_BIAS_SIZES, _MASK = 3, 10
"""Places among its arguments; between them is how the convolution works."""


@dataclass(frozen=True)
class Product(ABC):
    """One product of two factors, each with a row for every sample, that a gradient is.

    Args:
        node: that computes it.
    """

    node: Node

    @property
    @abstractmethod
    def factors(self) -> tuple[tuple[Node, bool], tuple[Node, bool]]:
        """U and V: for each a tensor, and whether the factor is its transpose."""

    @property
    @abstractmethod
    def shapes(self) -> tuple[Sizes, Sizes]:
        """Of U and V, samples first; symbols where sizes vary."""

    @property
    @abstractmethod
    def operations(self) -> int:
        """Multiplications and additions that it takes."""

    @property
    def settings(self) -> tuple[Any, ...]:
        """How a convolution works, as ``convolution_backward`` takes it: stride, padding, dilation,
        transposed, output padding and groups. Empty for a product of matrices."""
        return ()

    @property
    def size(self) -> int | torch.SymInt:
        """K, the rows of U and V; a symbol, where it depends on sizes that vary."""
        size: int | torch.SymInt = self.shapes[0][0]
        return size

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers in a row of U and in one of V."""
        left, right = (math.prod(size_of(size) or 0 for size in s[1:]) for s in self.shapes)
        return left, right

    def joins(self, other: Product) -> bool:
        """Whether the sum of both is the product of their stacked factors."""
        return self.settings == other.settings and all(
            same_shape(tuple(own[1:]), tuple(others[1:]))
            for own, others in zip(self.shapes, other.shapes, strict=True)
        )

    def drop(self) -> None:  # noqa: B027
        """Let nothing compute it any more, besides what is dead code when nobody uses it."""


@dataclass(frozen=True)
class MatrixProduct(Product):
    """U'V is ``left @ right``, or its transpose.

    Args:
        transposed: the gradient is the transpose of what the node computes.
    """

    transposed: bool

    @property
    def factors(self) -> tuple[tuple[Node, bool], tuple[Node, bool]]:
        left, right = self.node.args[:2]
        assert isinstance(left, Node)
        assert isinstance(right, Node)
        if self.transposed:
            return _plain(right, False), _plain(left, True)
        return _plain(left, True), _plain(right, False)

    @property
    def shapes(self) -> tuple[Sizes, Sizes]:
        rows, columns = self.node.meta["val"].shape
        if self.transposed:
            rows, columns = columns, rows
        size = self.node.args[0].meta["val"].shape[1]  # type: ignore[union-attr]
        return (size, rows), (size, columns)

    @property
    def operations(self) -> int:
        (size, rows), (_, columns) = self.shapes
        return 2 * (size_of(size) or 0) * (size_of(rows) or 0) * (size_of(columns) or 0)


@dataclass(frozen=True)
class ConvolutionProduct(Product):
    """The gradient of a convolution's weight; U are images' gradients, V the images.

    Args:
        node: ``convolution_backward``.
    """

    @property
    def factors(self) -> tuple[tuple[Node, bool], tuple[Node, bool]]:
        gradient, images = self.node.args[:2]
        assert isinstance(gradient, Node)
        assert isinstance(images, Node)
        return (gradient, False), (images, False)

    @property
    def shapes(self) -> tuple[Sizes, Sizes]:
        (gradient, _), (images, _) = self.factors
        return tuple(gradient.meta["val"].shape), tuple(images.meta["val"].shape)

    @property
    def settings(self) -> tuple[Any, ...]:
        return tuple(
            tuple(one) if isinstance(one, list | tuple) else one
            for one in self.node.args[_BIAS_SIZES + 1 : _MASK]
        )

    @property
    def operations(self) -> int:
        (gradient, _), (images, _) = self.factors
        weight: Any = self.node.args[2]
        transposed = self.settings[3]
        # Every number of the weight meets every pixel of the smaller images.
        batch, _, *pixels = sizes_of((images if transposed else gradient).meta["val"])
        return 2 * math.prod(sizes_of(weight.meta["val"])) * batch * math.prod(pixels)

    def drop(self) -> None:
        """The node goes on with the images' gradient alone, if nobody wants the weight's.

        The bias's, which oneDNN computes together with the weight's, becomes a sum of its own.
        """
        parts = {user.args[1]: user for user in self.node.users}
        if _OF_WEIGHT in parts:
            return
        mask: Any = self.node.args[_MASK]
        self.node.update_arg(_MASK, [mask[0], False, False])
        self.node.meta["val"] = (self.node.meta["val"][0], None, None)
        if _OF_BIAS not in parts:
            return
        (gradient, _), _ = self.factors
        dimensions = [place for place in range(len(self.shapes[0])) if place != 1]
        graph, old = self.node.graph, parts[_OF_BIAS]
        with graph.inserting_after(self.node):
            new = graph.call_function(aten.sum.dim_IntList, (gradient, dimensions))
        new.meta.update(old.meta)
        old.replace_all_uses_with(new)
        graph.erase_node(old)


def _plain(node: Node, transposed: bool) -> tuple[Node, bool]:
    """The same tensor without transposes."""
    while node.target is aten.t.default:
        source = node.args[0]
        assert isinstance(source, Node)
        node, transposed = source, not transposed
    return node, transposed


def products_of(mark: Node, sizes: BatchSizes | None) -> list[Product]:
    """The products that a gradient is the sum of, all of one kind; empty if it is something else.

    Of factors whose sizes only values decide (of selected samples), or the batches of all workers,
    it is something else: what they would send is not known before, or all have it.

    Args:
        mark: of the gradient.
        sizes: those of the graph that vary.
    """
    found: list[Product] = []
    queue: list[tuple[Any, bool]] = [(mark.args[0], False)]
    while queue:
        value, transposed = queue.pop()
        if not isinstance(value, Node):
            return []
        node, transposed = _plain(value, transposed)
        if node.target is aten.mm.default:
            found.append(MatrixProduct(node, transposed))
        elif _is_of_weight(node) and not transposed:
            found.append(ConvolutionProduct(node.all_input_nodes[0]))
        elif node.target is aten.add.Tensor and not node.kwargs and _of_equal_shape(node):
            queue += [(node.args[1], transposed), (node.args[0], transposed)]
        else:
            return []
    known = all(_is_known(product, sizes) for product in found)
    return found if known and all(found[0].joins(other) for other in found[1:]) else []


def _is_known(product: Product, sizes: BatchSizes | None) -> bool:
    """Whether a batch's shape says how large the factors are."""
    return all(
        isinstance(size, int) or (sizes is not None and sizes.are_of_batch(size))
        for shape in product.shapes
        for size in shape
    )


def _is_of_weight(node: Node) -> bool:
    """Whether a node takes the gradient of a weight from a convolution's gradients."""
    if node.target is not operator.getitem or node.args[1] != _OF_WEIGHT:
        return False
    source = node.all_input_nodes[0]
    return source.target is aten.convolution_backward.default and not source.kwargs


def _of_equal_shape(node: Node) -> bool:
    own = node.meta["val"].shape
    return all(isinstance(a, Node) and same_shape(a.meta["val"].shape, own) for a in node.args)
