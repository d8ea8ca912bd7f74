"""Tidy a captured graph: what remains is what has to run, and no more than eager mode runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.graph import CodeGen

from parallax.graph.common.operations import is_random, is_view, note_detached
from parallax.graph.passes.assigned import settle_assigned
from parallax.graph.passes.backwards import keep_marks_in_use
from parallax.graph.passes.in_place import compute_anew
from parallax.graph.passes.inner_gradients import leave_inner_gradients
from parallax.graph.passes.padded_bags import weigh_padding
from parallax.graph.passes.recomputed import take_numbers_once
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks

aten: Any = torch.ops.aten

_SAME_VALUE = {aten.detach.default, aten.alias.default}


def clean(step: StepGraph) -> None:
    """Apply every tidying pass, in order. The graph has to be compiled anew."""
    step.graph.set_codegen(CodeGen())
    _read_numbers_directly(step)
    _drop_no_ops(step.graph)
    weigh_padding(step.graph)
    compute_anew(step)
    take_numbers_once(step)
    remove_dead(step.graph)  # which may be all that reads a gradient
    settle_assigned(step)
    leave_inner_gradients(step)
    keep_marks_in_use(step.graph)
    _drop_copies_before_marks(step.graph)
    remove_dead(step.graph)
    _drop_unused_inputs(step)


def _read_numbers_directly(step: StepGraph) -> None:
    """A lifted number arrives as a Python number, not as a tensor to read it from."""
    for item, node in zip(step.inputs, step.placeholders(), strict=True):
        users = list(node.users)
        read = aten._local_scalar_dense.default
        if item.number and len(users) == 1 and users[0].target is read:
            node.meta["val"] = users[0].meta["val"]
            users[0].replace_all_uses_with(node)
            step.graph.erase_node(users[0])


def _drop_no_ops(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _SAME_VALUE:
            if node.target is aten.detach.default:
                note_detached(node)
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if "profiler" in str(node.target) and node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _drop_copies_before_marks(graph: torch.fx.Graph) -> None:
    """Autograd copies a gradient that someone else holds; while tracing the tracer holds all."""
    for node in list(graph.nodes):
        if node.target is not marks.GRADIENT:
            continue
        copy = node.args[0]
        if copy.target is not aten.clone.default or len(copy.users) > 1:
            continue
        source = copy.args[0]
        if source.op == "call_function" and len(source.users) == 1 and not is_view(source):
            copy.replace_all_uses_with(source)
            graph.erase_node(copy)


def is_effect(node: Node) -> bool:
    """Whether a node must run although nobody uses its value."""
    if node.op in ("placeholder", "output"):
        return True
    target = node.target
    if target in (marks.SET_RNG_STATE, marks.RNG_STATE):
        return True
    if getattr(target, "parallax_effect", False):
        return True
    schema = getattr(target, "_schema", None)
    if is_random(node) or (schema is not None and schema.is_mutable):
        return True
    return "batch_norm" in str(target) and "backward" not in str(target)


def remove_dead(graph: torch.fx.Graph) -> None:
    """Remove what nobody uses and what has no effect."""
    for node in reversed(list(graph.nodes)):
        if not node.users and not is_effect(node):
            graph.erase_node(node)


def _drop_unused_inputs(step: StepGraph) -> None:
    kept = []
    for item, node in zip(step.inputs, step.placeholders(), strict=True):
        if node.users:
            kept.append(item)
        else:
            step.graph.erase_node(node)
    step.inputs = tuple(kept)
