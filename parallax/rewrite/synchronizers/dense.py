"""What synchronisers of dense gradients share: buckets, for AllReduce or a push to owners."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.variables import Variable
from parallax.graph.common.aliases import known_after
from parallax.ops.reductions import remote_share
from parallax.ops.resources import put_gradient, wait_gradients
from parallax.ops.specs import BucketEntry, BucketsSpec
from parallax.rewrite.context import Rewriting
from parallax.rewrite.turns import in_order, message_of, take_turns, turns
from parallax.strategy.data import ReductionName, VariableStrategy, everyone
from parallax.strategy.messages import is_own_product
from parallax.strategy.registry import MessageKind, facts

aten: Any = torch.ops.aten

RING: tuple[ReductionName, ...] = ("ring",)
"""How gradients can go to their owners but by an exchange of all with all, and values come back."""


def synchronize_dense(work: Rewriting) -> None:
    """Copy gradients to buckets as backward makes them; wait where the first is used."""
    for number in range(len(work.phases)):
        sum_in_buckets(work, number, "allreduce")
        sum_in_buckets(work, number, "broadcast")
        sum_in_buckets(work, number, "owner")


def sum_in_buckets(work: Rewriting, number: int, synchronizer: str) -> None:
    """Sum the gradients of a phase that are synchronised so: on all workers, or on the owners."""
    phase = work.phases[number]
    names = set(work.names_with(synchronizer))
    marks = [mark for mark in phase.marks if mark.args[1] in names]
    if not marks:
        return
    order = work.order()
    known = {mark: known_after(mark) for mark in marks}
    waits = take_turns(work)
    marks = in_order(work, marks) if waits else sorted(marks, key=lambda m: order[known[m]])
    entries = _entries(work, marks)
    sharded = facts(work.strategy.variables[entries[0].name]).sharded
    owners = tuple(work.layout(entry.name).ranges() for entry in entries) if sharded else ()
    of_bucket = {entry.bucket: mark for entry, mark in zip(entries, marks, strict=True)}
    turn = turns(work, phase) if waits else {}
    own = tuple(turn[of_bucket[bucket]] for bucket in sorted(of_bucket)) if waits else ()
    resource = work.resource(BucketsSpec(entries, owners, number, own), "buckets")
    for index, mark in enumerate(marks):
        if entries[index].pieces > 1:
            _put_pieces(work, mark, known[mark], resource, index, entries[index])
        else:
            _put(work, mark, known[mark], resource, index)
    with work.graph.inserting_before(phase.first_use):
        gradients = work.call(wait_gradients, resource)
        phase.wait = phase.wait or gradients
        for index, mark in enumerate(marks):
            value = work.item(gradients, index)
            value.meta.update(mark.meta)
            mark.replace_all_uses_with(value)
    for mark in marks:
        work.graph.erase_node(mark)


def _put(work: Rewriting, mark: Node, known: Node, resource: Node, index: int) -> None:
    """Copy a gradient to its bucket as soon as it is known, before what is computed next."""
    source = mark.args[0]
    assert isinstance(source, Node)
    if known is mark:
        with work.graph.inserting_before(mark):
            work.call(put_gradient, resource, index, source)
        return
    views = [source]
    while views[-1] is not known:
        views.append(views[-1].all_input_nodes[0])
    for after, view in pairwise(reversed(views)):
        after.append(view)
    with work.graph.inserting_after(source):
        work.call(put_gradient, resource, index, source)


def _put_pieces(
    work: Rewriting, mark: Node, known: Node, resource: Node, index: int, entry: BucketEntry
) -> None:
    """Send a gradient by its rows: a matrix product is computed piece by piece for it."""
    if not is_own_product(mark, known):
        source = mark.args[0]
        with work.graph.inserting_before(mark):
            for piece in range(entry.pieces):
                part = work.call(aten.slice.Tensor, source, entry.axis, *entry.rows(piece))
                work.call(put_gradient, resource, index, part, piece)
        return
    # Rows of the product follow from rows of the left factor, columns from columns of the right.
    cut, other = (known.args[0], known.args[1]) if entry.axis == 0 else reversed(known.args[:2])
    assert isinstance(cut, Node)
    with work.graph.inserting_before(known):
        for piece in range(entry.pieces):
            own = (entry.axis, *entry.rows(piece))
            rows = work.call(aten.slice.Tensor, cut, *own)
            pair = (rows, other) if entry.axis == 0 else (other, rows)
            part = work.call(aten.mm.default, *pair)
            for node, source in ((rows, cut), (part, known)):
                node.meta["val"] = aten.slice.Tensor(source.meta["val"], *own)
            work.call(put_gradient, resource, index, part, piece)


def _entries(work: Rewriting, marks: list[Node]) -> tuple[BucketEntry, ...]:
    entries: list[BucketEntry] = []
    buckets: dict[object, int] = {}
    for mark in marks:
        variable = work.analysis.variables[str(mark.args[1])]
        choice = work.strategy.variables[variable.name]
        by_host = choice.hierarchy == "hosts"
        options = tuple(sorted(choice.encoder_options.items()))
        encoder = (choice.encoder, options)
        broadcast = choice.synchronizer == "broadcast"
        how = ("broadcast" if broadcast else choice.reduction, choice.order)
        bucket = buckets.setdefault(message_of(work, mark), len(buckets))
        entries.append(
            BucketEntry(
                variable.name,
                variable.shape,
                variable.dtype,
                choice.average,
                bucket,
                by_host,
                choice.pieces,
                *encoder,
                *how,
                choice.axis,
                choice.shards if choice.pieces > 1 else (),
            )
        )
    return tuple(entries)


def scatter_and_gather(
    variable: Variable, choice: VariableStrategy, workers: int, hosts: int
) -> float:
    """Gradients to their owners, new values back."""
    return 2 * (workers - 1) / workers * variable.bytes


def scatter_and_gather_across(
    variable: Variable, choice: VariableStrategy, workers: int, hosts: int
) -> float:
    """Of a ring few links leave a host; of an exchange, those to all workers of others."""
    if choice.reduction == "ring":
        return remote_share("ring", choice.order or everyone(workers), hosts) * variable.bytes
    others = (workers - workers / hosts) / (workers - 1)
    return others * scatter_and_gather(variable, choice, workers, hosts)


def half_each_way(
    kind: MessageKind, variable: Variable, choice: VariableStrategy, workers: int
) -> float:
    """As much as gradients, new values."""
    return 0.5
