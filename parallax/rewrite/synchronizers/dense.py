"""Dense gradients: AllReduce in buckets, or a push of each owner's rows."""

from __future__ import annotations

from torch.fx import Node

from parallax.ops.resources import BucketEntry, BucketsSpec, put_gradient, wait_gradients
from parallax.rewrite.context import Phase, Rewriting

BUCKET_BYTES = 8 << 20


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
    entries = _entries(work, marks)
    owners = (
        tuple(work.layout(str(m.args[1])).ranges() for m in marks)
        if (synchronizer == "owner")
        else ()
    )
    resource = work.resource(BucketsSpec(entries, owners), "buckets")
    for index, mark in enumerate(marks):
        with work.graph.inserting_before(mark):
            work.call(put_gradient, resource, index, mark.args[0])
    with work.graph.inserting_before(phase.first_use):
        gradients = work.call(wait_gradients, resource)
        for index, mark in enumerate(marks):
            value = work.item(gradients, index)
            value.meta.update(mark.meta)
            mark.replace_all_uses_with(value)
    for mark in marks:
        work.graph.erase_node(mark)


def _entries(work: Rewriting, marks: list[Node]) -> tuple[BucketEntry, ...]:
    entries: list[BucketEntry] = []
    open_buckets: dict[object, tuple[int, int]] = {}
    number = -1
    for mark in marks:
        variable = work.analysis.variables[str(mark.args[1])]
        average = work.strategy.variables[variable.name].average
        key = (variable.dtype, average)
        bucket, size = open_buckets.get(key, (-1, BUCKET_BYTES))
        if size + variable.bytes > BUCKET_BYTES and size:
            number += 1
            bucket, size = number, 0
        open_buckets[key] = (bucket, size + variable.bytes)
        entries.append(BucketEntry(variable.name, variable.shape, variable.dtype, average, bucket))
    return tuple(entries)
