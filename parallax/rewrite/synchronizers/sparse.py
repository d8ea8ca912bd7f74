"""What the synchronisers of sparse variables share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.lookups import Lookup, padding_id
from parallax.ops.specs import TableSpec
from parallax.rewrite.blocks import can_update_in_blocks
from parallax.rewrite.context import Rewriting
from parallax.rewrite.touched_rows import can_touch_only_rows
from parallax.strategy.data import VariableStrategy, everyone
from parallax.strategy.encoders import encoder_of

aten: Any = torch.ops.aten


def updates_touched_rows(work: Rewriting, name: str) -> bool:
    """Whether the update of a table can do with the rows that the step touched."""
    marks = work.analysis.gradients[name]
    if work.strategy.variables[name].synchronizer == "allgather":
        # Its reductions are taken of the gathered rows as they are.
        reductions = work.analysis.components[name].reductions
        return all(r.kind != "mean" for r in reductions) and can_touch_only_rows(work, name, marks)
    return can_touch_only_rows(work, name, marks) or can_update_in_blocks(work, name, marks)


def together(work: Rewriting, marks: Sequence[Node]) -> list[list[Node]]:
    """Gradients that travel together."""
    groups: dict[int, list[Node]] = {}
    for mark in marks:
        number = work.strategy.variables[str(mark.args[1])].group
        groups.setdefault(number, []).append(mark)
    return list(groups.values())


def table_spec(work: Rewriting, name: str, lookups: list[Lookup], touched: bool) -> TableSpec:
    """The table of a variable as its exchange sees it."""
    variable = work.analysis.variables[name]
    choice = work.strategy.variables[name]
    terms = [term for rows in work.analysis.row_gradients(name) for term in rows.terms]
    encoder = encoder_of(choice)
    paddings = {padding_id(term) for term in terms}
    return TableSpec(
        name=name,
        rows=variable.rows,
        row_shape=variable.shape[1:],
        dtype=variable.dtype,
        average=choice.average,
        lazy=variable.lazy,
        padding=next(iter(paddings)) if paddings else None,
        wraps=any(lk.node.target is aten.index.Tensor for lk in lookups if lk.variable == name),
        touched=touched,
        owner=choice.owners[0] if choice.partition == "whole" and choice.owners else None,
        cast=None if encoder is None else encoder.cast,
        owners=choice.owners if _dealt_to_some(choice, work.workers) else (),
        read_as=variable.read.dtype,
        columns=variable.read.columns,
    )


def _dealt_to_some(choice: VariableStrategy, workers: int) -> bool:
    return choice.partition == "cyclic" and choice.owners != everyone(workers)


def hand_over(work: Rewriting, mark: Node, received: Node, touched: bool) -> None:
    """Let what comes after backward use the aggregated gradient in place of this worker's own."""
    name, value = str(mark.args[1]), received
    if touched:
        ids = work.item(value, 0)
        value = work.item(value, 1)
        narrow = can_touch_only_rows(work, name, [mark])
        (work.touched if narrow else work.blocked)[name] = (ids, value)
        work.analysis.components[name].members[value] = None
    value.meta.update(mark.meta)
    mark.replace_all_uses_with(value)
