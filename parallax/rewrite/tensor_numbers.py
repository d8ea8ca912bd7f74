"""Numbers of a step (learning rates, step counters) as tensors without dimensions.

A compiler makes a constant of a number, but these change from step to step. In a compiled region
they are tensors in float64, what Python computes of them is computed in float64 there, and
operations that take a number have a form that takes a tensor. The numbers of both forms are equal
but for rounding in the type of the tensors that they meet.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from parallax.ops.updates import ADAM, ADAM_BY_TENSORS, SGD, SGD_BY_TENSORS

aten: Any = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)


def is_number(node: Node) -> bool:
    """Whether a node's value is a Python number."""
    value = node.meta.get("val")
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat) and not isinstance(
        value, bool
    )


def to_tensor(number: float) -> torch.Tensor:
    """A number for a compiled region."""
    return torch.tensor(number, dtype=torch.float64)


def as_number(value: torch.Tensor) -> float:
    """The inverse."""
    return value.item()


def _read(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float64)


def _same(value: Any) -> Any:
    return value


_ARITHMETIC: dict[Any, Callable[..., Any]] = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.truediv: operator.truediv,
    operator.neg: operator.neg,
    operator.pow: operator.pow,
    torch.sym_float: _same,
    math.sqrt: torch.sqrt,
}


def is_arithmetic(node: Node) -> bool:
    """Whether a number is made of others in a way that works with tensors too."""
    return node.target in _ARITHMETIC


def _like(number: Any, tensor: torch.Tensor) -> Any:
    """A number in the type in which PyTorch computes with a tensor and a number."""
    if not isinstance(number, torch.Tensor) or not tensor.is_floating_point():
        return number
    return number.to(torch.float32 if tensor.dtype in _HALF else tensor.dtype)


def _scaled(other: Any, alpha: Any, tensor: torch.Tensor) -> Any:
    other = _like(other, tensor) if isinstance(other, torch.Tensor) and other.dim() == 0 else other
    return other if isinstance(alpha, int) and alpha == 1 else other * _like(alpha, tensor)


def _add(x: torch.Tensor, other: Any, alpha: Any = 1) -> Any:
    return x + _scaled(other, alpha, x)


def _add_(x: torch.Tensor, other: Any, alpha: Any = 1) -> Any:
    return x.add_(_scaled(other, alpha, x))


def _sub(x: torch.Tensor, other: Any, alpha: Any = 1) -> Any:
    return x - _scaled(other, alpha, x)


def _sub_(x: torch.Tensor, other: Any, alpha: Any = 1) -> Any:
    return x.sub_(_scaled(other, alpha, x))


def _mul(x: torch.Tensor, other: Any) -> Any:
    return x * _like(other, x)


def _mul_(x: torch.Tensor, other: Any) -> Any:
    return x.mul_(_like(other, x))


def _div(x: torch.Tensor, other: Any) -> Any:
    return x / _like(other, x)


def _div_(x: torch.Tensor, other: Any) -> Any:
    return x.div_(_like(other, x))


def _addcmul(x: torch.Tensor, one: Any, other: Any, value: Any = 1) -> Any:
    return x + one * other * _like(value, x)


def _addcmul_(x: torch.Tensor, one: Any, other: Any, value: Any = 1) -> Any:
    return x.add_(one * other * _like(value, x))


def _addcdiv(x: torch.Tensor, one: Any, other: Any, value: Any = 1) -> Any:
    return x + one / other * _like(value, x)


def _addcdiv_(x: torch.Tensor, one: Any, other: Any, value: Any = 1) -> Any:
    return x.add_(one / other * _like(value, x))


def _lerp(x: torch.Tensor, end: torch.Tensor, weight: Any) -> Any:
    return torch.lerp(x, end, _like(weight, x))


def _lerp_(x: torch.Tensor, end: torch.Tensor, weight: Any) -> Any:
    return x.lerp_(end, _like(weight, x))


def _pow(x: torch.Tensor, exponent: Any) -> Any:
    return torch.pow(x, _like(exponent, x))


_FORMS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add_,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub_.Tensor: _sub_,
    aten.sub.Scalar: _sub,
    aten.mul.Tensor: _mul,
    aten.mul_.Tensor: _mul_,
    aten.mul.Scalar: _mul,
    aten.mul_.Scalar: _mul_,
    aten.div.Tensor: _div,
    aten.div_.Tensor: _div_,
    aten.div.Scalar: _div,
    aten.div_.Scalar: _div_,
    aten.addcmul.default: _addcmul,
    aten.addcmul_.default: _addcmul_,
    aten.addcdiv.default: _addcdiv,
    aten.addcdiv_.default: _addcdiv_,
    aten.lerp.Scalar: _lerp,
    aten.lerp_.Scalar: _lerp_,
    aten.pow.Tensor_Scalar: _pow,
    SGD: SGD_BY_TENSORS,
    ADAM: ADAM_BY_TENSORS,
}


def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, *settings: Any
) -> tuple[torch.Tensor, ...]:
    """In training, by an operation whose schema tells what it changes."""
    legit = aten._native_batch_norm_legit
    if mean is None:
        return legit.no_stats(x, weight, bias, *settings)  # type: ignore[no-any-return]
    return legit.default(x, weight, bias, mean, variance, *settings)  # type: ignore[no-any-return]


def _cudnn_batch_norm(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    return *_batch_norm(x, *others), x.new_empty(0, dtype=torch.uint8)


_BATCH_NORMS = {
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
}

_CONSTANTS = {SGD: range(4, 8), ADAM: range(6, 11)}
"""Of kernels that update variables, which arguments are numbers in the form for tensors too."""


def constant_arguments(node: Node) -> range:
    """Which arguments of a node are to be numbers even where others are tensors."""
    return _CONSTANTS.get(node.target, range(0))


def _has_literals(node: Node) -> bool:
    """Whether a kernel that updates variables has literals where its other form has tensors."""
    constants = _CONSTANTS.get(node.target)
    if constants is None:
        return False
    tensors, _ = pytree.tree_flatten(node.args[: constants.start])
    return any(isinstance(one, int | float) for one in tensors)


def tensor_form(node: Node) -> Callable[..., Any] | None:
    """What computes a node's value when its numbers are tensors; None if nothing does."""
    if is_number(node):
        if node.target is aten._local_scalar_dense.default:
            return _read
        return _ARITHMETIC.get(node.target)
    target: Any = node.target
    if target in _BATCH_NORMS and node.args[5]:
        target = _BATCH_NORMS[target]
    if any(is_number(source) for source in node.all_input_nodes):
        return None if _has_literals(node) else _FORMS.get(target)
    return target  # type: ignore[no-any-return]
