"""Let a graph keep images in the layout in which its convolutions are faster.

oneDNN's kernels for images stored pixel by pixel (``channels_last``) and channel by channel differ
in speed by a factor of two for some shapes: usually large images want the one, small ones with many
channels the other. Each layer, a convolution and its gradients, is timed both ways. Images are
brought to the other layout in front of the first convolution that is faster there, and stay in it
through all that follows: PyTorch's operations keep the layout that they find. What does not (a
view of an image as a row, a call of the runtime, a result of the step) gets the usual one, and so
does a layer that is faster there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from parallax.graph.common.aliases import base_of, writes_to
from parallax.graph.common.operations import is_view, written_inputs
from parallax.graph.common.sizes import sizes_of
from parallax.runtime.compute.timing import best_of, is_plain

aten: Any = torch.ops.aten

LAST = torch.channels_last
USUAL = torch.contiguous_format
MOST_NUMBERS = 1 << 22
"""In the images of a convolution that is timed."""
GAIN = 0.95
"""What part of a layer's time it may take in the other layout to be brought there, and what part
of all convolutions' time may be left with what it takes to bring images to and fro."""
# Beside views and operations on single elements, those that read any layout ...
_ANY_LAYOUT = {
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.clone.default,
    aten.copy_.default,
    aten._to_copy.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.cat.default,
}
# ... and those that want all images in the same.
_ALIKE = {
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
}
# Their results depend on how inputs lie in memory.
_BY_STRIDES = {aten.as_strided.default, aten.as_strided_.default}


@dataclass(frozen=True)
class Convolution:
    """A convolution of float32 images [batch, channels, height, width], or its gradients.

    Args:
        images, weight: their shapes.
        settings: bias sizes, stride, padding and so on, as the operation takes them.
        gradient: the shape of the result's gradient; None for the convolution itself.
    """

    images: tuple[int, ...]
    weight: tuple[int, ...]
    settings: tuple[Any, ...]
    gradient: tuple[int, ...] | None = None

    def likeness(self) -> tuple[Convolution, float]:
        """Itself, or one with fewer images that is timed in its place, and how many times less."""
        largest = max(math.prod(self.images), math.prod(self.gradient or ()))
        batch = max(self.images[0] * MOST_NUMBERS // max(largest, MOST_NUMBERS), 1)
        images = (batch, *self.images[1:])
        gradient = None if self.gradient is None else (batch, *self.gradient[1:])
        less = dataclasses.replace(self, images=images, gradient=gradient)
        return less, self.images[0] / batch


Seconds = Callable[[Convolution, torch.memory_format], float]


def use_faster_layout(graph: Graph, seconds: Seconds | None = None) -> int:
    """Keep images of a graph in ``channels_last`` where that is faster. Equal up to rounding.

    Args:
        graph: in which nodes carry example values in ``meta["val"]``.
        seconds: that a convolution takes; by timing it unless given.

    Returns:
        How many convolutions work on such images then.
    """
    found = {node: one for node in graph.nodes if (one := convolution_of(node)) is not None}
    if not found or any(node.target in _BY_STRIDES for node in graph.nodes):
        return 0
    wanted, before, after = _faster_layers(found, seconds or time_of)
    layouts = _Layouts(graph)
    if after >= GAIN * before or not layouts.follow(wanted):
        return 0
    if after + sum(time_of_turning(shape) for shape in layouts.turned()) >= GAIN * before:
        return 0
    layouts.write()
    return sum(layout is LAST for layout in wanted.values())


def _faster_layers(
    found: dict[Node, Convolution], seconds: Seconds
) -> tuple[dict[Node, torch.memory_format], float, float]:
    """The layout of each convolution; seconds of all in the usual layout, and then."""
    layers: dict[Any, list[Node]] = {}
    for node, one in found.items():
        weight = node.args[1 if one.gradient is None else 2]
        layers.setdefault(weight, []).append(node)
    wanted: dict[Node, torch.memory_format] = {}
    before = after = 0.0
    for nodes in layers.values():
        usual, last = (sum(seconds(found[n], layout) for n in nodes) for layout in (USUAL, LAST))
        faster = last < GAIN * usual
        wanted.update(dict.fromkeys(nodes, LAST if faster else USUAL))
        before += usual
        after += last if faster else usual
    return wanted, before, after


class _Layouts:
    """Follows images in their new layout through a graph, and then changes it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._values: dict[Node, Any] = {}
        """New example values of nodes whose results lie otherwise."""
        self._wanted: dict[Node, dict[Node, torch.memory_format]] = {}
        """By node, the inputs that are to be brought to a layout before."""

    def follow(self, wanted: dict[Node, torch.memory_format]) -> bool:
        """Find out what lies how, with convolutions in these layouts; False if something cannot."""
        for node in self._graph.nodes:
            layout = wanted.get(node)
            if layout is not None:
                images = node.args[: 1 if node.target is aten.convolution.default else 2]
                self._wanted[node] = {
                    image: layout
                    for image in images
                    if isinstance(image, Node)
                    and not self._value(image).is_contiguous(memory_format=layout)
                }
            elif not any(source in self._values for source in node.all_input_nodes):
                continue
            if not self._compute(node):
                return False
        return True

    def _value(self, node: Node) -> Any:
        return self._values.get(node, node.meta.get("val"))

    def _compute(self, node: Node) -> bool:
        """Find the new example value of a node, or bring its inputs to the usual layout."""
        if node.target in _ALIKE:
            self._wanted[node] = {
                source: LAST
                for source in node.all_input_nodes
                if _is_image(value := self._value(source))
                and not value.is_contiguous(memory_format=LAST)
            }
        known = all(self._value(source) is not None for source in node.all_input_nodes)
        if known and (node.target in _ALIKE or _takes_any_layout(node)):
            # Images in this layout do not have every view.
            with contextlib.suppress(RuntimeError, ValueError):
                self._note(node, self._evaluate(node))
                return True
        elif node.target is operator.getitem:
            self._note(node, self._value(node.all_input_nodes[0])[node.args[1]])
            return True
        return self._bring_back(node)

    def _evaluate(self, node: Node) -> Any:
        wanted = self._wanted.get(node, {})

        def example(source: Node) -> Any:
            value = self._value(source)
            if source in wanted:
                return value.contiguous(memory_format=wanted[source])
            return value

        args, kwargs = map_arg((node.args, node.kwargs), example)
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _note(self, node: Node, value: Any) -> None:
        if _strides(value) != _strides(node.meta.get("val")):
            self._values[node] = value

    def _bring_back(self, node: Node) -> bool:
        changed = [source for source in node.all_input_nodes if source in self._values]
        written = written_inputs(node)
        for source in changed:
            shares = is_view(node) and isinstance(node.target, torch._ops.OpOverload)
            if source in written or (shares and any(True for _ in writes_to(base_of(source)))):
                return False  # what is written would be a copy
            if not isinstance(self._values[source], torch.Tensor):
                return False
        self._wanted[node] = dict.fromkeys(changed, USUAL)
        return True

    def turned(self) -> Iterator[tuple[int, ...]]:
        """Shapes of the tensors that are brought to another layout."""
        pairs = {
            (source, layout) for each in self._wanted.values() for source, layout in each.items()
        }
        for source, _ in pairs:
            yield sizes_of(self._value(source))

    def write(self) -> None:
        """Bring the images to their layouts in the graph."""
        made: dict[tuple[Node, torch.memory_format], Node] = {}
        for node in list(self._graph.nodes):
            for source, layout in self._wanted.get(node, {}).items():
                key = (source, layout)
                if key not in made:
                    with self._graph.inserting_before(node):
                        new = self._graph.call_function(
                            aten.clone.default, (source,), {"memory_format": layout}
                        )
                    new.meta["val"] = self._value(source).contiguous(memory_format=layout)
                    made[key] = new
                node.replace_input_with(source, made[key])
            for source in written_inputs(node):
                # A copy of what is changed now is out of date.
                memory = base_of(source)
                made = {key: new for key, new in made.items() if base_of(key[0]) is not memory}
            if node in self._values:
                node.meta["val"] = self._values[node]


def _takes_any_layout(node: Node) -> bool:
    """Whether an operation reads its inputs by their strides, each as it lies.

    Others may be known to autograd alone, which brings what they are given to one layout first; of
    that a captured graph shows nothing.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target in _ANY_LAYOUT or is_view(node)


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.stride() if value.layout is torch.strided else None
    if isinstance(value, tuple | list):
        return [_strides(one) for one in value]
    return None


def convolution_of(node: Node) -> Convolution | None:
    """The convolution that a node is, or whose gradients it computes; None if its images are of
    another kind than those that are timed."""
    arguments: tuple[Any, ...] = node.args
    gradient: Any = None
    sizes: Any
    if node.target is aten.convolution.default and not node.kwargs:
        images, weight, bias, *rest = arguments
        sizes = None if bias is None else True
        tensors = [images, weight]
    elif node.target is aten.convolution_backward.default and not node.kwargs:
        gradient, images, weight, sizes, *rest = arguments
        tensors = [gradient, images, weight]
    else:
        return None
    values: list[Any] = [one.meta.get("val") for one in tensors]
    if not all(is_plain(v) and v.dim() == 4 and v.is_contiguous() for v in values):
        return None
    shapes = [sizes_of(value) for value in values]
    settings = (_frozen(sizes), *(_frozen(one) for one in rest))
    if gradient is None:
        return Convolution(shapes[0], shapes[1], settings)
    return Convolution(shapes[1], shapes[2], settings, shapes[0])


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


@functools.cache
def time_of(convolution: Convolution, layout: torch.memory_format) -> float:
    """Seconds for images in a layout, with this process's threads.

    Images that come out stay as they lie; the weight and its gradient lie in the usual layout.
    """
    convolution, times = convolution.likeness()
    settings: Sequence[Any] = convolution.settings
    first, *rest = (list(one) if isinstance(one, tuple) else one for one in settings)
    images, weight = _ones(convolution.images, layout), _ones(convolution.weight, USUAL)
    bias = None if first is None else torch.ones(convolution.weight[0], dtype=torch.float32)
    gradient = None if convolution.gradient is None else _ones(convolution.gradient, layout)

    def compute() -> object:
        if gradient is None:
            return aten.convolution(images, weight, bias, *rest)
        made = aten.convolution_backward(gradient, images, weight, first, *rest)
        return made[0], made[1] if made[1] is None else made[1].contiguous()

    with torch.no_grad():
        return times * best_of(compute)


@functools.cache
def time_of_turning(shape: tuple[int, ...]) -> float:
    """Seconds to bring a tensor to another layout."""
    rows = max(shape[0] * MOST_NUMBERS // max(math.prod(shape), MOST_NUMBERS), 1)
    tensor = _ones((rows, *shape[1:]), LAST if len(shape) == 4 else USUAL)
    with torch.no_grad():
        return shape[0] / rows * best_of(lambda: tensor.clone(memory_format=USUAL))


def _ones(shape: tuple[int, ...], layout: torch.memory_format) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32).contiguous(memory_format=layout)
