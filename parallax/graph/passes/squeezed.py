"""Squeeze out the same dimensions of any batch.

A graph with a symbol for how many rows a batch has holds for one row, too, whose dimension
``squeeze()`` would leave out as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from parallax.graph.common.operations import add_call

aten: Any = torch.ops.aten

_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}


def squeeze_alike(graph: Graph) -> None:
    """Have all squeezes leave out the dimensions that are one whatever the sizes of the batch."""
    for node in list(graph.nodes):
        if node.target not in _SQUEEZES:
            continue
        source: Any = node.args[0]
        shape = source.meta["val"].shape
        if all(isinstance(size, int) for size in shape):
            continue
        given: Any = node.args[1] if len(node.args) > 1 else range(len(shape))
        several = [given] if isinstance(given, int) else given
        alone = [dim for dim in several if isinstance(shape[dim], int) and shape[dim] == 1]
        with graph.inserting_before(node):
            squeezed = add_call(graph, aten.squeeze.dims, source, alone)
        squeezed.meta = node.meta
        node.replace_all_uses_with(squeezed)
        graph.erase_node(node)
