"""The order of backward: a weight's gradient before that of its layer's input.

Autograd computes the gradient of a layer's input first. In the other order the weight's gradient is
known by the time of one product sooner, and can leave, while all that comes after both is known
when it was before: wait-free backpropagation (Zhang's thesis, section 3.2) begins earlier.
"""

from __future__ import annotations

import itertools

from torch.fx import Graph, Node

from parallax.graph.analysis.compute import computes_much
from parallax.graph.common.aliases import base_of, known_after, writes_to
from parallax.graph.common.operations import is_view, is_write, must_stay
from parallax.ops import marks


def advance_gradients(graph: Graph) -> int:
    """Compute each gradient as soon as what it needs is known, and the gradient before it.

    Only the operation that gives a gradient moves, and the views that it reads; what is random,
    writes, or would meet other values of what it reads stays where it is. No gradient passes
    another: workers whose batches differ may have other graphs, but send in the same order.

    Returns:
        How many gradients are computed earlier.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    found = graph.find_nodes(op="call_function", target=marks.GRADIENT)
    sources = {known_after(mark) for mark in found}
    others = (computes_much(node) and node not in sources for node in order)
    much = list(itertools.accumulate(others, initial=0))
    group = dict(order)
    """By node, the first place of the one behind which it is now; its own if it has not moved."""
    last = dict(enumerate(order))
    """By first place, the last node behind that one."""
    advanced = 0
    previous: list[Node] = []
    for source in sorted(sources, key=order.__getitem__):
        if source.target is not marks.GRADIENT and not must_stay(source):
            views, needed = _read(source)
            changes = [change for node in needed for change in _changes(node, source, order)]
            after = max((group[node] for node in changes + previous), default=order[source])
            # Something that takes time lies between, and is no other gradient.
            if much[after + 1] < much[order[source]]:
                for node in sorted({source, *views}, key=order.__getitem__):
                    if group[node] > after:
                        last[after].append(node)
                        last[after], group[node] = node, after
                advanced += 1
        previous = [source]
    return advanced


def _read(source: Node) -> tuple[set[Node], set[Node]]:
    """The views that a computation reads, and what these are views of."""
    views: set[Node] = set()
    needed: set[Node] = set()
    queue = list(source.all_input_nodes)
    while queue:
        node = queue.pop()
        if node.op == "call_function" and is_view(node) and not is_write(node):
            if node not in views:
                views.add(node)
                queue += node.all_input_nodes
        else:
            needed.add(node)
    return views, needed


def _changes(node: Node, before: Node, order: dict[Node, int]) -> list[Node]:
    """Where a tensor gets its values that another node reads."""
    written = writes_to(base_of(node))
    return [node, *(one for one in written if order[one] < order[before])]
