"""Check the ids of lookups that read a table in place, before anything is computed from them."""

from __future__ import annotations

from torch.fx import Node

from parallax.graph.analysis.lookups import WRAPPING, lookup_of
from parallax.graph.analysis.loss_terms import SIZES
from parallax.ops.resources import checked_ids
from parallax.ops.specs import BagsSpec, BucketsSpec, MessageSpec, RowIdsSpec, RowsSpec
from parallax.rewrite.context import Rewriting

_CARRIERS = (BagsSpec, BucketsSpec, RowsSpec)
"""What tells all workers of a failure, with the control words."""


def check_row_ids(work: Rewriting) -> None:
    """Let every remaining lookup of a parameter read by checked ids.

    Exchanged tables check theirs with the exchange. The kernels of torch raise on one worker only,
    without a name, or on CUDA end the process.
    """
    step = work.step
    tables: list[tuple[str, int, bool]] = []
    readers: dict[Node, dict[int, None]] = {}
    placeholders = step.own_placeholders()
    for item, node in zip(step.inputs, placeholders, strict=True):
        value = node.meta.get("val")
        if item.kind != "state" or value is None or value.dim() == 0:
            continue
        for user in node.users:
            lookup = lookup_of(user, node, item.name)
            if lookup is None or lookup.gathers_elements:
                continue
            table = (item.name, int(value.shape[0]), user.target in WRAPPING)
            if table not in tables:
                tables.append(table)
            readers.setdefault(lookup.ids, {})[tables.index(table)] = None
    if not readers:
        return
    shared = work.workers > 1 and any(
        spec.carries_words if isinstance(spec, MessageSpec) else isinstance(spec, _CARRIERS)
        for spec in work.result.resources
    )
    check = work.resource(RowIdsSpec(tuple(tables), shared), "row_ids")
    last = step.placeholders()[-1]
    for ids, indices in readers.items():
        with work.graph.inserting_after(last if ids.op == "placeholder" else ids):
            checked = work.call(checked_ids, check, ids, tuple(indices))
        checked.meta.update(ids.meta)
        for user in list(ids.users):
            if user is not checked and user.target not in SIZES:
                user.replace_input_with(ids, checked)
