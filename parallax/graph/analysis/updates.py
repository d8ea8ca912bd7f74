"""How a step updates variables, for workers to compare whose Python decides by their batches.

Each worker updates its copy of a variable itself, so all must do so alike: from the same gradients,
state and settings, by the same operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from parallax.graph.common.aliases import memory_of
from parallax.graph.common.hashes import hash_of
from parallax.graph.common.operations import returned_input, written_inputs
from parallax.graph.objects.state import Leaf
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks

_OWN = ("buffer", "tensor")
"""Kinds of state that each worker has its own of."""
_BATCH = 0
"""What follows from the batch, and from no aggregated gradient."""
_MOST_COMPARED = 4096
"""Elements of a constant tensor whose values are part of its hash."""


def updates(step: StepGraph, leaves: Mapping[str, Leaf]) -> dict[str, int]:
    """By piece of the workers' common state that a step changes, a hash of how.

    Args:
        step: as it was captured, with its gradients marked.
        leaves: the state, by name.
    """
    found = _Hashes(step)
    changed = _written(step)
    (results,) = next(iter(reversed(step.graph.nodes))).args
    assert isinstance(results, list | tuple)
    for output, result in zip(step.outputs, results, strict=True):
        if output.kind == "state" and isinstance(result, Node):
            changed[output.name] = result
    return {
        name: found.of(node)
        for name, node in sorted(changed.items())
        if name in leaves and leaves[name].kind not in _OWN
    }


def kept(step: StepGraph, leaves: Mapping[str, Leaf]) -> list[str]:
    """Buffers, tensors and numbers that a step leaves for the next one, of this worker's own."""
    made = {one.name for one in step.outputs if one.kind in ("state", "outside")}
    names = {*_written(step), *made, *step.left}
    return sorted(name for name in names if name not in leaves or leaves[name].kind in _OWN)


def _written(step: StepGraph) -> dict[str, Node]:
    """The state that a step changes in place, with its inputs."""
    written = {memory_of(one) for node in step.graph.nodes for one in written_inputs(node)}
    inputs = zip(step.inputs, step.own_placeholders(), strict=True)
    return {item.name: node for item, node in inputs if item.kind == "state" and node in written}


class _Hashes:
    """Of every value of a graph, by what it is computed from."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self._made: dict[Node, int] = {}
        self._written: dict[Node, int] = {}
        """By memory, of the operation that changed it last."""
        marked: Counter[str] = Counter()
        names = dict(zip(step.own_placeholders(), step.inputs, strict=True))
        for node in step.graph.nodes:
            if node.op == "placeholder":
                item = names[node]
                own = item.kind == "batch"
                self._made[node] = _BATCH if own else hash_of(item.kind, item.name)
            elif node.op == "get_attr":
                self._made[node] = hash_of("constant", *_constant(step, str(node.target)))
            elif node.target is marks.GRADIENT:
                name = str(node.args[1])
                self._made[node] = hash_of("gradient", name, marked[name])
                marked[name] += 1
            elif node.op == "call_function":
                self._made[node] = made = self._computed(node)
                for one in written_inputs(node):
                    self._written[memory_of(one)] = made

    def of(self, node: Node) -> int:
        """Of what a node has behind all operations that were read."""
        memory = memory_of(node)
        made, written = self._made[node], self._written.get(memory)
        if written is None or made == _BATCH:
            return made
        if written == _BATCH or _whole(node) is memory:
            return written
        return hash_of(made, written)

    def _computed(self, node: Node) -> int:
        given = [self.of(one) for one in node.all_input_nodes]
        if _BATCH in given:
            return _BATCH
        flat, spec = pytree.tree_flatten((node.args, node.kwargs))
        # In place or not: what is computed anew for its readers is the same.
        target: Any = node.target
        if isinstance(target, torch._ops.OpOverload):
            name = str(target).replace("_.", ".")
        else:  # Python's functions, whose texts have their addresses
            name = getattr(target, "__qualname__", type(target).__name__)
        return hash_of(name, str(spec), *self._constants(flat))

    def _constants(self, flat: list[Any]) -> Iterator[object]:
        for one in flat:
            if isinstance(one, Node):
                yield self.of(one)
            elif isinstance(one, torch.device):  # workers of one host have other indices
                yield one.type
            else:
                yield one


def _whole(node: Node) -> Node:
    """The tensor that an operation in place returns, or the node itself."""
    while (source := returned_input(node)) is not None:
        node = source
    return node


def _constant(step: StepGraph, name: str) -> Iterator[object]:
    """What two constants have in common that are the same."""
    value: Any = step.graph_module
    for part in name.split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor):
        yield type(value).__name__
        return
    yield from (str(value.dtype), *value.shape)
    if value.numel() <= _MOST_COMPARED and value.layout is torch.strided:
        yield value.tolist()
