"""Gradients that are matrix products: the two factors say all, and are smaller (Poseidon).

The gradient of a fully connected layer's weight [M, N] is U'V, of the output's gradients U [K, M]
and the inputs V [K, N], with one row for each of K samples. Over workers, the sum of the products
is the product of the stacked factors (thesis, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.sizes import same_shape

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """One product of a gradient: U'V is ``left @ right``, or its transpose.

    Args:
        node: that computes it.
        transposed: the gradient is the transpose of what the node computes.
    """

    node: Node
    transposed: bool

    @property
    def factors(self) -> tuple[tuple[Node, bool], tuple[Node, bool]]:
        """U and V: for each a tensor, and whether the factor is its transpose."""
        left, right = self.node.args[:2]
        assert isinstance(left, Node)
        assert isinstance(right, Node)
        if self.transposed:
            return _plain(right, False), _plain(left, True)
        return _plain(left, True), _plain(right, False)

    @property
    def size(self) -> int:
        """K, the rows of U and V; a symbol, where it depends on sizes that vary."""
        left = self.node.args[0]
        assert isinstance(left, Node)
        size: int = left.meta["val"].shape[1]
        return size


def _plain(node: Node, transposed: bool) -> tuple[Node, bool]:
    """The same tensor without transposes."""
    while node.target is aten.t.default:
        source = node.args[0]
        assert isinstance(source, Node)
        node, transposed = source, not transposed
    return node, transposed


def products_of(mark: Node) -> list[Product]:
    """The products that a gradient is the sum of; empty if it is something else.

    Args:
        mark: of the gradient.
    """
    found: list[Product] = []
    queue: list[tuple[Any, bool]] = [(mark.args[0], False)]
    while queue:
        value, transposed = queue.pop()
        if not isinstance(value, Node):
            return []
        node, transposed = _plain(value, transposed)
        if node.target is aten.mm.default:
            found.append(Product(node, transposed))
        elif node.target is aten.add.Tensor and not node.kwargs and _of_equal_shape(node):
            queue += [(node.args[1], transposed), (node.args[0], transposed)]
        else:
            return []
    return found


def _of_equal_shape(node: Node) -> bool:
    own = node.meta["val"].shape
    return all(isinstance(a, Node) and same_shape(a.meta["val"].shape, own) for a in node.args)
