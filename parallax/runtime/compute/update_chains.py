"""What the optimizers of PyTorch do to one variable, found in a graph: chains of operations.

As ``torch.optim`` writes them when it takes one variable after another: SGD with or without
momentum, dampening, Nesterov's and weight decay; Adam and AdamW.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.common.aliases import memory_of, tensor_of
from parallax.graph.common.sizes import sizes_of
from parallax.ops.updates import ADAM, SGD

aten: Any = torch.ops.aten

_TYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32,)}
"""By device, what a kernel takes. On CUDA it may read the learning rate in float32."""
Number = Any
"""A Python number, or the node of one."""


@dataclass
class Chain:
    """The update of one variable.

    Args:
        kernel: that can do it.
        tensors: what the kernel is given of this variable, by argument; the first it updates.
        numbers: what it shares with others, by argument.
        nodes: its operations, the last one first.
        step: of Adam, its number.
    """

    kernel: Any
    tensors: tuple[Node, ...]
    numbers: tuple[Number, ...]
    nodes: list[Node]
    step: Number = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What chains of one call have alike."""
        value = self.tensors[0].meta["val"]
        return self.kernel, len(self.tensors), value.dtype, self.numbers


def find_chains(graph: Graph) -> Iterator[Chain]:
    """The updates that a kernel can do, in the order in which they end."""
    taken: set[Node] = set()
    for node in graph.nodes:
        match = _MATCHES.get(node.target)
        chain = None if match is None else match(node)
        if chain is not None and _fits(chain) and not taken & set(chain.nodes):
            taken.update(chain.nodes)
            yield chain


def _fits(chain: Chain) -> bool:
    """Whether a kernel takes such tensors, and nobody else wants what lies between them."""
    values = [tensor.meta.get("val") for tensor in chain.tensors]
    first = values[0]
    if not isinstance(first, torch.Tensor) or first.dtype not in _TYPES.get(first.device.type, ()):
        return False
    if not all(
        isinstance(value, torch.Tensor)
        and value.dtype is first.dtype
        and value.device == first.device
        and value.layout is torch.strided
        and sizes_of(value) == sizes_of(first)
        for value in values
    ):
        return False
    memories = [memory_of(tensor) for tensor in chain.tensors]
    if memories[0].op != "placeholder" or len(set(memories)) < len(memories):
        return False  # it is no variable, or one is part of another
    inside = set(chain.nodes)
    return all(
        user in inside
        for node in chain.nodes
        if tensor_of(node) not in chain.tensors
        for user in node.users
    )


def _sgd(node: Any) -> Chain | None:
    """``parameter.add_(direction, alpha=-rate)`` and what made the direction."""
    rate = _negative(node.kwargs.get("alpha", 1))
    if rate is None or len(node.args) != 2 or not _is_tensor(node.args[1]):
        return None
    parameter, direction = node.args
    nodes = [node]
    buffers: tuple[Any, ...] = ()
    momentum, dampening, nesterov = 0.0, 0.0, False
    found = _buffer(direction)
    if found is None and _is(direction, aten.add.Tensor):
        # Nesterov: the gradient, and the buffer with the momentum once more.
        found = _buffer(direction.args[1])
        nesterov = found is not None and found.gradient is direction.args[0]
        if found is not None and not (nesterov and direction.kwargs.get("alpha") == found.momentum):
            return None
        nodes += [direction] if nesterov else []
    gradient = direction
    if found is not None:
        nodes += found.nodes
        buffers, momentum, dampening = (found.buffer,), found.momentum, found.dampening
        gradient = found.gradient
    gradient, decay = _decayed(gradient, parameter, nodes)
    tensors = tuple(tensor_of(one) for one in (parameter, gradient, *buffers))
    return Chain(SGD, tensors, (rate, decay, momentum, dampening, nesterov), nodes)


@dataclass(frozen=True)
class _Buffer:
    """``buffer.mul_(momentum).add_(gradient, alpha=1 - dampening)``."""

    buffer: Node
    momentum: Number
    gradient: Node
    dampening: Number
    nodes: list[Node]


def _buffer(node: Any) -> _Buffer | None:
    if not (_is(node, aten.add_.Tensor) and _is(node.args[0], aten.mul_.Tensor)):
        return None
    scaled, gradient = node.args
    buffer, momentum = scaled.args
    added = node.kwargs.get("alpha", 1)
    dampening = _rest(added) if isinstance(added, Node) else 1.0 - added
    if not (_is_number(momentum) and _is_number(dampening) and _is_tensor(gradient)):
        return None
    return _Buffer(buffer, momentum, gradient, dampening, [scaled, node])


def _adam(node: Any) -> Chain | None:
    """``parameter.addcdiv_(mean, root, value=-rate / (1 - beta1 ** step))`` and what made these."""
    if len(node.args) != 3:
        return None
    parameter, mean, root = node.args
    rate, beta1, step = _corrected(_negative(node.kwargs.get("value", 1)))
    if step is None or not (_is(mean, aten.lerp_.Scalar) and _is(root, aten.add_.Tensor)):
        return None
    divided, tiny = root.args
    if not (_is_number(tiny) and not root.kwargs and _is(divided, aten.div.Tensor)):
        return None
    squares_root: Any
    squares_root, correction = divided.args
    beta2, same = _root_correction(correction)
    square: Any = squares_root.args[0] if _is(squares_root, aten.sqrt.default) else None
    if same is not step or not (
        _is(square, aten.addcmul_.default) and _is(square.args[0], aten.mul_.Tensor)
    ):
        return None
    scaled, gradient, again = square.args
    mean_before, met, weight = mean.args
    if not (
        gradient is again is met
        and scaled.args[1] is beta2
        and _rest(square.kwargs.get("value")) is beta2
        and _rest(weight) is beta1
    ):
        return None
    nodes = [node, root, divided, squares_root, square, scaled, mean]
    decay, decoupled = 0.0, False
    if _is(parameter, aten.mul_.Tensor):
        product = _rest(parameter.args[1])
        if not (_is(product, operator.mul) and product.args[0] is rate):
            return None
        nodes.append(parameter)
        decay, decoupled = product.args[1], True
        parameter = parameter.args[0]
    if not decoupled:
        gradient, decay = _decayed(gradient, parameter, nodes)
    given = (parameter, gradient, mean_before, scaled.args[0])
    tensors = tuple(tensor_of(one) for one in given)
    return Chain(ADAM, tensors, (rate, beta1, beta2, decay, tiny, decoupled), nodes, step)


_MATCHES: dict[Any, Callable[[Node], Chain | None]] = {
    aten.add_.Tensor: _sgd,
    aten.addcdiv_.default: _adam,
}
"""By a chain's last operation."""


def _decayed(gradient: Any, parameter: Any, nodes: list[Node]) -> tuple[Any, Number]:
    """The gradient before ``gradient.add(parameter, alpha=decay)``, and the decay."""
    decay = gradient.kwargs.get("alpha") if _is(gradient, aten.add.Tensor) else None
    if decay is None or gradient.args[1] is not parameter or not _is_number(decay):
        return gradient, 0.0
    nodes.append(gradient)
    return gradient.args[0], decay


def _corrected(value: Any) -> tuple[Any, Any, Any]:
    """Rate, beta and step of ``rate / (1 - beta ** step)``."""
    if _is(value, operator.truediv):
        power = _rest(value.args[1])
        if _is(power, operator.pow):
            return value.args[0], *power.args
    return None, None, None


def _root_correction(value: Any) -> tuple[Any, Any]:
    """Beta and step of ``(1 - beta ** step) ** 0.5``."""
    if _is(value, operator.pow) and value.args[1] == 0.5:
        power = _rest(value.args[0])
        if _is(power, operator.pow):
            return power.args[0], power.args[1]
    return None, None


def _rest(value: Any) -> Any:
    """The x of ``1 - x``."""
    if _is(value, operator.sub) and value.args[0] == 1:
        return value.args[1]
    return None


def _negative(value: Any) -> Number:
    """The x of ``-x``; None for others."""
    if _is(value, operator.neg) and _is_number(value.args[0]):
        return value.args[0]
    return -value if isinstance(value, int | float) and value < 0 else None


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _is_number(value: Any) -> bool:
    kinds = (int, float, torch.SymInt, torch.SymFloat)
    return isinstance(value.meta.get("val") if isinstance(value, Node) else value, kinds)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)
