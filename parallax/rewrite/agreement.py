"""Find changes of shared state that would differ between workers.

A value is *local* when it follows from this worker's batch or random numbers, until a gradient is
aggregated. Parameters and their slots must only ever be changed by values that are equal on all
workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from parallax.errors import UnsupportedError, VariableError
from parallax.graph.common.interface import GraphOutput
from parallax.graph.common.operations import is_random, is_write
from parallax.graph.common.user_code import line_of
from parallax.graph.objects.state import Leaf
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks

aten: Any = torch.ops.aten

_SCALES = {
    aten.mul.Tensor,
    aten.mul_.Tensor,
    aten.div.Tensor,
    aten.div_.Tensor,
    aten._foreach_mul_.Tensor,
    aten._foreach_mul_.Scalar,
    aten._foreach_div_.Tensor,
}
_SAME = {*_SCALES, aten.detach.default, aten.alias.default, aten.clone.default}


def check_agreement(step: StepGraph, leaves: Mapping[str, Leaf]) -> None:
    """Check what changes parameters and slots.

    Raises:
        VariableError: one is changed by a value that differs between workers.
        UnsupportedError: a scheduler or a setting of an optimizer is given such a value.
    """
    inputs = step.placeholders()
    names = {
        node: item.name
        for item, node in zip(step.inputs, inputs, strict=True)
        if item.kind == "state"
    }
    pairs = list(zip(step.inputs, inputs, strict=True))
    given = {node for item, node in pairs if item.kind == "batch"}
    outside = {item.name: node for item, node in pairs if item.kind == "outside"}
    while True:
        local = _local(step, leaves, names, given)
        # What this step leaves of its batch in a number, the next one reads.
        left = {
            outside[output.name]
            for output, value in _outputs(step)
            if output.name in outside and output.kind == "outside" and value in local
        } - given
        if not left:
            break
        given |= left
    _check_outputs(step, leaves, local)


def _outputs(step: StepGraph) -> list[tuple[GraphOutput, Any]]:
    values: Any = next(node for node in step.graph.nodes if node.op == "output").args[0]
    return list(zip(step.outputs, values, strict=True))


def _local(
    step: StepGraph, leaves: Mapping[str, Leaf], names: Mapping[Node, str], given: set[Node]
) -> set[Node]:
    """What follows from these inputs, or from random numbers.

    Raises:
        VariableError: a parameter or a slot is changed by it.
    """
    local = set(given)
    base: dict[Node, Node] = {}
    for node in step.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is marks.GRADIENT:
            continue
        tainted = is_random(node) or any(
            source in local or base.get(source) in local for source in node.all_input_nodes
        )
        if tainted:
            local.add(node)
        written = _written(node)
        if not written:
            _follow_view(node, base)
            continue
        if written[0] is node.args[0]:
            base[node] = base.get(written[0], written[0])
        for target in dict.fromkeys(base.get(item, item) for item in written):
            if not tainted or (target in local and len(node.all_input_nodes) == 1):
                continue
            local.add(target)
            name = names.get(target)
            leaf = leaves.get(name) if name is not None else None
            if leaf is not None and (leaf.kind == "slot" or _is_trained(leaf)):
                raise _error(leaf, node, _multiplied(step, local))
    return local


def _multiplied(step: StepGraph, local: set[Node]) -> Node | None:
    """Where gradients of all workers are multiplied by a number of this worker's batch."""
    of_all: set[Node] = set()
    nodes: list[Node] = list(step.graph.nodes)
    for node in nodes:
        sources = set(node.all_input_nodes)
        if node in local and node.target in _SCALES and not of_all.isdisjoint(sources):
            return node
        if node.target is marks.GRADIENT or (
            node.target in _SAME and not of_all.isdisjoint(sources)
        ):
            of_all.add(node)
    return None


def _is_trained(leaf: Leaf) -> bool:
    return leaf.kind == "parameter" and bool(leaf.value.requires_grad)


def _check_outputs(step: StepGraph, leaves: Mapping[str, Leaf], local: set[Node]) -> None:
    for output, value in _outputs(step):
        if value not in local:
            continue
        if output.kind == "call":
            raise UnsupportedError(
                "The step steps a scheduler with a value of this worker's batch: workers would "
                "go on with different learning rates.",
                hint="step it outside the step with a value that is equal on all workers, for "
                "example a validation loss over all data.",
                where=line_of(value),
            )
        leaf = leaves.get(output.name) if output.kind == "state" else None
        if leaf is not None and leaf.kind == "slot":
            raise _error(leaf, value)
        if leaf is not None and leaf.kind == "group":
            raise UnsupportedError(
                f"The step sets {leaf.name} to a value of this worker's batch: workers would go on "
                "with different settings.",
                hint="use a torch.optim.lr_scheduler, or set it outside the step before "
                "runner.run().",
                where=line_of(value),
            )


def _written(node: Node) -> list[Node]:
    """The arguments that a node writes to."""
    if not is_write(node):
        return []
    schema: Any = getattr(node.target, "_schema", None)
    found: list[Node] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        items: Any = value if isinstance(value, list | tuple) else [value]
        found += [item for item in items if isinstance(item, Node)]
    return found


def _follow_view(node: Node, base: dict[Node, Node]) -> None:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not node.args or not isinstance(node.args[0], Node):
        return
    if any(result.alias_info is not None for result in schema.returns):
        base[node] = base.get(node.args[0], node.args[0])


def _error(leaf: Leaf, node: Node, multiplied: Node | None = None) -> VariableError:
    """
    Args:
        leaf: what is changed.
        node: by which operation.
        multiplied: where its gradient is multiplied by a number of the batch, if it is.
    """
    if multiplied is not None:
        return VariableError(
            f"The step multiplies the gradient of {leaf.name!r}, which is that of all workers' "
            "batches, by a number of this worker's batch: workers would drift apart.",
            hint="multiply or divide the loss by it instead, before loss.backward(): what a loss "
            "is divided by is added up over all workers.",
            where=line_of(multiplied),
        )
    kind = "parameter" if leaf.kind == "parameter" else "optimizer state"
    operation = str(node.target).removeprefix("aten.")
    return VariableError(
        f"The step changes the {kind} {leaf.name!r} outside its gradient's way, by a value that "
        f"follows from this worker's batch or random numbers ({operation}): workers would drift "
        "apart.",
        hint="change parameters by an optimizer, from gradients of loss.backward(), or by values "
        "that do not depend on the batch; keep such state in a buffer instead. A learning rate is "
        "set outside the step, before runner.run(), not passed with the batch.",
        where=line_of(node),
    )
