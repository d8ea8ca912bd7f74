"""A step that holds for batches of many shapes, written out for one of them.

A device can record what it does for one shape alone, so for a shape that comes often the sizes that
are symbols elsewhere become numbers, and so does what is computed from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from parallax.graph.common.torch_internals import FakeTensorMode, evaluate
from parallax.graph.passes.cleanup import remove_dead
from parallax.graph.step_graph import StepGraph

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def with_sizes(step: StepGraph, values: Mapping[Any, int]) -> StepGraph:
    """The same step with a graph for one shape.

    Args:
        step: is left as it is. Nodes carry example values in ``meta["val"]``.
        values: by symbol the size that it stands for.
    """
    result = step.copy(runs=False)
    mode = FakeTensorMode()
    numbers: dict[Node, float | int] = {}

    def written(node: Node) -> Any:
        return numbers.get(node, node)

    for node in result.graph.nodes:
        if any(source in numbers for source in node.all_input_nodes):
            node.args = map_arg(node.args, written)
            node.kwargs = map_arg(node.kwargs, written)
        if "val" not in node.meta:
            continue
        value = _fixed(node.meta["val"], values, mode)
        node.meta["val"] = value
        if node.op == "call_function" and isinstance(value, int | float):
            numbers[node] = value
    remove_dead(result.graph)
    return result


def _fixed(value: Any, values: Mapping[Any, int], mode: FakeTensorMode) -> Any:
    """An example value with numbers for these symbols; others stay."""
    if isinstance(value, tuple | list):
        return type(value)(_fixed(part, values, mode) for part in value)
    if isinstance(value, _SYMBOLIC):
        found = value.node.expr
        return evaluate(found, dict(values)) if found.free_symbols <= values.keys() else value
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    symbolic = [*value.shape, *value.stride()]
    if all(isinstance(size, int) for size in symbolic):
        return value
    fixed = [_fixed(size, values, mode) for size in symbolic]
    if not all(isinstance(size, int) for size in fixed):
        return value  # its size is decided by the values of a batch
    shape, strides = fixed[: value.dim()], fixed[value.dim() :]
    with mode:
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
