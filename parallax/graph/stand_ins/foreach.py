"""Operations on lists of tensors, one tensor at a time: what rewriting understands.

Optimizers, clipping and moving averages handle all tensors at once where they can. A graph has an
operation for each; equal ones are grouped again when it is bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._foreach_utils as foreach_utils

from parallax.graph.common.replaced import replaced

PREFIX = "_foreach_"
_WITH_VALUE = ("addcmul", "addcdiv")
"""Operations whose factor comes last in a list, and by its name for one tensor."""


@contextlib.contextmanager
def without_foreach() -> Iterator[None]:
    """Let torch's utilities, and whoever calls such an operation, take tensors one at a time."""

    def never(*args: Any, **named: Any) -> bool:
        return False

    clip: Any = torch.nn.utils.clip_grad
    changes: list[tuple[Any, str, Any]] = [
        (module, name, never)
        for module in (foreach_utils, clip)
        for name in ("_has_foreach_support", "_device_has_foreach_support")
        if hasattr(module, name)
    ]
    for name in dir(torch):
        single = _single(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
        if single is not None:
            changes.append((torch, name, _one_at_a_time(single, getattr(torch, name))))
    with replaced(*changes):
        yield


def _single(name: str) -> Callable[..., Any] | None:
    """The operation on one tensor, with the arguments that the one on a list has."""
    method: Callable[..., Any] | None = getattr(torch.Tensor, name, None)
    if name == "norm":
        method = torch.linalg.vector_norm
    if method is None or name.rstrip("_") not in _WITH_VALUE:
        return method

    scaled = method

    def with_value(tensor: Any, one: Any, other: Any, value: Any = 1, **named: Any) -> Any:
        return scaled(tensor, one, other, value=named.get("scalars", value))

    return with_value


def _one_at_a_time(single: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensors: Any, *args: Any, **named: Any) -> Any:
        if not isinstance(tensors, list | tuple):
            return original(tensors, *args, **named)
        return [
            single(
                tensor,
                *(_at(value, place) for value in args),
                **{key: _at(value, place) for key, value in named.items()},
            )
            for place, tensor in enumerate(tensors)
        ]

    return call


def _at(value: Any, place: int) -> Any:
    return value[place] if isinstance(value, Sequence) else value
