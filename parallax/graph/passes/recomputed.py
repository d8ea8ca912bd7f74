"""Numbers that a checkpoint has computed are not computed again in the backward pass.

A checkpoint runs its function once more for what the backward pass reads, so that tensors with rows
of the batch need not be kept. Numbers, and tensors of a few, cost nothing to keep. Taken from the
first run, each is one number of the step: that of a mean, or of how many labels count, can be told
to other workers once, and is the same on the way back.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from parallax.graph.common.aliases import memory_of
from parallax.graph.common.operations import is_random, written_inputs
from parallax.graph.step_graph import StepGraph

_MOST_ELEMENTS = 4096
"""Of a tensor that is kept."""


def take_numbers_once(step: StepGraph) -> None:
    """Replace numbers that are recomputed by those of the first run.

    What first ran without autograd, since its function has a backward pass of its own, has the
    notes of the run that is differentiated.
    """
    if not any("recomputed" in node.meta for node in step.graph.nodes):
        return
    found = list(_recomputed(step.graph_module))
    for again, first in found:
        if first.meta.get("autograd") == "function":
            for note in ("autograd", "forward"):
                if note in again.meta:
                    first.meta[note] = again.meta[note]
    for again, first in found:
        if _is_small(again):
            again.replace_all_uses_with(first)


def _recomputed(module: GraphModule) -> Iterator[tuple[Node, Node]]:
    """What is recomputed, each with what has computed the same before."""
    nodes = list(module.graph.nodes)
    written = {memory_of(one) for node in nodes for one in written_inputs(node)}
    writes: collections.Counter[Node] = collections.Counter()
    """How often memory was changed up to a node."""
    same: dict[Node, Node] = {}
    first: dict[Any, collections.deque[Node]] = collections.defaultdict(collections.deque)
    for node in nodes:
        if node.op in ("call_function", "get_attr") and not is_random(node):

            def known(one: Node) -> Any:
                return same.get(one, one), writes[memory_of(one)]

            made_of = map_arg((node.args, node.kwargs), known)
            key = _hashable((_constant(module, node) or node.target, made_of))
            if "recomputed" not in node.meta:
                first[key].append(node)
            elif earlier := first.get(key):
                # Alike operations are run again in their order.
                same[node] = earlier[0]
                if len(earlier) > 1:
                    earlier.popleft()
                if memory_of(node) not in written and memory_of(earlier[0]) not in written:
                    yield node, same[node]
        writes.update({memory_of(one) for one in written_inputs(node)})


def _constant(module: GraphModule, node: Node) -> Any:
    """What a node is that brings a small tensor, which is no input."""
    value = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    if not isinstance(value, torch.Tensor) or value.numel() > _MOST_ELEMENTS:
        return None
    return str(value.dtype), str(value.device), tuple(value.shape), repr(value.tolist())


def _hashable(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value).__name__, *map(_hashable, value)
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, slice):
        return "slice", _hashable((value.start, value.stop, value.step))
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        value = str(value)
    # Numbers that are equal are not always the same: zero and False, one and 1.0.
    return type(value).__name__, value


def _is_small(node: Node) -> bool:
    value = node.meta.get("val")
    count = value.numel() if isinstance(value, torch.Tensor) else None
    return isinstance(count, int) and count <= _MOST_ELEMENTS
