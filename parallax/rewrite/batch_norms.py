"""Let layers that normalise over the batch do so over the batches of all workers.

What such a layer computes depends on the whole batch, so dividing the batch changes its numbers. By
exchanging two numbers of each channel, forward and backward, they are those of one device (Ioffe
and Szegedy 2015, algorithm 1 and the gradients of section 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from parallax.errors import UnsupportedError
from parallax.graph.common.user_code import line_of
from parallax.ops.batch_norms import (
    batch_gradients,
    batch_statistics,
    kind_of_statistics,
    normalized,
)
from parallax.ops.specs import BatchNormsSpec
from parallax.rewrite.context import Pass, Rewriting

aten: Any = torch.ops.aten

_OTHERS = {aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}
"""Of libraries: what a step calls by itself, as ``batch_norm`` is captured as PyTorch's own."""
_MEAN, _VARIANCE, _DEVIATION, _UNBIASED = range(4)


def over_all_workers(average: bool) -> Pass:
    """The pass.

    Args:
        average: whether gradients are means over all rows, else sums over workers.
    """

    def normalize_together(work: Rewriting) -> None:
        if work.workers == 1:
            return
        for node in work.graph.nodes:
            if node.target in _OTHERS:
                raise UnsupportedError(
                    f"{node.target} cannot normalise over the batches of all workers.",
                    hint="call torch.nn.functional.batch_norm; or leave out sync_batch_norm (and "
                    "SyncBatchNorm), or use GroupNorm.",
                    where=line_of(node),
                )
        nodes = [node for node in work.graph.nodes if _normalizes(node)]
        if not nodes:
            return
        norms = work.resource(BatchNormsSpec(average), "batch_norms")
        for node in nodes:
            _replace(work, norms, node)

    return normalize_together


def _normalizes(node: Node) -> bool:
    return node.target is aten.native_batch_norm.default and bool(node.args[5])


def _replace(work: Rewriting, norms: Node, node: Node) -> None:
    arguments: Any = node.args
    values, weight, bias, running_mean, running_variance, _, momentum, epsilon = arguments
    outputs = {user.args[1]: user for user in node.users}
    batch, statistic, _ = node.meta["val"]
    with work.graph.inserting_before(node):
        statistics = work.call(batch_statistics, norms, values, epsilon)
        statistics.meta["val"] = [statistic.to(kind_of_statistics(batch.dtype))] * 4
        parts = [_part(work, statistics, number) for number in range(4)]
        mean, variance = parts[_MEAN], parts[_VARIANCE]
        output = work.call(normalized, values, weight, bias, mean, variance, epsilon)
        output.meta["val"] = batch
        for running, new in ((running_mean, mean), (running_variance, parts[_UNBIASED])):
            if running is not None:
                _move(work, running, new, momentum)
    saved = {number: outputs[number] for number in (1, 2) if number in outputs}
    for backward in _backwards(saved.values()):
        _replace_backward(work, norms, backward, parts)
    for number, new in ((0, output), (1, mean), (2, parts[_DEVIATION])):
        if number in outputs:
            outputs[number].replace_all_uses_with(new)
            work.graph.erase_node(outputs[number])
    work.graph.erase_node(node)


def _move(work: Rewriting, running: Node, new: Node, momentum: Any) -> None:
    """Move a running statistic towards that of the batch."""
    kind = running.meta["val"].dtype
    if new.meta["val"].dtype is not kind:
        source, new = new, work.call(aten._to_copy.default, new)
        new.kwargs = {"dtype": kind}
        new.meta["val"] = source.meta["val"].to(kind)
    moved = work.call(aten.lerp_.Scalar, running, new, momentum)
    moved.meta["val"] = running.meta["val"]


def _backwards(saved: Any) -> list[Node]:
    found = dict.fromkeys(user for node in saved for user in node.users)
    return [node for node in found if node.target is aten.native_batch_norm_backward.default]


def _replace_backward(work: Rewriting, norms: Node, node: Node, parts: list[Node]) -> None:
    gradient, values, weight, *_ = node.args
    with work.graph.inserting_before(node):
        gradients = work.call(batch_gradients, norms, gradient, values, weight, parts, node.args[8])
        gradients.meta.update(node.meta)
    node.replace_all_uses_with(gradients)
    work.graph.erase_node(node)


def _part(work: Rewriting, source: Node, number: int) -> Node:
    part = work.item(source, number)
    part.meta["val"] = source.meta["val"][number]
    return part
