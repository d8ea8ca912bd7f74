"""Gradients that the step computed some other way and put into ``.grad`` itself.

What is assigned is a gradient of this worker, to be aggregated, if it follows from the batch (or
from random numbers) and from no gradient that was marked before. Else it is what the step makes of
gradients that are aggregated, or the same on all workers, and stays as it is.
"""

from __future__ import annotations

from torch.fx import Node

from parallax.graph.aliases import memory_of
from parallax.graph.operations import is_random, written_inputs
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks


def settle_assigned(step: StepGraph) -> None:
    """Leave marks on what is assigned only where it is a gradient of this worker."""
    found = step.graph.find_nodes(op="call_function", target=marks.GRADIENT)
    if not any(len(node.args) > 2 for node in found):
        return
    inputs = zip(step.inputs, step.placeholders(), strict=True)
    local = {node for item, node in inputs if item.kind == "batch"}
    marked: set[Node] = set()
    for node in list(step.graph.nodes):
        if node.op != "call_function":
            continue
        is_mark = node.target is marks.GRADIENT
        if is_mark and len(node.args) > 2:
            value: Node = node.args[0]
            if _follows(value, marked) or not _follows(value, local):
                node.replace_all_uses_with(value)
                step.graph.erase_node(node)
                continue
            node.args = node.args[:2]
        if is_mark or any(_follows(source, marked) for source in node.all_input_nodes):
            _spread(node, marked)
        if not is_mark and (
            is_random(node) or any(_follows(source, local) for source in node.all_input_nodes)
        ):
            _spread(node, local)


def _follows(node: Node, among: set[Node]) -> bool:
    return node in among or memory_of(node) in among


def _spread(node: Node, among: set[Node]) -> None:
    among.add(node)
    among.update(memory_of(source) for source in written_inputs(node))
