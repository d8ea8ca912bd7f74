"""From a captured step and a strategy to the graph that one worker runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.variables import Analysis
from parallax.graph.passes.cleanup import remove_dead
from parallax.ops import marks
from parallax.ops.resources import coalesce
from parallax.rewrite.accumulate import sum_in_place
from parallax.rewrite.alone import for_one_worker
from parallax.rewrite.blocks import split_updates
from parallax.rewrite.changed import copy_given_away, note_changed_gradients
from parallax.rewrite.checks import settle_checks, share_checks
from parallax.rewrite.context import Pass, Rewriting, WorkerGraph, find_phases, updates_of
from parallax.rewrite.row_ids import check_row_ids
from parallax.rewrite.shards import combine_reductions, place_on_shards, pull_new_values
from parallax.rewrite.touched_rows import touch_only_rows
from parallax.strategy.data import Strategy
from parallax.strategy.registry import synchronizers

aten: Any = torch.ops.aten


def lower_marks(work: Rewriting) -> None:
    """What is still marked belongs to this worker alone."""
    for node in list(work.graph.nodes):
        if node.target is not marks.GRADIENT:
            continue
        value = node.args[0]
        if node.meta["val"].layout is torch.sparse_coo and not _is_only_added(node):
            with work.graph.inserting_before(node):
                value = work.call(coalesce, value)
        node.replace_all_uses_with(value)
        work.graph.erase_node(node)


def _is_only_added(gradient: Node) -> bool:
    """Whether it makes no difference that a row is there several times, as with plain SGD."""
    return all(
        user.target is aten.add_.Tensor and user.args[0] is not gradient for user in gradient.users
    )


BEFORE: tuple[Pass, ...] = (share_checks, place_on_shards)
AFTER: tuple[Pass, ...] = (
    touch_only_rows,
    split_updates,
    combine_reductions,
    pull_new_values,
    lower_marks,
    check_row_ids,
    sum_in_place,
    copy_given_away,
    note_changed_gradients,
    settle_checks,
)


def passes(names: Collection[str]) -> list[Pass]:
    """All passes in their order, for a strategy with synchronisers of these names."""
    found = [one.rewrite for name, one in synchronizers().items() if name in names]
    return [*BEFORE, *dict.fromkeys(one for one in found if one is not None), *AFTER]


def prepare(
    analysis: Analysis, strategy: Strategy, worker: int, workers: int, late: bool = False
) -> Rewriting:
    """What the passes work on, before the first of them."""
    step = analysis.step
    work = Rewriting(analysis, strategy, worker, workers, WorkerGraph(step), late)
    nodes = list(step.graph.nodes)
    found = [node for node in nodes if node.target is marks.GRADIENT]
    work.phases = find_phases(found, nodes, updates_of(analysis))
    return work


def rewrite(
    analysis: Analysis,
    strategy: Strategy,
    worker: int,
    workers: int,
    first: Sequence[Pass] = (),
    late: bool = False,
) -> WorkerGraph:
    """The graph of one worker. The step of ``analysis`` is used up.

    Args:
        analysis: the captured step and what is known of its variables.
        strategy: how each variable is synchronised.
        worker, workers: which worker the graph is for, of how many.
        first: passes before those of the strategy.
        late: updates will be left to the step that follows, see
            :func:`parallax.rewrite.late.defer_updates`.
    """
    work = prepare(analysis, strategy, worker, workers, late)
    if workers == 1:
        work.strategy = for_one_worker(work)
    names = {choice.synchronizer for choice in work.strategy.variables.values()}
    for one_pass in (*first, *passes(names)):
        one_pass(work)
    step = work.step
    remove_dead(step.graph)
    step.graph.lint()
    step.graph_module.recompile()
    return work.result
