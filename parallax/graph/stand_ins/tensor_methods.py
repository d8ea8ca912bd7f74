"""What Python does to tensors that is no operation: ``tensor.data = other``, ``copy.deepcopy``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from parallax.errors import UnsupportedError
from parallax.graph.common.replaced import replaced
from parallax.graph.common.torch_internals import FakeTensor
from parallax.graph.common.user_code import user_line


@contextlib.contextmanager
def data_by_copies(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Record the assignment, which is no operation, as a copy into the tensor's memory.

    That is the same where the new value is the tensor's alone; what would make two tensors one, or
    change a shape or dtype, is refused.
    """
    descriptor: Any = torch.Tensor.data
    taken = set(map(_memory, tensors))

    def put(self: torch.Tensor, value: torch.Tensor) -> None:
        like = (self.shape, self.dtype, self.device, self.layout)
        memory = _memory(value)
        if _is_same(self, value):
            return  # as where a library moves it to the device on which it is
        if like != (value.shape, value.dtype, value.device, value.layout) or memory in taken:
            raise _refusal()
        if memory is not None:
            taken.add(memory)
        with torch.no_grad():
            descriptor.__get__(self).copy_(value)

    with replaced((FakeTensor, "data", property(descriptor.__get__, put))):
        yield


@contextlib.contextmanager
def deep_copies() -> Iterator[None]:
    """Let a step copy its model: a copy of a stand-in is what a copy of the tensor would be."""

    def copy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            found: torch.Tensor = memo[id(self)]
            return found
        if not self.is_leaf:
            raise RuntimeError("only tensors that a person made can be copied by deepcopy")
        with torch.no_grad():
            values = self.detach().clone(memory_format=torch.preserve_format)
        if isinstance(self, torch.nn.Parameter):
            result: torch.Tensor = torch.nn.Parameter(values, self.requires_grad)
        else:
            result = values.requires_grad_(self.requires_grad)
        memo[id(self)] = result
        return result

    with replaced((FakeTensor, "__deepcopy__", copy)):
        yield


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    memory = _memory(left)
    return (
        memory is not None
        and memory == _memory(right)
        and left.dtype is right.dtype
        and (left.shape, left.stride()) == (right.shape, right.stride())
        and left.storage_offset() == right.storage_offset()
    )


def _memory(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _refusal() -> UnsupportedError:
    return UnsupportedError(
        "The step assigns to .data a tensor of another shape or dtype, or one that lies in another "
        "variable's memory, which no operation records: the change would be lost.",
        hint="copy its values: with torch.no_grad(): parameter.copy_(value).",
        where=user_line(),
    )
