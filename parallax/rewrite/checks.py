"""Let checks of what the step computes fail on all workers, if they fail on one.

A worker that raises alone leaves others waiting for its gradients. What the checks before an update
found goes to all workers in one message, which is awaited in front of that update: when gradients
have come, so that none is under way if all raise.
"""

from __future__ import annotations

from torch.fx import Node

from parallax.graph.common.aliases import memory_of
from parallax.graph.common.operations import written_inputs
from parallax.graph.symbols.assertions import enforce
from parallax.ops.checks import ChecksSpec
from parallax.ops.factors import update_by_product
from parallax.ops.resources import finish, leave, settle, start, update_in_blocks
from parallax.rewrite.context import Rewriting, updates_of

_UPDATES = {update_by_product, update_in_blocks, leave, settle}


def share_checks(work: Rewriting) -> None:
    """The pass."""
    nodes = list(work.graph.nodes)
    if work.workers == 1 or not any(node.target is enforce for node in nodes):
        return
    groups: dict[Node, list[Node]] = {}
    deadline = nodes[-1]
    updates = updates_of(work.analysis)
    for node in reversed(nodes):
        if node in updates:
            deadline = node
        elif node.target is enforce:
            groups.setdefault(deadline, []).append(node)
    resource = work.resource(ChecksSpec((), len(groups)), "checks")
    for number, (update, checks) in enumerate(groups.items()):
        with work.graph.inserting_before(checks[0]):
            found = [one for check in reversed(checks) for one in check.all_input_nodes]
            work.call(start, resource, number, found)
        with work.graph.inserting_before(update):
            work.call(finish, resource, number)
        for check in checks:
            work.graph.erase_node(check)


def settle_checks(work: Rewriting) -> None:
    """The pass that comes last: await what checks found right in front of what changes state."""
    shared = {
        node
        for node, spec in zip(work.resource_nodes, work.result.resources, strict=True)
        if isinstance(spec, ChecksSpec)
    }
    for node in work.graph.find_nodes(op="call_function", target=finish):
        if node.args[0] in shared:
            following = node.next
            while following.op != "output" and not _changes_state(following):
                following = following.next
            following.prepend(node)


def _changes_state(node: Node) -> bool:
    if node.target in _UPDATES:
        return True
    return any(memory_of(written).op == "placeholder" for written in written_inputs(node))
