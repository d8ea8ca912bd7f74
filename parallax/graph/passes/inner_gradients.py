"""Gradients of one item's loss that another loss is computed with: steps of MAML's inner loop.

Of first order, these are results of ``torch.autograd.grad`` like those that an optimizer takes. But
a task's gradient is that task's own, and not to be averaged with those of other workers' tasks.
"""

from __future__ import annotations

from torch.fx import Node

from parallax.graph.analysis.batch_elements import BatchElements
from parallax.graph.analysis.loss_terms import backward_passes, made_of
from parallax.graph.common.operations import ancestors
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks


def leave_inner_gradients(step: StepGraph) -> None:
    """Remove marks of gradients of one item's loss from which a later loss follows."""
    found = step.graph.find_nodes(op="call_function", target=marks.GRADIENT)
    passes = list(backward_passes(step.graph))
    if not found or len(passes) < 2:
        return
    leading = ancestors(loss for _, loss in passes)
    inner = [mark for mark in found if mark in leading]
    if not inner:
        return
    of_batch = BatchElements(step, ())
    order = {node: place for place, node in enumerate(step.graph.nodes)}
    for mark in inner:
        behind = ancestors([mark])
        own = [(seed, loss) for seed, loss in passes if seed in behind]
        _, loss = max(own, key=lambda one: order[one[0]], default=(None, None))
        if loss is not None and _is_of_item(loss, of_batch):
            source = mark.args[0]
            assert isinstance(source, Node)
            mark.replace_all_uses_with(source)
            step.graph.erase_node(mark)


def note_inner_gradients(step: StepGraph) -> None:
    """Note a loss that is computed with gradients of parameters for a loss over several rows, where
    gradients are averaged over workers."""
    if step.differentiated is None:
        return
    passes = list(backward_passes(step.graph))
    of_batch = BatchElements(step, ())
    behind = {loss: made_of([loss]) for _, loss in passes}
    for seed, loss in passes:
        is_inner = any(seed in nodes for other, nodes in behind.items() if other is not loss)
        if is_inner and not _is_of_item(loss, of_batch):
            step.notes.append(
                "a loss is computed with gradients of parameters (create_graph=True), which on "
                "several workers are those of each one's own batch: a penalty on their norm is "
                f"not that of one device ({step.differentiated})"
            )
            return


def _is_of_item(loss: Node, of_batch: BatchElements) -> bool:
    """Whether all that a loss has of the batch is taken by its place along the first dimension."""
    found = False
    seen: set[Node] = set()
    queue = [loss]
    while queue:
        node = queue.pop()
        if node in seen or node not in of_batch.batch:
            continue
        seen.add(node)
        if of_batch.takes_row(node):
            found = True
        elif node.op == "placeholder":
            return False
        else:
            queue += node.all_input_nodes
    return found
