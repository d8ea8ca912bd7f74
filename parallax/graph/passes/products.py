"""Join sums of matrix products into one product of stacked factors.

A recurrent layer adds up the gradient of its weight over its time steps, a product ``A' B`` for
each. The sum is one product of the stacked factors, ``[A_1; A_2; ...]' [B_1; B_2; ...]``.
It computes as much, writes the sum once, and leaves backward's chain of time steps: what they wait
for comes sooner, and after them there is computation left during which gradients travel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.common.aliases import base_of, writes_to
from parallax.graph.common.operations import add_call
from parallax.graph.common.sizes import same_shape, sizes_of
from parallax.graph.passes.cleanup import remove_dead

aten: Any = torch.ops.aten


def join_products(graph: Graph) -> None:
    """Rewrite every such sum where stacking copies less than adding up writes.

    Sums are taken in another order: equal up to rounding.
    """
    _drop_double_transposes(graph)
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in order:
        if _is_sum(node) and not _is_term(node):
            terms = _terms(node)
            products = [term for term in terms if _is_product(term, order)]
            if len(products) > 1 and _pays(products):
                _join(graph, node, products, [t for t in terms if t not in products])
    remove_dead(graph)


def _drop_double_transposes(graph: Graph) -> None:
    """A transpose of a transpose is the tensor itself."""
    for node in list(graph.nodes):
        if node.target is aten.t.default and node.args[0].target is aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.target is aten.t.default and not node.users:
            graph.erase_node(node)


def is_written_after(node: Node, place: Node, order: Mapping[Node, int]) -> bool:
    """Whether the memory of a tensor is changed after ``place``, so that what is computed from it
    later would be another value."""
    return any(order[write] > order[place] for write in writes_to(base_of(node)))


def _is_sum(node: Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    values = [a.meta.get("val") if isinstance(a, Node) else None for a in node.args]
    own = node.meta.get("val")
    return isinstance(own, torch.Tensor) and all(
        isinstance(value, torch.Tensor)
        and same_shape(value.shape, own.shape)
        and value.dtype is own.dtype
        for value in values
    )


def _is_term(node: Node) -> bool:
    """Whether a sum is used by another sum, once, and by nothing else."""
    users = list(node.users)
    return len(users) == 1 and _is_sum(users[0]) and users[0].args[0] is not users[0].args[1]


def _terms(node: Node) -> list[Node]:
    """What a sum adds up, sums within it resolved, from left to right."""
    found: list[Node] = []
    queue = [node]
    while queue:
        current = queue.pop()
        if current is node or (_is_sum(current) and _is_term(current)):
            queue += [a for a in reversed(current.args) if isinstance(a, Node)]
        else:
            found.append(current)
    return found


def _is_product(node: Node, order: Mapping[Node, int]) -> bool:
    """Whether this is a product ``A' B`` that is used once, of factors that stay as they are."""
    return (
        node.target is aten.mm.default
        and len(node.users) == 1
        and isinstance(left := node.args[0], Node)
        and left.target is aten.t.default
        and node.meta["val"].layout is torch.strided
        and not any(is_written_after(factor, node, order) for factor in node.all_input_nodes)
    )


def _factors(product: Node) -> tuple[Node, Node]:
    """Of a product ``A' B``: A and B, whose first dimensions are the one that is summed over."""
    left, right = product.args
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    first = left.args[0]
    assert isinstance(first, Node)
    return first, right


def _pays(products: list[Node]) -> bool:
    """Whether stacking the factors copies less than adding up reads and writes."""
    stacked = sum(
        math.prod(sizes_of(factor.meta["val"]))
        for product in products
        for factor in _factors(product)
    )
    added = sum(math.prod(sizes_of(product.meta["val"])) for product in products[1:])
    return bool(stacked < 2 * added)


def _join(graph: Graph, node: Node, products: list[Node], others: list[Node]) -> None:
    factors = [_factors(product) for product in products]
    with graph.inserting_before(node):
        left, right = (
            add_call(graph, aten.cat.default, list(parts)) for parts in zip(*factors, strict=True)
        )
        total = add_call(graph, aten.mm.default, add_call(graph, aten.t.default, left), right)
        for other in others:
            total = add_call(graph, aten.add.Tensor, other, total)
    node.replace_all_uses_with(total)
