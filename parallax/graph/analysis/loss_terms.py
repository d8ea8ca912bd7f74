"""What a loss is a sum of, and the backward passes that begin at losses."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.common.aliases import memory_of, uses_of
from parallax.graph.common.operations import (
    ancestors,
    has_one_element,
    is_view,
    written_inputs,
)
from parallax.graph.common.torch_internals import FakeTensor
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks
from parallax.ops.whole_batch import WHOLE_ROWS

aten: Any = torch.ops.aten

MEAN, SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
NLL = {
    aten.nll_loss_forward.default: aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default: aten.nll_loss2d_backward.default,
}
"""Of losses by labels, the gradient."""
REDUCTIONS = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
    aten.nll_loss_forward.default: 3,
    aten.nll_loss2d_forward.default: 3,
}
"""Of loss functions, which argument is their reduction."""

SIZES = {aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int}
"""What says nothing of the values of tensors."""
SHAPES = {*SIZES, aten.ones_like.default, aten.zeros_like.default, aten.full_like.default}
"""What says nothing of the values of the tensor that it is like."""
_SUMS = {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
_COPIES = {aten._to_copy.default, aten.clone.default}
_CONSTANTS_COPIED = {*_COPIES, aten.lift_fresh_copy.default, aten.detach.default}
_OF_SEVERAL = {aten.sum.default: False, aten.mean.default: True}
"""Reductions of a list of terms, and whether they divide by its length."""

Scales = Callable[[float | Node, Node], bool]
"""Whether to look for terms in a number that is multiplied by a factor, to be the second node."""


@dataclass(frozen=True)
class Factor:
    """What a term is multiplied by: a constant, and numbers of the graph.

    Args:
        constant: what is known.
        times, over: nodes that it is multiplied with, and divided by, as well.
    """

    constant: float = 1.0
    times: tuple[Node, ...] = ()
    over: tuple[Node, ...] = ()

    def __mul__(self, other: Factor) -> Factor:
        return Factor(
            self.constant * other.constant, self.times + other.times, self.over + other.over
        )


_ENDS = frozenset({*SIZES, WHOLE_ROWS})


def from_batch(
    step: StepGraph, ends: Collection[Any] = _ENDS, given: Iterable[Node] | None = None
) -> set[Node]:
    """What is computed from the values of the batch, as against its sizes.

    Args:
        step: as it was captured.
        ends: operations whose results are taken not to be.
        given: what of the batch; all by default.
    """
    found = set(step.given() if given is None else given)
    for node in step.graph.nodes:
        if node.target not in ends and any(source in found for source in node.all_input_nodes):
            found.add(node)
            for written in written_inputs(node):
                memory = memory_of(written)
                if memory.op == "call_function" and memory not in found:  # the step makes it
                    found.add(memory)
                    found.update(alias for alias, _ in uses_of(memory))
    return found


def reduction(loss: Node) -> int:
    """torch's number for the reduction of a loss function."""
    place = REDUCTIONS[loss.target]
    return int(loss.args[place]) if len(loss.args) > place else MEAN  # type: ignore[arg-type]


def backward_passes(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Where gradients begin: a one, and the loss that it is the gradient of."""
    for seed in graph.find_nodes(op="call_function", target=aten.ones_like.default):
        loss = seed.args[0]
        if isinstance(loss, Node) and _is_number(loss):
            yield seed, loss


def losses(graph: Graph) -> Iterator[tuple[Node, set[Node]]]:
    """The losses of a step, each with what is computed from it on the way to gradients."""
    passes = list(backward_passes(graph))
    leading = ancestors(graph.find_nodes(op="call_function", target=marks.GRADIENT))
    for seed, loss in passes:
        gradients = _following(seed)
        if not any(other in gradients for _, other in passes):
            yield loss, gradients & leading  # else it is part of another one


def made_of(losses: Iterable[Node]) -> set[Node]:
    """What losses follow from, with themselves; not what parameters do that were changed before,
    by gradients of another loss, nor what only gives a size."""
    found: set[Node] = set()
    queue = list(losses)
    while queue:
        node = queue.pop()
        if node not in found and node.target is not marks.GRADIENT:
            found.add(node)
            queue += () if node.target in SHAPES else node.all_input_nodes
    return found


def terms(loss: Node, scales: Scales) -> Iterator[tuple[Node, Factor]]:
    """The numbers that a number is a sum of, each with what multiplies it.

    Args:
        loss: a tensor of one element.
        scales: asked for every factor; what it refuses is a term as it is.
    """
    queue = [(loss, Factor())]
    while queue:
        node, factor = queue.pop()
        parts = _parts(node, scales)
        if parts is None:
            yield node, factor
        else:
            queue += [(part, factor * times) for part, times in parts if _is_number(part)]


@dataclass(frozen=True, eq=False)
class WeightedUse:
    """Where the gradient of what multiplies terms, such as a learned weight of a task, uses these.

    Args:
        use: what is computed of them.
        part: what it uses: a sum of terms.
        terms: these, each with what multiplies it.
    """

    use: Node
    part: Node
    terms: tuple[tuple[Node, Factor], ...]


def weighted_uses(
    term: Node, factor: Factor, scales: Scales, gradients: set[Node]
) -> list[WeightedUse] | None:
    """The uses of a term, or of sums with it, for gradients of what multiplies it.

    Args:
        term: of a loss.
        factor: what multiplies it.
        scales: by which it was found, see :func:`terms`.
        gradients: what follows from the loss on the way to gradients.

    Returns:
        None if one is used in another way than to multiply.
    """
    found: dict[tuple[Node, Node], WeightedUse] = {}
    for weight in factor.times + factor.over:
        for product in weight.users:
            if product in gradients or product.target not in _PRODUCTS | _QUOTIENTS:
                continue
            part = next(one for one in product.args if one is not weight)
            if not isinstance(part, Node) or not _has_term(part, term, scales):
                continue
            # Of a quotient the gradient first divides by the weight once more.
            several = [part]
            for one in several:
                for user in one.users:
                    multiplies = _multiplies(user, one)
                    if user not in gradients:
                        several += [user] if multiplies and user not in several else []
                    elif user.target is aten.ones_like.default:
                        continue  # where gradients begin
                    elif not multiplies:
                        return None
                    else:
                        found[user, one] = WeightedUse(user, one, tuple(terms(one, scales)))
    return list(found.values())


def _multiplies(node: Node, part: Node) -> bool:
    """Whether a node is a multiple of a number, which the other factor is not."""
    if node.target not in _PRODUCTS | _QUOTIENTS:
        return False
    first, other = node.args[:2]
    if first is part:
        return other is not part
    return node.target in _PRODUCTS


def _has_term(part: Node, term: Node, scales: Scales) -> bool:
    return any(one is term for one, _ in terms(part, scales))


def _parts(node: Node, scales: Scales) -> list[tuple[Node, Factor]] | None:
    """What a number is the sum of, with factors; None if it is no sum."""
    arguments: Any = node.args
    target = node.target
    if target in _SUMS:
        sign = -1.0 if target is aten.sub.Tensor else 1.0
        sign *= float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
        pair = zip(arguments, (1.0, sign), strict=True)
        return [(one, Factor(times)) for one, times in pair if isinstance(one, Node)]
    if target is aten.neg.default:
        return [(arguments[0], Factor(-1.0))]
    if target in _PRODUCTS or target in _QUOTIENTS:
        return _scaled(node, scales)
    if target in _OF_SEVERAL or target is aten.dot.default:
        several = _weighted_list(node if target is aten.dot.default else arguments[0])
        if several is not None:
            share = Factor(1 / len(several) if _OF_SEVERAL.get(target) else 1.0)
            return [(one, Factor(weight) * share) for one, weight in several]
        if target in _OF_SEVERAL and arguments[0].meta["val"].dim() == 0:  # of one number
            return [(arguments[0], Factor())]
    if target in _COPIES or (is_view(node) and target is not operator.getitem):
        return [(arguments[0], Factor())] if node.op == "call_function" else None
    return None


def _scaled(node: Node, scales: Scales) -> list[tuple[Node, Factor]] | None:
    part: Any = node.args[0]
    factor: Any = node.args[1]
    if not isinstance(part, Node):
        part, factor = factor, part
    divides = node.target in _QUOTIENTS
    if isinstance(factor, int | float) and not factor and not divides:
        return []  # nothing, but that gradients are there
    if isinstance(factor, int | float) and factor:
        factor = 1 / factor if divides else float(factor)
        return [(part, Factor(factor))] if scales(factor, node) else None
    if isinstance(factor, Node):
        if scales(factor, node):
            return [(part, Factor(over=(factor,)) if divides else Factor(times=(factor,)))]
        if not divides and scales(part, node):
            return [(factor, Factor(times=(part,)))]
    return None


def _weighted_list(node: Any) -> list[tuple[Node, float]] | None:
    """Numbers that are put together, each with the constant that multiplies it there; None if that
    is not what a node does."""
    if _is_list(node):
        return [(one, 1.0) for one in node.args[0]]
    if not isinstance(node, Node) or node.target not in (aten.mul.Tensor, aten.dot.default):
        return None
    for several, other in (node.args[:2], node.args[1::-1]):
        weights = _constants(other)
        if _is_list(several) and weights is not None:
            numbers = several.args[0]  # type: ignore[union-attr]
            if len(weights) == len(numbers):  # type: ignore[arg-type]
                return list(zip(numbers, weights, strict=True))  # type: ignore[arg-type]
    return None


def _constants(node: Any) -> list[float] | None:
    """The numbers of a tensor that is part of the graph; None for others."""
    while isinstance(node, Node) and node.target in _CONSTANTS_COPIED:
        node = node.args[0]
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    tensor = getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.dim() != 1:
        return None
    return [float(number) for number in tensor.tolist()]


def _is_list(node: Any) -> bool:
    """Whether a node puts several numbers together."""
    if not isinstance(node, Node) or node.target not in (aten.stack.default, aten.cat.default):
        return False
    several: Any = node.args[0]
    return all(_is_number(one) and _has_no_dimension(one) for one in several)


def _has_no_dimension(node: Any) -> bool:
    """Whether a number has no dimension, or is a view of one that has none: sets of the batch may
    have one element by chance."""
    while node.meta["val"].dim():
        is_of_torch = isinstance(node.target, torch._ops.OpOverload)
        if not is_of_torch or not is_view(node):
            return False
        node = node.args[0]
    return True


def _is_number(node: Any) -> bool:
    return has_one_element(node) and node.op == "call_function"


def _following(seed: Node) -> set[Node]:
    """What follows from a gradient before it is marked as a variable's."""
    found = {seed}
    queue = [seed]
    while queue:
        for user in queue.pop().users:
            if user not in found and user.target is not marks.GRADIENT:
                found.add(user)
                queue.append(user)
    return found
