"""Let gradients of convolutions' weights be products of matrices where that is faster.

For small images with many channels a product of patches takes a fraction of what PyTorch's
gradient does (:mod:`parallax.ops.patches`); for large ones the patches are too many. Both are
timed, once for every shape.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from parallax.graph.analysis.factors import ConvolutionProduct
from parallax.ops.patches import weight_gradient
from parallax.runtime.compute.images import Convolution, convolution_of
from parallax.runtime.compute.products import has_onednn
from parallax.runtime.compute.timing import CLEARLY, best_of

aten: Any = torch.ops.aten

Way = Literal["usual", "patches", "onednn"]
"""PyTorch's gradient, or the product of patches in its BLAS or in oneDNN."""
MOST_PATCHES = 1024
"""Of a convolution that is timed: with more, the patches outweigh what is done to the weight."""


def use_patches(graph: Graph, way_of: Callable[[Convolution], Way] | None = None) -> int:
    """Replace the gradients of weights that are faster so. Equal up to rounding.

    Args:
        graph: in which nodes carry example values in ``meta["val"]``.
        way_of: answers for a convolution's gradients; by timing unless given.

    Returns:
        How many were replaced.
    """
    replaced = 0
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        one = convolution_of(node)
        wanted = [u for u in node.users if u.target is operator.getitem and u.args[1] == 1]
        if one is None or not wanted or not _is_plain(one):
            continue
        way = (way_of or fastest)(one)
        if way != "usual":
            _replace(node, wanted, one, way)
            replaced += 1
    return replaced


def _is_plain(one: Convolution) -> bool:
    """Whether every channel meets every other."""
    *_, transposed, _, groups, _ = one.settings
    return groups == 1 and not transposed


def _replace(node: Node, wanted: list[Node], one: Convolution, way: Way) -> None:
    graph = node.graph
    gradient, images = node.args[:2]
    with graph.inserting_before(node):
        arguments = (gradient, images, *_patches(one), way == "onednn")
        new = graph.call_function(weight_gradient, arguments)
    for old in wanted:
        new.meta.update(old.meta)
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    ConvolutionProduct(node).drop()
    if not node.users:
        graph.erase_node(node)


def _patches(one: Convolution) -> tuple[Any, Any, Any, Any]:
    """Size, stride, padding and dilation."""
    _, stride, padding, dilation, *_ = one.settings
    return one.weight[2:], stride, padding, dilation


@functools.cache
def fastest(one: Convolution) -> Way:
    """Time all ways on images of these shapes, with this process's threads."""
    assert one.gradient is not None
    batch, _, height, width = one.gradient
    if batch * height * width > MOST_PATCHES:
        return "usual"
    gradient, images, weight = (
        torch.ones(shape, dtype=torch.float32) for shape in (one.gradient, one.images, one.weight)
    )
    sizes, *settings, (of_images, _, of_bias) = one.settings

    def backward(mask: list[bool]) -> object:
        return aten.convolution_backward(gradient, images, weight, sizes, *settings, mask)

    def by_patches(onednn: bool) -> Callable[[], object]:
        def compute() -> object:
            made: list[Any] = [weight_gradient(gradient, images, *_patches(one), onednn=onednn)]
            if of_images:
                made.append(backward([True, False, False]))
            return [*made, gradient.sum((0, 2, 3))] if of_bias else made

        return compute

    ways: dict[Way, float] = {"patches": best_of(by_patches(False), cold=True)}
    if has_onednn():
        ways["onednn"] = best_of(by_patches(True), cold=True)
    best = min(ways, key=ways.__getitem__)
    # Weights are large, and long gone from the caches when backward comes to them.
    usual = best_of(lambda: backward([of_images, True, of_bias]), cold=True)
    return best if ways[best] < CLEARLY * usual else "usual"
