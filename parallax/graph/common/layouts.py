"""How kernels lay out what they compute, where tensors without storage are told otherwise.

A step is captured on tensors without storage. Of some operations these get other strides than the
operation's kernel gives the real ones where an input does not lie in order. What a capture decides
by such strides is wrong of real tensors then: which views are possible, and what is put in order
before a kernel that does not look (GroupNorm's gradient would be one of other elements). The rules
here are of kernels for CPUs; on other devices, what follows is put in order before it is viewed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.common.operations import add_call

aten: Any = torch.ops.aten

Rule = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""From a result, as it is believed, and the operands, the result as it is."""


def _in_order(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    return result.new_empty(result.shape)


def _by_operands(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """As all operations lay out their results that work element by element."""
    like = torch.add(*operands[:2])
    if like.dim() != result.dim():  # of a loss that is reduced
        return result
    return result.new_empty_strided(result.shape, like.stride())


def _by_images(which: int) -> Rule:
    """In order, but with the channels last if the images, an operand, have them last."""

    def rule(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        form = _FORMATS.get(result.dim())
        if form is not None and operands[which].is_contiguous(memory_format=form):
            return torch.empty_like(result, memory_format=form)
        return result.new_empty(result.shape)

    return rule


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

RULES: dict[Any, tuple[Rule, int]] = {
    **dict.fromkeys(
        (
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default,
            aten._log_softmax_backward_data.default,
            aten.native_layer_norm_backward.default,
            aten.glu_backward.default,
        ),
        (_in_order, 1),
    ),
    aten.log_sigmoid_forward.default: (_in_order, 2),
    **dict.fromkeys(
        (
            aten.binary_cross_entropy.default,
            aten.elu_backward.default,
            aten.softplus_backward.default,
            aten.hardswish_backward.default,
            aten.hardtanh_backward.default,
            aten.hardsigmoid_backward.default,
            aten.logit_backward.default,
            aten.native_dropout_backward.default,
        ),
        (_by_operands, 1),
    ),
    **dict.fromkeys(
        (aten.roll.default, aten.native_batch_norm.default, aten.native_group_norm.default),
        (_by_images(0), 1),
    ),
    **dict.fromkeys(
        (
            aten.native_batch_norm_backward.default,
            aten.native_group_norm_backward.default,
            aten.reflection_pad2d_backward.default,
        ),
        (_by_images(1), 1),
    ),
}
"""Of operations about which tensors without storage are told something else: how the first of their
results are laid out, and of how many this is said."""


def as_laid_out(operation: Any, args: Sequence[Any], given: Any) -> Any:
    """What an operation gives, of tensors without storage, laid out as its kernel lays it out."""
    rule, count = RULES.get(operation, (None, 0))
    if rule is None:
        return given
    operands = [one for one in args if isinstance(one, torch.Tensor)]
    if all(one.is_contiguous() for one in operands) or operands[0].device.type != "cpu":
        return given
    if isinstance(given, torch.Tensor):
        return rule(given, operands)
    corrected = (None if one is None else rule(one, operands) for one in given[:count])
    return (*corrected, *given[count:])


_PUT_IN_ORDER = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.embedding.default,
    aten.embedding_dense_backward.default,
}
"""Operations whose results lie in order, whatever their operands do."""


def copy_before_views(graph: Graph) -> None:
    """Put what follows from such operations, on other devices than CPUs, in order before it is
    viewed as another shape."""
    doubtful: set[Node] = set()
    for node in list(graph.nodes):
        follows = [source for source in node.all_input_nodes if source in doubtful]
        if node.target is aten.view.default and follows:
            source = follows[0]
            with graph.inserting_before(node):
                copy = add_call(
                    graph, aten.clone.default, source, memory_format=torch.contiguous_format
                )
            node.replace_input_with(source, copy)
        elif node.target in RULES:
            values = [value for one in (node, *node.all_input_nodes) for value in _tensors(one)]
            is_ruled = values[0].device.type == "cpu"
            if not is_ruled and (follows or not all(one.is_contiguous() for one in values)):
                doubtful.add(node)
        elif follows and node.op == "call_function" and not _puts_in_order(node):
            doubtful.add(node)


def _puts_in_order(node: Node) -> bool:
    if node.target is aten.clone.default:
        return node.kwargs.get("memory_format") is torch.contiguous_format
    return node.target in _PUT_IN_ORDER


def _tensors(node: Node) -> list[torch.Tensor]:
    given = node.meta.get("val")
    values = given if isinstance(given, list | tuple) else [given]
    return [one for one in values if isinstance(one, torch.Tensor)]
