"""Scattered variables: ReduceScatter, sharded update, AllGather (ZeRO; GShard-like partitioning).

Every worker holds some rows of a variable and of its slots, receives their gradients, summed, and
updates them. New values are not sent after the update but when the next step begins, and awaited
where each variable is first read: they travel while the model computes forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.variables import Variable
from parallax.ops.resources import finish, start
from parallax.ops.values import GatherSpec
from parallax.rewrite.context import Rewriting
from parallax.rewrite.synchronizers.dense import (
    RING,
    half_each_way,
    scatter_and_gather,
    scatter_and_gather_across,
    sum_in_buckets,
)
from parallax.strategy.data import VariableStrategy
from parallax.strategy.registry import Synchronizer

aten: Any = torch.ops.aten

NAME = "scatter"


def synchronize_scattered(work: Rewriting) -> None:
    """Gather whole values before they are read, and sum gradients at the owners of their rows."""
    _gather(work, _reads(work))
    for number in range(len(work.phases)):
        sum_in_buckets(work, number, NAME)


def _reads(work: Rewriting) -> dict[str, list[Node]]:
    """By variable, what reads it whole: all that its shard cannot do.

    All of it comes before the update: a variable whose new values are read in the same step cannot
    be sharded.
    """
    reads: dict[str, list[Node]] = {}
    for name in work.names_with(NAME):
        place = work.step.placeholder(name)
        component = work.analysis.components[name]
        own = {*component.members, *(reduction.node for reduction in component.reductions)}
        found = [] if place is None else [user for user in place.users if user not in own]
        if found:
            reads[name] = found
    return reads


def _gather(work: Rewriting, reads: dict[str, list[Node]]) -> None:
    """Start the messages one after the other, and await each where it, or one after it, is first
    read. They are in the strategy's order, which workers share whose graphs read in another."""
    order = work.order()
    first_read = {name: min(found, key=order.__getitem__) for name, found in reads.items()}
    messages: dict[object, list[str]] = {}
    # Sorting keeps the order of the strategy's variables.
    for name in sorted(reads, key=lambda name: work.strategy.variables[name].pull_group):
        pulled = work.strategy.variables[name].pull_group
        key = (work.analysis.variables[name].dtype, pulled, work.ring(name))
        messages.setdefault(key, []).append(name)
    if not messages:
        return
    resource = work.resource(_spec(work, list(messages.values())), "gather")
    begin = next(n for n in work.graph.nodes if n.op not in ("placeholder", "get_attr"))
    left = list(messages.values())
    for number, group in enumerate(messages.values()):
        read = min((first_read[n] for one in left for n in one), key=order.__getitem__)
        left.pop(0)
        with work.graph.inserting_before(begin):
            shards = [work.step.placeholder(name) for name in group]
            work.call(start, resource, number, shards)
        with work.graph.inserting_before(read):
            values = work.call(finish, resource, number)
            wholes = [work.item(values, index) for index in range(len(group))]
        for name, whole in zip(group, wholes, strict=True):
            _replace(work, name, reads[name], whole)
        begin = wholes[-1].next


def _spec(work: Rewriting, messages: Sequence[Sequence[str]]) -> GatherSpec:
    names = [name for group in messages for name in group]
    variables = [work.analysis.variables[name] for name in names]
    return GatherSpec(
        tuple(names),
        tuple(variable.shape for variable in variables),
        tuple(_strides(work, name) for name in names),
        tuple(variable.dtype for variable in variables),
        tuple(work.layout(name).ranges() for name in names),
        tuple(work.layout(name).axis for name in names),
        tuple(number for number, group in enumerate(messages) for _ in group),
        tuple(work.ring(group[0]) for group in messages),
    )


def _strides(work: Rewriting, name: str) -> tuple[int, ...]:
    """How a variable lies in memory: its readers were captured for that."""
    place = work.step.placeholder(name)
    assert place is not None
    return tuple(place.meta["val"].stride())


def _replace(work: Rewriting, name: str, readers: list[Node], whole: Node) -> None:
    place = work.step.placeholder(name)
    assert place is not None
    whole.meta.update(place.meta)
    for reader in readers:
        value = whole
        if reader.op == "output":  # what the step returns stays as it is in later steps
            with work.graph.inserting_before(reader):
                value = work.call(aten.clone.default, whole)
        reader.replace_input_with(place, value)


def _problems(
    choice: VariableStrategy, variable: Variable, workers: int
) -> list[tuple[str, str, str]]:
    if not variable.lookups:
        return []
    problem = "scatter gathers the whole variable, of which rows are looked up"
    return [("synchronizer", problem, "use rows, owner or allreduce")]


SYNCHRONIZER = Synchronizer(
    NAME,
    scatter_and_gather,
    synchronize_scattered,
    across=scatter_and_gather_across,
    part=half_each_way,
    messages=("owned", "owned"),
    dense=True,
    sharded=True,
    partitions=("block",),
    axes=True,
    reductions=RING,
    merges=True,
    in_turn=True,
    check=_problems,
)
