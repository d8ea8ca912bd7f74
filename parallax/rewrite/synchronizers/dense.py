"""Dense gradients: AllReduce in buckets, or a push of each owner's rows."""

from __future__ import annotations

from itertools import pairwise

from torch.fx import Node

from parallax.graph.cleanup import is_view
from parallax.graph.compute import WORTH_A_MESSAGE, split_by_compute
from parallax.graph.stages import is_write
from parallax.ops.resources import BucketEntry, BucketsSpec, put_gradient, wait_gradients
from parallax.rewrite.context import Phase, Rewriting

BUCKET_BYTES = 8 << 20
"""A bucket is sent at this size at the latest ..."""
WORTH_A_BUCKET = 1 << 20
"""... and at this size if the model goes on computing, so that the two overlap."""


def synchronize_dense(work: Rewriting) -> None:
    """Copy gradients to buckets as backward makes them; wait where the first is used."""
    for phase in work.phases:
        _phase(work, phase, "allreduce")
        _phase(work, phase, "owner")


def _phase(work: Rewriting, phase: Phase, synchronizer: str) -> None:
    names = set(work.names_with(synchronizer))
    marks = [mark for mark in phase.marks if mark.args[1] in names]
    if not marks:
        return
    order = work.order()
    known = {mark: _known_after(mark) for mark in marks}
    marks = sorted(marks, key=lambda mark: order[known[mark]])
    entries = _entries(work, marks, [known[mark] for mark in marks])
    owners = (
        tuple(work.layout(str(m.args[1])).ranges() for m in marks)
        if (synchronizer == "owner")
        else ()
    )
    resource = work.resource(BucketsSpec(entries, owners), "buckets")
    for index, mark in enumerate(marks):
        _put(work, mark, known[mark], resource, index)
    with work.graph.inserting_before(phase.first_use):
        gradients = work.call(wait_gradients, resource)
        for index, mark in enumerate(marks):
            value = work.item(gradients, index)
            value.meta.update(mark.meta)
            mark.replace_all_uses_with(value)
    for mark in marks:
        work.graph.erase_node(mark)


def _known_after(mark: Node) -> Node:
    """The node that computes a gradient; the mark itself if the tensor is changed later on."""
    base = mark.args[0]
    assert isinstance(base, Node)
    while base.op == "call_function" and is_view(base):
        base = base.all_input_nodes[0]
    if base.op != "call_function":
        return mark
    aliases = [base]
    for alias in aliases:
        if any(is_write(user) and user.args[0] is alias for user in alias.users):
            return mark
        aliases += [user for user in alias.users if user.op == "call_function" and is_view(user)]
    return base


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


def _entries(work: Rewriting, marks: list[Node], known: list[Node]) -> tuple[BucketEntry, ...]:
    groups = split_by_compute(known, work.order(), work.operations, WORTH_A_MESSAGE)
    first_of_group = {group[0] for group in groups}
    entries: list[BucketEntry] = []
    open_buckets: dict[object, tuple[int, int]] = {}
    number = -1
    for mark, node in zip(marks, known, strict=True):
        variable = work.analysis.variables[str(mark.args[1])]
        choice = work.strategy.variables[variable.name]
        average, by_host = choice.average, choice.hierarchy == "hosts"
        if node in first_of_group:
            open_buckets = {k: b for k, b in open_buckets.items() if b[1] < WORTH_A_BUCKET}
        key = (variable.dtype, average, by_host)
        bucket, size = open_buckets.get(key, (-1, BUCKET_BYTES))
        if size + variable.bytes > BUCKET_BYTES and size:
            number += 1
            bucket, size = number, 0
        open_buckets[key] = (bucket, size + variable.bytes)
        entries.append(
            BucketEntry(variable.name, variable.shape, variable.dtype, average, bucket, by_host)
        )
    return tuple(entries)
