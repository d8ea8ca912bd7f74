"""Let numbers of the whole batch that losses are computed with be those of all workers' batches."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.statistics import Statistic
from parallax.graph.analysis.totals import Batches, statistics_of
from parallax.graph.common.hashes import hash_of
from parallax.graph.common.operations import add_call, ancestors
from parallax.graph.common.slices import masks_of
from parallax.graph.common.user_code import line_of, places_of
from parallax.ops.resources import finish, start
from parallax.ops.statistics import KEYS, MOST, StatisticsSpec
from parallax.rewrite.context import Pass, Rewriting
from parallax.rewrite.early import at_the_start, known_early
from parallax.rewrite.term_keys import TermKeys

aten: Any = torch.ops.aten

logger = logging.getLogger("parallax")

_VARIANCES = ("variance", "deviation")


def over_all_batches(batches: Batches) -> Pass:
    """The pass."""
    return functools.partial(_over_all, batches)


def _over_all(batches: Batches, work: Rewriting) -> None:
    if work.workers == 1:
        return
    wanted = statistics_of(work.step, work.analysis.variables)
    if not batches.statistics:
        if wanted.uses:
            logger.warning(
                "the loss is computed with a number of each worker's own batch, as none was when "
                "the first batches were compared (%s)",
                line_of(wanted.uses[0][1]),
            )
        return
    firsts = {one.key: one for one in reversed(wanted.used)}
    used = [one for one in wanted.used if firsts[one.key] is one]  # of several epochs, say
    if len(used) > MOST:
        logger.warning(
            "the loss is computed with more than %d numbers of the whole batch: each worker has "
            "its own (%s)",
            MOST,
            line_of(used[0].value),
        )
    order = work.order()
    copied = wanted.following([value for value, _ in wanted.uses]) - wanted.found.keys()
    numbers = [number for one in used for number in _numbers(work, one)]
    if used:
        told = [one for one in numbers if isinstance(one, Node)]
        behind = copied - ancestors(told) | {node for _, node in wanted.uses}
        first = min(behind, key=order.__getitem__)
        before = known_early(work, told, first)
    else:  # others may have some
        before, first = at_the_start(work)
    resource = work.resource(_spec(work, used), "statistics")
    with work.graph.inserting_before(before):
        work.call(start, resource, 0, numbers)
    with work.graph.inserting_before(first):
        found = work.call(finish, resource, 0)
        made = {
            one.value: _as_it_was(work, one, work.item(found, used.index(firsts[one.key])))
            for one in wanted.used
        }
    for node in sorted(copied, key=order.__getitem__):
        is_early = order[node] < order[first]
        at = work.graph.inserting_before(first) if is_early else work.graph.inserting_after(node)
        with at:
            made[node] = work.graph.node_copy(node, lambda source: made.get(source, source))
    for value, node in wanted.uses:
        node.replace_input_with(value, made[value])


def _numbers(work: Rewriting, one: Statistic) -> list[Any]:
    """What is told of a statistic: three numbers."""
    graph = work.graph
    with graph.inserting_after(one.value):
        count = one.count
        if count is None:
            size = one.source.meta["val"].numel()
            if isinstance(size, int):
                count = size
            else:
                count = add_call(graph, aten.sym_numel.default, one.source)
        if one.kind not in _VARIANCES:
            return [count, one.value, 0.0]
        mean = add_call(graph, aten.mean.default, one.source)
        return [count, mean, add_call(graph, aten.var.correction, one.source, None, correction=0)]


def _as_it_was(work: Rewriting, one: Statistic, found: Node) -> Node:
    """One of all workers, in place of this worker's own, at the graph's insertion point."""
    value = one.value.meta["val"]
    found.meta["val"] = torch.empty((), dtype=torch.float64)
    if not isinstance(value, torch.Tensor):
        number = add_call(work.graph, aten._local_scalar_dense.default, found)
        number.meta["val"] = value
        return number
    found.meta["val"] = value.new_empty((), dtype=torch.float64)
    if value.dim():
        found = add_call(work.graph, aten.view.default, found, list(value.shape))
    if value.dtype is torch.float64:
        return found
    return add_call(work.graph, aten._to_copy.default, found, dtype=value.dtype)


def _is_of_some(one: Statistic) -> bool:
    """Whether a worker that leaves a statistic out may have nothing that counts in it."""
    chosen = any(masks_of(node) for node in ancestors([one.source]))
    return chosen or one.kind in ("sum", "largest", "smallest")


def _spec(work: Rewriting, used: list[Statistic]) -> StatisticsSpec:
    terms = TermKeys(work.step)
    made = [places_of(one.value.meta.get("user_calls", ())) for one in used]
    lines = [
        hash_of((place, one.kind, terms.counted([one.source])))
        for place, one in zip(made, used, strict=True)
    ]
    # Of a line, which one of them each is.
    keys = [hash_of((line, lines[:place].count(line))) % KEYS for place, line in enumerate(lines)]
    corrections = [one.correction for one in used]
    lines_of_all = ["" if _is_of_some(one) else str(line_of(one.value)) for one in used]
    kinds = tuple(one.kind for one in used)
    return StatisticsSpec((), kinds, tuple(corrections), tuple(keys), tuple(lines_of_all))
