"""Functions of Python's and NumPy's numbers, for symbols."""

from __future__ import annotations

import builtins
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from parallax.graph.common.replaced import replaced
from parallax.graph.common.user_code import is_internal


@contextlib.contextmanager
def symbolic_math() -> Iterator[None]:
    """Let functions of Python's numbers take symbols too, where torch's optimizers call them, and
    ``isinstance`` in users' code.

    Functions of ``math``, of tensors as well, and NumPy's of one number; ``torch.tensor`` and
    ``torch.as_tensor`` (SparseAdam, ASGD; schedules in the step); and ``max`` and ``min`` in
    Adafactor's module, which are names of its own for as long.
    """
    adafactor: Any = torch.optim._adafactor
    functions = {name: _by_tensors(name) for name in _OF_NUMBERS}
    functions["sqrt"] = _of_tensors(_or_symbolic(math.sqrt, torch.sym_sqrt))
    functions["pow"] = _of_tensors(_or_symbolic(math.pow, _power))
    with replaced(
        (builtins, "isinstance", _is_instance),
        *((math, name, function) for name, function in functions.items()),
        *((np, name, _of_one(getattr(np, name), functions[name])) for name in _OF_NUMPY),
        (torch, "as_tensor", _lifting(torch.as_tensor)),
        (torch, "tensor", _lifting(torch.tensor)),
        (adafactor, "max", _or_symbolic(max, torch.sym_max)),
        (adafactor, "min", _or_symbolic(min, torch.sym_min)),
    ):
        yield


def _is_instance(value: Any, kinds: Any) -> bool:
    """``isinstance``, by which users' code takes a symbol for the number that it stands for."""
    found = _isinstance(value, kinds)
    if found or type(value) not in _KINDS or is_internal(sys._getframe(1).f_code.co_filename):
        return found
    return _isinstance(_KINDS[type(value)], kinds)


_isinstance = isinstance
_KINDS: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}
_OF_NUMPY = ("exp", "log", "sqrt", "isfinite", "isinf", "isnan")
_OF_NUMBERS = (
    *("cos", "cosh", "sin", "sinh", "tan", "tanh", "acos", "asin", "atan"),
    *("exp", "expm1", "log", "log10", "log1p", "log2", "erf"),
    *("isfinite", "isinf", "isnan"),
)


def _by_tensors(name: str) -> Callable[..., Any]:
    """A function of ``math`` that has torch's of the same name compute it for symbols."""
    operation = getattr(torch, name)

    def symbolic(value: Any, base: Any = None) -> Any:
        result = operation(torch.scalar_tensor(value, dtype=torch.float64, device="cpu")).item()
        return result if base is None else result / math.log(base)

    return _of_tensors(_or_symbolic(getattr(math, name), symbolic))


def _power(base: Any, exponent: Any) -> Any:
    return torch.sym_float(base) ** torch.sym_float(exponent)


def _of_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of numbers take tensors of one element for these, as ``math`` does."""

    def called(*values: Any) -> Any:
        return function(*(v.item() if isinstance(v, torch.Tensor) else v for v in values))

    return called


def _of_one(original: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    """A function of NumPy that another one computes for a symbol, or a tensor of no dimension."""

    def called(value: Any, *others: Any, **named: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor) and value.dim() == 0
        if others or named or not (is_tensor or _is_symbol(value)):
            return original(value, *others, **named)
        return symbolic(value)

    return called


def _or_symbolic(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    def function(*values: Any) -> Any:
        return (symbolic if any(map(_is_symbol, values)) else plain)(*values)

    return function


def _lifting(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, list | tuple) and has_symbols(data):
            return torch.stack([make(number, *args, **kwargs) for number in data])
        if not _is_symbol(data):
            return original(data, *args, **kwargs)
        if "dtype" not in kwargs and not args:
            floating = isinstance(data, torch.SymFloat)
            kwargs["dtype"] = torch.get_default_dtype() if floating else torch.int64
        return torch.scalar_tensor(data, *args, **kwargs)

    return make


def has_symbols(value: Any) -> bool:
    """Whether a number is a symbol, or any in lists and tuples."""
    if isinstance(value, list | tuple):
        return any(map(has_symbols, value))
    return _is_symbol(value)


def _is_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymFloat | torch.SymInt)
