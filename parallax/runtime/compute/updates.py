"""Find the updates of optimizers in a graph, and run those of many variables in one kernel.

What an optimizer does to one variable is a chain of element-wise operations. Chains that are alike
but for their tensors, with nothing between them that could tell, become one call of
:mod:`parallax.ops.updates`: SGD with or without momentum, Nesterov's and weight decay, Adam and
AdamW, for dense variables and for the part of one that a worker updates. All others stay.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.common.aliases import memory_of, tensor_of
from parallax.graph.passes.cleanup import is_effect, remove_dead
from parallax.ops.updates import SGD
from parallax.runtime.compute.update_chains import Chain, find_chains


@dataclass
class _Group:
    """Chains that run where the last of them ends, and the place before which that must be."""

    chains: list[Chain] = field(default_factory=list)
    deadline: float = math.inf


def group_updates(graph: Graph) -> int:
    """Replace the updates of a graph by calls of fused kernels. Equal up to rounding.

    Args:
        graph: in which nodes carry example values in ``meta["val"]``.

    Returns:
        How many variables' updates were replaced.
    """
    found = list(find_chains(graph))
    if not found:
        return 0
    replaced = 0
    for group in _groups(graph, found):
        _replace(graph, group)
        replaced += len(group)
    remove_dead(graph)
    return replaced


def _groups(graph: Graph, found: Sequence[Chain]) -> list[list[Chain]]:
    """Chains that can be one call: nothing else has to do with their tensors meanwhile."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    touched = _touched(graph)
    # What calls of the runtime read and change is not known.
    barriers = [
        place
        for node, place in order.items()
        if node.op == "call_function"
        and not isinstance(node.target, torch._ops.OpOverload)
        and is_effect(node)
    ]
    groups: list[list[Chain]] = []
    open_: dict[tuple[Any, ...], _Group] = {}
    for chain in found:
        places = [order[node] for node in chain.nodes]
        first, last = min(places), max(places)
        inside = set(chain.nodes)
        others = [
            order[node]
            for memory in {memory_of(tensor) for tensor in chain.tensors}
            for node in touched[memory]
            if node not in inside and order[node] > first
        ]
        following = barriers[bisect.bisect(barriers, first) :][:1]
        deadline = min([*others, *following], default=math.inf)
        if deadline < last:
            continue
        group = open_.get(chain.key)
        if group is None or group.deadline < last:
            group = open_[chain.key] = _Group()
            groups.append(group.chains)
        group.chains.append(chain)
        group.deadline = min(group.deadline, deadline)
    return groups


def _touched(graph: Graph) -> dict[Node, list[Node]]:
    """By memory, what reads or changes it."""
    touched: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function":
            for memory in {memory_of(source) for source in node.all_input_nodes}:
                touched[memory].append(node)
    return touched


def _replace(graph: Graph, chains: Sequence[Chain]) -> None:
    """Put one call where the last of the chains ends."""
    last = chains[-1].nodes[0]
    columns = [list(column) for column in zip(*(chain.tensors for chain in chains), strict=True)]
    numbers = chains[0].numbers
    if chains[0].kernel is SGD:
        arguments = [*columns, *([[]] if len(columns) == 2 else []), *numbers]
    else:
        arguments = [*columns, [chain.step for chain in chains], *numbers]
    with graph.inserting_after(last):
        graph.call_function(chains[0].kernel, tuple(arguments))
    for chain in chains:
        inside = set(chain.nodes)
        for node in chain.nodes:
            for user in [user for user in node.users if user not in inside]:
                # Others see the tensor itself, which the kernel has changed by then.
                user.replace_input_with(node, tensor_of(node))
    left = {node for chain in chains for node in chain.nodes}
    while left:
        done = [node for node in left if not node.users]
        for node in done:
            graph.erase_node(node)
        left.difference_update(done)
