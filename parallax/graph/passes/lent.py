"""Gradients of zero for what only other workers' batches have gradients of.

A step whose Python decides by values of the batch (``if len(boxes):``) leaves out a part of the
model where a batch has nothing for it. On one device with all workers' batches that part has
gradients, to which the batches without it add nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.common.operations import ancestors
from parallax.graph.step_graph import Gradients
from parallax.ops import marks


@dataclass(frozen=True)
class Lent:
    """Gradients of zero.

    Args:
        passes: by variable that is to have one if it has none, after which backward pass.
        order: of all workers' gradients.
        as_products: those of matrices are products of nothing, as strategies may send factors.
    """

    passes: Mapping[str, int] = field(default_factory=dict)
    order: Sequence[str] = ()
    as_products: bool = True

    def gradient(self, variable: torch.Tensor) -> torch.Tensor:
        """A gradient of zero."""
        if not self.as_products or variable.dim() != 2:
            return torch.zeros_like(variable)
        rows, columns = (variable.new_zeros(0, size) for size in variable.shape)
        return torch.mm(rows.t(), columns)


NOTHING_LENT = Lent()
_MOST_NODES = 6
"""Of a gradient of zero, with the variable and the mark."""


def gradients_of(graph: Graph, passes: Mapping[str, int]) -> Gradients:
    """What a step has gradients of that other workers can have as zeros: no sparse ones.

    Args:
        graph: of the step.
        passes: by variable, the backward pass that it first has a gradient of.
    """
    found: dict[str, int] = {}
    for mark in graph.find_nodes(op="call_function", target=marks.GRADIENT):
        name: Any = mark.args[1]
        if name in passes and mark.meta["val"].layout is torch.strided:
            found.setdefault(name, passes[name])
    return tuple(found.items())


def missing(own: Gradients, all_of_them: Sequence[Gradients]) -> Lent:
    """What a worker lacks of all workers' gradients."""
    order: list[str] = []
    passes: dict[str, int] = {}
    for gradients in sorted(all_of_them, key=len, reverse=True):
        place = 0
        for name, number in gradients:
            passes.setdefault(name, number)
            if name in order:
                place = order.index(name) + 1
            else:
                order.insert(place, name)
                place += 1
    known = dict(own)
    return Lent({name: number for name, number in passes.items() if name not in known}, order)


def put_in_order(graph: Graph, lent: Lent) -> None:
    """Let gradients of zero come where other workers have them: they depend on nothing."""
    if not lent.passes:
        return
    marked: dict[str, Node] = {}
    for mark in graph.find_nodes(op="call_function", target=marks.GRADIENT):
        marked.setdefault(str(mark.args[1]), mark)
    order = {node: place for place, node in enumerate(graph.nodes)}
    following: Node | None = None
    for name in reversed(lent.order):
        if (mark := marked.get(name)) is None:
            continue
        made = sorted(ancestors([mark]), key=order.__getitem__)
        if name in lent.passes and following is not None and len(made) <= _MOST_NODES:
            for node in made:
                if node.op != "placeholder":
                    following.prepend(node)
        following = mark
