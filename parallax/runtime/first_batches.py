"""What workers find out from their first batches together, before the strategy is decided.

What they tell each other of batches in each step, whether steps compare rows of the batch, how
tables are read.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch.nn import SyncBatchNorm

from parallax.config import Config
from parallax.graph.analysis.access import measure
from parallax.graph.analysis.divisors import leaves_out_labels
from parallax.graph.analysis.totals import (
    Batches,
    means_left_alone,
    means_of_items,
    statistics_of,
    sums_by_inputs,
    totals,
)
from parallax.graph.analysis.variables import Analysis
from parallax.graph.common.user_code import line_of
from parallax.graph.objects.checks import batch_norms
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.state import Leaf
from parallax.graph.step_graph import StepGraph
from parallax.ops.whole_batch import WHOLE_ROWS
from parallax.rewrite.batch_norms import over_all_workers
from parallax.rewrite.context import Pass
from parallax.rewrite.divisors import dividing_by_all
from parallax.rewrite.statistics import over_all_batches
from parallax.rewrite.whole_batch import layout_of, over_whole_batches
from parallax.runtime.comm.world import World
from parallax.runtime.exchange.checks import GROUP as CHECKS
from parallax.runtime.exchange.statistics import GROUP as STATISTICS
from parallax.runtime.exchange.totals import GROUP as TOTALS
from parallax.runtime.exchange.whole_batch import GROUP as WHOLE
from parallax.runtime.start import some_of

logger = logging.getLogger("parallax")

_DECIDES = "decides"


def one_batch_norm(objects: StepObjects, config: Config) -> bool:
    """Whether layers that normalise over the batch do so over those of all workers."""
    return config.sync_batch_norm or bool(batch_norms(objects, SyncBatchNorm))


def means_are_of_all(config: Config) -> bool:
    """Whether means over some of a batch are to be those over all workers' batches."""
    return config.average_dense and config.average_sparse and config.weigh_batches


def as_one_batch(objects: StepObjects, config: Config, batches: Batches) -> list[Pass]:
    """Passes by which what follows from a whole batch follows from those of all workers.

    Args:
        objects: of the step.
        config: of the run.
        batches: see :func:`agree_on_batches`.
    """
    found = [over_all_workers(config.average_dense)] if one_batch_norm(objects, config) else []
    if means_are_of_all(config):
        # The last one takes away what tells that gathered rows follow from the batch.
        found += [over_all_batches(batches), dividing_by_all(batches), over_whole_batches(batches)]
    return found


def agree_on_batches(
    world: World, analysis: Analysis, flat: Sequence[Any], by_rows: bool, compared: bool
) -> Batches:
    """Find out from all workers' first steps what they tell each other of batches in each step.

    Labels that losses leave out by default travel only where some first batch has such. Else a
    message in each step would tell nothing.

    Args:
        world: this worker and the others.
        analysis: of the first step, as it was captured.
        flat: this worker's first batch.
        by_rows: batches count by their rows in a mean.
        compared: all workers' steps compare them with each other.
    """
    leaves_out = leaves_out_labels(analysis.step, flat)
    step, variables = analysis.step, analysis.variables
    alike, other = (
        bool(totals(step, variables, Batches(by_rows, plain))) for plain in (True, False)
    )
    decides = step.decides_by_batch
    lengths = " ".join(map(str, statistics_of(step, variables, by_rows).lengths))
    told = world.texts("batches", f"{leaves_out} {alike} {other} {decides} {lengths}")
    by_worker = [text.split() for text in told]
    by_kind = zip(*(words[:4] for words in by_worker), strict=True)
    leave_out, alike, other, decide = (str(True) in words for words in by_kind)
    rounds = itertools.zip_longest(*(words[4:] for words in by_worker), fillvalue="-1")
    statistics = tuple(max(map(int, words)) for words in rounds)
    # What no first batch decides on, later ones may.
    total = decide or (alike if leave_out else other)
    return Batches(by_rows, leave_out, total, decide, compared, statistics)


def any_may_compare_rows(world: World, own: bool) -> bool:
    """Whether the first step of some worker may compare rows of the batch, as far as it is known.

    Args:
        world: this worker and the others, which must all call this.
        own: whether this worker's may.
    """
    return str(True) in world.texts("may compare rows", str(own))


def all_compare_rows(world: World, step: StepGraph | None) -> bool:
    """Whether the first steps of all workers compare rows of the batch with each other, and the
    same ones.

    Args:
        world: this worker and the others, which must all call this.
        step: in which these are those of all batches; None if it compares none.
    """
    own = "" if step is None else layout_of(step)
    decides = step is not None and step.decides_by_batch
    of_all = world.texts("compared rows", _DECIDES if decides else own)
    why = "not all workers' first steps compare the same" if len(set(of_all)) > 1 else ""
    if _DECIDES in of_all:
        why = "the step's Python decides by values of the batch"
    if own and why:
        logger.warning(
            "rows of the batch are compared with each other or kept, and each worker takes those "
            "of its own batch alone, as %s%s",
            why,
            _where(step),
        )
    return bool(own) and not why


def _where(step: StepGraph | None) -> str:
    """In brackets, where rows are compared."""
    nodes = () if step is None else step.graph.find_nodes(op="call_function", target=WHOLE_ROWS)
    return next((f" ({line_of(user)})" for one in nodes for user in one.users), "")


def open_groups(world: World, batches: Batches) -> None:
    """Open the process groups that graphs may need, while all workers are there: later, some may
    have graphs that others have not."""
    if batches.total:
        world.open_group(TOTALS)
    if batches.statistics:
        world.open_group(STATISTICS)
    if batches.compared:
        world.open_group(WHOLE)
    if batches.decide:
        world.open_group(CHECKS)


def tell_of_means(analysis: Analysis, config: Config, batches: Batches) -> None:
    """Say which means over some of a batch stay those of a worker's own batch, or of a row."""
    if not means_are_of_all(config):
        return
    step, variables = analysis.step, analysis.variables
    if (where := means_left_alone(step, variables, batches)) is not None:
        logger.warning(
            "a mean over some of the batch is that of each worker's own batch, as the loss is "
            "not seen to be a sum of such means, each times a number, or each row does not tell "
            "whether it counts (%s)",
            where,
        )
    if (where := sums_by_inputs(step, variables)) is not None:
        logger.warning(
            "the loss is a sum, divided by a number that the batch brings, which is each worker's "
            "own: to divide by the number of all batches, count it in the step, as in (labels != "
            "padding).sum() (%s)",
            where,
        )
    elif left := statistics_of(step, variables, batches.by_rows).left:
        logger.warning(
            "the loss is computed with a number of each worker's own batch, such as a sum, which "
            "on one device is of the whole batch, in a way that is not seen through (%s): let the "
            "loss follow from means, variances and quotients of sums, or from these and extremes "
            "without a gradient, or compute it outside",
            line_of(left[0]),
        )
    if batches.by_rows and (where := means_of_items(step, variables)) is not None:
        logger.info(
            "means over some of one row of the batch are that row's own, and rows count alike "
            "(%s); bring the rows of the batch to the first dimension if that is another one",
            where,
        )


def warn_of_batch_norms(objects: StepObjects) -> None:
    """That results of such layers depend on the number of workers, where there are any."""
    if norms := batch_norms(objects):
        logger.warning(
            "BatchNorm normalises over each worker's own batch, so results depend on the "
            "number of workers (%s); parallax.Config(sync_batch_norm=True) makes them those of "
            "one device, and GroupNorm or LayerNorm need no messages for it.",
            some_of(norms),
        )


def measure_access(
    world: World, analysis: Analysis, batch: Sequence[Any], leaves: Mapping[str, Leaf]
) -> None:
    """Let the analysis know how the first batches read tables, as means over all workers.

    A lone worker that plans for many is told only its own, and takes the others to be like it.
    """
    own = measure(
        analysis.step, analysis.lookups, batch, {name: leaf.value for name, leaf in leaves.items()}
    )
    counts = {name: (a.ids, len(a.rows), a.bags) for name, a in own.items()}
    texts = world.texts("access", msgspec.json.encode(counts).decode())
    found = [msgspec.json.decode(text, type=dict[str, tuple[int, int, int]]) for text in texts]
    names = [name for name in analysis.variables if all(name in one for one in found)]
    host_rows = _host_rows(world, [own[name].rows for name in names])
    for name, together in zip(names, host_rows, strict=True):
        variable = analysis.variables[name]
        columns = zip(*[one[name] for one in found], strict=True)
        ids, distinct, bags = (sum(column) / len(found) for column in columns)
        analysis.variables[name] = replace(
            variable,
            sparsity=distinct / max(variable.rows, 1),
            ids_per_step=ids,
            bags_per_step=bags if variable.bags else 0.0,
            host_rows=together,
        )


def _host_rows(world: World, rows: Sequence[torch.Tensor]) -> list[float | None]:
    """By table, the distinct rows that a host's workers look up, as a mean over hosts.

    None where workers are not on several hosts of equally many, more than one each.
    """
    if not world.two_levels or not rows:
        return [None] * len(rows)
    size = len(world.group("host").ranks)
    sizes = [len(one) for one in rows]
    told = world.exchange_numbers([sizes] * size, "access", "host")
    sent = torch.cat([one.to(world.device) for one in rows]).repeat(size)
    received_counts = [sum(row) for row in told]
    received = torch.empty(sum(received_counts), dtype=sent.dtype, device=world.device)
    each = [sum(sizes)] * size
    world.all_to_all(received, sent, received_counts, each, "access", "host").wait()
    parts = received.split([count for row in told for count in row])
    own = [len(torch.unique(torch.cat(parts[t :: len(rows)]))) for t in range(len(rows))]
    texts = world.texts("access of hosts", msgspec.json.encode(own).decode())
    found = [msgspec.json.decode(text, type=list[int]) for text in texts]
    return [sum(column) / world.size for column in zip(*found, strict=True)]
