"""The sum over a batch that a number follows from, and how."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from parallax.graph.common.operations import has_one_element, is_view
from parallax.graph.common.torch_internals import FakeTensor

aten: Any = torch.ops.aten

SUMS = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.nansum.default,
    aten.count_nonzero.default,
}

_AS_NUMBER = {aten._local_scalar_dense.default, torch.sym_float}
_SAME = {
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    *_AS_NUMBER,
}
"""Operations that give the number that they get."""
_COPIES = {*_SAME, aten.lift_fresh_copy.default, aten.scalar_tensor.default}
_BOUNDS = {
    aten.clamp.default: aten.clamp.default,
    aten.clamp_min.default: aten.clamp_min.default,
    aten.maximum.default: aten.maximum.default,
    aten.max.other: aten.maximum.default,
    torch.sym_max: aten.clamp_min.default,
    aten.add.Tensor: aten.add.Tensor,
    operator.add: aten.add.Tensor,
}
"""What keeps a number from being zero, with the operation of tensors for it."""
_PRODUCTS = {aten.mul.Tensor, operator.mul}
_LEAST = 1.0
"""Up to it, what is added to a divisor or bounds it only keeps it from being zero."""


class Step(NamedTuple):
    """An operation on a number, which is its first argument."""

    target: Any
    others: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()


class Followed(NamedTuple):
    """How a number follows from a sum.

    Args:
        total: the sum, or the mean.
        steps: what is computed of it.
        is_inverse: the number is one over it.
    """

    total: Node
    steps: tuple[Step, ...]
    is_inverse: bool


def total_of(value: Node, is_given: Callable[[Node], bool] | None = None) -> Followed | None:
    """The sum that a number follows from in a way that keeps it one.

    Args:
        is_given: asked for numbers that may be such a sum before the step has them.
    """
    steps: list[Step] = []
    is_inverse = False
    node = value
    while not (is_total(node) or (is_given is not None and is_given(node))):
        arguments = list(node.args)
        inverts = node.target is aten.reciprocal.default
        if node.target is operator.truediv and not isinstance(arguments[0], Node):
            inverts = True
            steps += [Step(aten.mul.Tensor, (arguments.pop(0),)), Step(aten.reciprocal.default)]
        elif node.target not in _AS_NUMBER and not _is_view_of_one(node):
            if node.target in _PRODUCTS | _BOUNDS.keys() and not isinstance(arguments[0], Node):
                arguments[:2] = arguments[1::-1]
            elif node.target in (aten.maximum.default, aten.max.other) and _is_small(arguments[0]):
                arguments.reverse()
            step = _step(node, arguments)
            if step is None:
                return None
            steps.append(step)
        if inverts:
            if is_inverse:
                return None
            is_inverse = True
        source = arguments[0]
        if not isinstance(source, Node):
            return None
        node = source
    return Followed(node, tuple(reversed(steps)), is_inverse)


def _step(node: Node, arguments: list[Any]) -> Step | None:
    target = node.target
    if target in _SAME or target is aten.reciprocal.default:
        return Step(target, tuple(arguments[1:]), tuple(node.kwargs.items()))
    if len(arguments) != 2 or node.kwargs:
        return None
    other = arguments[1]
    if target in _BOUNDS and _is_small(other):
        return Step(_BOUNDS[target], (other,))
    if target in _PRODUCTS and isinstance(other, int | float) and other:
        return Step(aten.mul.Tensor, (other,))
    return None


def keeps_number(step: Step) -> bool:
    """Whether it gives the number that it gets."""
    return step.target in _SAME or (step.target is aten.add.Tensor and step.others == (0,))


def _is_view_of_one(node: Node) -> bool:
    is_of_torch = isinstance(node.target, torch._ops.OpOverload)
    return is_of_torch and is_view(node) and has_one_element(node)


def is_total(node: Node) -> bool:
    """Whether a node adds up, or averages, all elements of a tensor."""
    value = node.meta.get("val")
    if node.target not in (*SUMS, aten.mean.default):
        return False
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _is_small(value: Any) -> bool:
    value = known_number(value)
    return isinstance(value, int | float) and 0 <= value <= _LEAST


def known_number(node: Any) -> Any:
    """What a tensor of one element, or a number, is known to be: a number of Python's, or a size of
    the batch; None for others. A bound that only keeps it from being zero is left out."""
    while isinstance(node, Node) and node.op == "call_function":
        arguments: Any = node.args
        bounds = node.target in _BOUNDS and _step(node, list(arguments)) is not None
        if node.target is operator.add and isinstance(arguments[1], int):
            bounds = False  # one more, such as the boxes of an image that has one
        if node.target is aten.full.default:
            node = arguments[1]
        elif node.target in (aten.ones.default, aten.ones_like.default) and has_one_element(node):
            return 1
        elif node.target is aten.stack.default and len(arguments[0]) == 1:
            (node,) = arguments[0]
        elif bounds or node.target in _COPIES or _is_view_of_one(node):
            node = arguments[0]
        else:
            break
    if not isinstance(node, Node):
        return node if isinstance(node, int | float) else None
    if node.op == "get_attr":
        tensor = getattr(node.graph.owning_module, str(node.target), None)
        is_known = isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor)
        return tensor.item() if is_known and tensor.numel() == 1 else None  # type: ignore[union-attr]
    value = node.meta.get("val")
    return value if isinstance(value, int | torch.SymInt) else None
