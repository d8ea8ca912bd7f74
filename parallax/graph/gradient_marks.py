"""Where a gradient is marked while the step is captured: what ``parallax::gradient`` stands on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallax.graph.common.recording import Recording
from parallax.graph.common.replaced import replaced
from parallax.graph.common.torch_internals import (
    FakeTensorMode,
    get_proxy_mode,
    gradients_through,
    node_of,
)
from parallax.graph.common.user_code import user_line
from parallax.graph.lending import Lender
from parallax.graph.objects.state import Leaf
from parallax.ops import marks

aten: Any = torch.ops.aten

_GRAD: Any = torch._C.TensorBase.grad
_ONES = {aten.ones.default, aten.ones_like.default, aten.new_ones.default}
_FULL = {aten.full.default, aten.full_like.default}


def mark_backward(
    tensors: Sequence[Leaf], recording: Recording, sentinels: frozenset[str], mode: FakeTensorMode
) -> list[Any]:
    """Mark what ``backward()`` leaves in ``.grad`` of variables.

    Args:
        sentinels: variables that are given a gradient of an earlier call, to see who reads it.

    Returns:
        What ends it: each has ``remove()``.
    """
    handles = []
    for leaf in tensors:
        if leaf.value.requires_grad and leaf.value.is_leaf:
            if leaf.name in sentinels:
                with mode:
                    recording.left[leaf.name] = torch.zeros_like(leaf.value)
                leaf.value.grad = recording.left[leaf.name]
            handles.append(mark_gradient(leaf, recording))
    return handles


def mark_gradient(leaf: Leaf, recording: Recording) -> Any:
    """Mark what backward passes leave in ``.grad`` of a variable.

    Returns:
        What ends it, by ``remove()``.
    """

    def hook(parameter: torch.Tensor) -> None:
        recording.mark(leaf.name)
        assert parameter.grad is not None
        _GRAD.__set__(parameter, marks.gradient(parameter.grad, leaf.name))

    # The list of hooks stays with the Python object; the hook itself belongs to the stand-in.
    leaf.value._post_accumulate_grad_hooks = None
    leaf.value.register_post_accumulate_grad_hook(hook)
    return _Unmark(leaf.value)


@dataclass
class _Unmark:
    parameter: torch.Tensor

    def remove(self) -> None:
        self.parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


@contextlib.contextmanager
def mark_returned(tensors: Sequence[Leaf], recording: Recording, lender: Lender) -> Iterator[None]:
    """Mark what ``torch.autograd.grad`` returns for variables, and what backward passes leave in
    those that the step itself has unfrozen; and let some have gradients of zero that have none.

    Args:
        lender: has these.
    """
    names = _names(tensors)
    begun = -1
    handles: list[Any] = []

    def start() -> None:
        lender.start()
        for leaf in tensors:
            one = leaf.value
            if one.requires_grad and one.is_leaf and not one._post_accumulate_grad_hooks:
                handles.append(mark_gradient(leaf, recording))

    def see(source: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
        name = names.get(id(source))
        if name is None or gradient is None:
            return gradient
        recording.mark(name)
        marked: torch.Tensor = marks.gradient(gradient, name)
        return marked

    def see_further(source: torch.Tensor) -> None:
        if id(source) in names and recording.differentiated is None:
            recording.differentiated = user_line()

    def begin(output: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal begun
        output, gradient = _begin(output, gradient)
        if begun == recording.passes:  # at another loss of the same pass
            return output, gradient
        begun = recording.passes
        with torch.enable_grad():
            nothing = lender.lookups()
            if nothing is not None:
                output = output + nothing.to(output.dtype)
        return output, gradient

    try:
        with gradients_through(see, see_further, start, begin, lender.end):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _begin(output: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a backward pass begin at a loss: a number that is given as the gradient of something is
    what this, or its sum, is multiplied with. Other gradients are from a pass before."""
    factor = _number(gradient)
    if factor is None:
        return output, gradient
    with torch.enable_grad():
        loss = output if output.numel() == 1 else output.sum()
        if not isinstance(factor, int | float) or factor != 1:
            loss = loss * factor
    return loss, gradient if loss is output else torch.ones_like(loss)


def _number(gradient: torch.Tensor) -> torch.Tensor | float | None:
    """What all elements of a given gradient are; None if they may differ."""
    mode = get_proxy_mode()
    node = None if mode is None else node_of(mode.tracer, gradient)
    if node is None or gradient.layout is not torch.strided:
        return None
    if node.target in _ONES:
        return 1
    if node.target in _FULL and isinstance(node.args[1], int | float):
        return node.args[1]
    return gradient.detach() if gradient.numel() == 1 else None


@contextlib.contextmanager
def mark_assigned(tensors: Sequence[Leaf], recording: Recording) -> Iterator[None]:
    """Mark what the step itself puts into ``.grad``: it may be a gradient that was computed some
    other way (``torch.func``, of a copy of the model, by hand). Which are is told by the graph."""
    names = _names(tensors)

    def put(self: torch.Tensor, value: torch.Tensor | None) -> None:
        name = names.get(id(self))
        if name is not None and isinstance(value, torch.Tensor):
            recording.mark(name)
            value = marks.gradient(value.detach(), name, True)
        _GRAD.__set__(self, value)

    def forget(self: torch.Tensor) -> None:
        _GRAD.__delete__(self)

    with replaced((torch.Tensor, "grad", property(_GRAD.__get__, put, forget))):
        yield


def _names(tensors: Sequence[Leaf]) -> dict[int, str]:
    """The variables, by the identity of their objects: the fields of stand-ins may be swapped."""
    return {id(leaf.value): leaf.name for leaf in tensors if leaf.kind == "parameter"}
