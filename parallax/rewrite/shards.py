"""Move the update of sharded variables to the worker that owns the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.layout import Component, Reduction
from parallax.graph.common.operations import is_write
from parallax.ops.resources import combine, partial_reduction, pull_values
from parallax.ops.specs import CombineSpec, PullSpec, ReductionSpec
from parallax.rewrite.context import Rewriting
from parallax.strategy.layout import RowLayout
from parallax.strategy.registry import facts

aten: Any = torch.ops.aten


def place_on_shards(work: Rewriting) -> None:
    """Let members of each sharded variable's component work on the owner's rows."""
    names = work.sharded()
    viewed = [
        name
        for name in names
        if facts(work.strategy.variables[name]).whole and work.step.placeholder(name) is not None
    ]
    shards = work.shard_inputs(viewed)
    for name in names:
        component = work.analysis.components[name]
        layout = work.layout(name)
        whole = facts(work.strategy.variables[name]).whole
        for leaf in (*component.states, *component.created):
            if leaf != name or not whole:
                work.result.sharded[leaf] = layout
        for node in component.sized:
            _resize(node, layout, layout.local_rows(work.worker))
        if name in shards:
            _use_view(work, name, component, shards[name])


def _resize(node: Node, layout: RowLayout, rows: int) -> None:
    args = list(node.args)
    position = 2 if node.target is aten._sparse_coo_tensor_with_dims_and_tensors.default else 0
    args[position] = list(layout.shape_of(list(args[position]), rows))  # type: ignore[arg-type]
    node.args = tuple(args)


def _use_view(work: Rewriting, name: str, component: Component, shard: Node) -> None:
    whole = work.step.placeholder(name)
    assert whole is not None
    work.result.views[name] = work.layout(name)
    reductions = {reduction.node for reduction in component.reductions}
    for user in list(whole.users):
        if user in component.members or user in reductions:
            user.replace_input_with(whole, shard)


def combine_reductions(work: Rewriting) -> None:
    """Combine norms and other reductions over shards; those known together in one message."""
    reductions: dict[Node, Reduction] = {}
    for name in work.sharded():
        for reduction in work.analysis.components[name].reductions:
            reductions[reduction.node] = reduction
    waiting: dict[Node, Reduction] = {}
    for node in list(work.graph.nodes):
        if waiting and any(source in waiting for source in node.all_input_nodes):
            _combine(work, list(waiting.values()), node)
            waiting = {}
        if node in reductions:
            waiting[node] = reductions[node]


def _combine(work: Rewriting, reductions: list[Reduction], first_use: Node) -> None:
    specs = []
    parts = []
    for reduction in reductions:
        source = reduction.node.args[0]
        assert isinstance(source, Node)
        specs.append(
            ReductionSpec(
                reduction.kind,
                reduction.order,
                source.meta["val"].numel(),
                reduction.node.meta["val"].dtype,
            )
        )
        with work.graph.inserting_before(reduction.node):
            parts.append(
                work.call(partial_reduction, source, reduction.kind, float(reduction.order))
            )
    resource = work.resource(CombineSpec(tuple(specs)), "combiner")
    with work.graph.inserting_before(first_use):
        combined = work.call(combine, resource, parts)
        for index, reduction in enumerate(reductions):
            value = work.item(combined, index)
            shape = list(reduction.node.meta["val"].shape)
            if shape:
                value = work.call(aten.reshape.default, value, shape)
            value.meta.update(reduction.node.meta)
            reduction.node.replace_all_uses_with(value)
            work.graph.erase_node(reduction.node)


def pull_new_values(work: Rewriting) -> None:
    """After owners updated dense variables, bring all workers up to date before the next read."""
    owned = [name for name in work.sharded() if facts(work.strategy.variables[name]).whole]
    wholes = {name: place for name in owned if (place := work.step.placeholder(name)) is not None}
    writers: dict[Node, list[str]] = {}
    for name in wholes:
        for node in work.analysis.components[name].members:
            if is_write(node) and _writes_variable(work, node, name):
                writers.setdefault(node, []).append(name)
    order = {name: index for index, name in enumerate(wholes)}
    stale: dict[Node, str] = {}
    for node in list(work.graph.nodes):
        stale.update({wholes[name]: name for name in writers.get(node, ())})
        if stale and (node.op == "output" or any(s in stale for s in node.all_input_nodes)):
            alike: dict[tuple[int, ...] | None, list[str]] = {}
            for name in sorted(stale.values(), key=order.__getitem__):
                alike.setdefault(work.ring(name), []).append(name)
            for names in alike.values():
                _pull(work, names, node)
            stale = {}


def _writes_variable(work: Rewriting, node: Node, name: str) -> bool:
    """Whether an in-place operation's target is the variable itself (and not a slot)."""
    target = node.args[0] if not node.kwargs.get("out") else node.kwargs["out"]
    while isinstance(target, Node) and target.op == "call_function" and is_write(target):
        target = target.args[0]
    return (
        isinstance(target, Node)
        and target.name.startswith("shard_of_")
        and (target.meta.get("leaf") == name)
    )


def _pull(work: Rewriting, names: list[str], before: Node) -> None:
    variables = [work.analysis.variables[name] for name in names]
    spec = PullSpec(
        tuple(names),
        tuple(variable.shape for variable in variables),
        tuple(variable.dtype for variable in variables),
        tuple(work.layout(name).ranges() for name in names),
        tuple(work.layout(name).axis for name in names),
        work.ring(names[0]),
    )
    resource = work.resource(spec, "values")
    with work.graph.inserting_before(before):
        work.call(pull_values, resource, [work.step.placeholder(name) for name in names])
