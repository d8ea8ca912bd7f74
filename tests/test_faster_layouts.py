"""Images in another layout give the same numbers, and what leaves a graph lies as usual."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import parallax
from parallax.runtime import binding
from parallax.runtime.compute import images
from parallax.runtime.compute.images import LAST, USUAL, Convolution, time_of, use_faster_layout

aten: Any = torch.ops.aten

Layout = torch.memory_format


def always(convolution: Convolution, layout: Layout) -> float:
    """As if all were faster there, by much more than it takes to turn images."""
    return 1.0 if layout is LAST else 2.0


def large_only(convolution: Convolution, layout: Layout) -> float:
    """As if images of four pixels and fewer were faster as usual."""
    small = convolution.images[-1] <= 2
    return 1.0 if (layout is LAST) is not small else 2.0


class Block(nn.Module):
    """Convolutions with all that images pass between them."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1, stride=2, groups=groups)
        self.group_norm = nn.GroupNorm(2, 6)
        self.third = nn.Conv2d(6, 8, 1)
        self.last = nn.Linear(8 * 2 * 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(self.norm(self.first(x)))
        x = nn.functional.max_pool2d(x, 2)
        y = self.group_norm(self.second(x))
        x = nn.functional.interpolate(y, scale_factor=2) + x
        x = nn.functional.avg_pool2d(nn.functional.gelu(x), 2)
        x = torch.cat([x[:, :3], x[:, 3:] * 2], 1)
        return self.last(self.third(x).flatten(1))


def training(
    model: nn.Module,
) -> tuple[torch.optim.Optimizer, Callable[[torch.Tensor, torch.Tensor], Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss.detach(), logits.detach()

    return optimizer, step


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 4, 8, 8, generator=generator)
    return x, torch.randint(0, 3, (5,), generator=generator)


def train_beside_eager(groups: int, compiled: Any = "none") -> None:
    """A few captured steps give what eager ones do, and leave the same state."""
    torch.manual_seed(0)
    model = Block(groups)
    expected = copy.deepcopy(model)
    _, usual_step = training(expected)
    _, step = training(model)
    run = parallax.get_runner(step, config=parallax.Config(workers=1, compile=compiled)).run
    for seed in range(4):
        torch.testing.assert_close(run(*batch(seed)), usual_step(*batch(seed)))
    for one, other in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("seconds", [always, large_only])
@pytest.mark.parametrize("groups", [1, 2])
def test_training_gives_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, seconds: Any, groups: int
) -> None:
    counts: list[int] = []

    def counted(graph: torch.fx.Graph) -> int:
        monkeypatch.setattr(images, "time_of_turning", lambda shape: 0.0)
        counts.append(use_faster_layout(graph, seconds))
        return counts[-1]

    monkeypatch.setattr(binding, "use_faster_layout", counted)
    monkeypatch.setattr(binding, "use_patches", lambda graph: 0)
    train_beside_eager(groups)
    assert counts
    assert set(counts) == {6 if seconds is always else 4}


def _step_graph() -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    def step(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:
        settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        y = torch.relu_(aten.convolution(x, v, None, *settings))
        z = aten.convolution(y, w, None, *settings)
        made = aten.convolution_backward(z, y, w, None, *settings, [True, True, False])
        return z, z.view(2, -1).sum(1), *made[:2]

    inputs = [torch.randn(2, 3, 4, 4), torch.randn(5, 3, 3, 3), torch.randn(5, 5, 3, 3)]
    return make_fx(step, tracing_mode="fake")(*inputs), inputs


class Checking(Interpreter):
    """Sees that values lie as the examples of their nodes do."""

    checked = 0

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op != "output" and isinstance(value, torch.Tensor):
            assert value.stride() == n.meta["val"].stride(), n.format_node()
            self.checked += 1
        return value


def test_examples_lie_as_values_do() -> None:
    torch.manual_seed(1)
    module, inputs = _step_graph()
    assert use_faster_layout(module.graph, always) == 3
    module.graph.lint()
    module.recompile()
    clones = [node for node in module.graph.nodes if node.target is aten.clone.default]
    turned = [node for node in clones if node.kwargs["memory_format"] is LAST]
    assert [tuple(node.meta["val"].shape) for node in turned] == [(2, 3, 4, 4)]

    interpreter = Checking(module)
    found = interpreter.run(*inputs)
    assert interpreter.checked > 8
    for one, expected in zip(found, _step_graph()[0](*inputs), strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, expected)


_random = torch.Generator().manual_seed(3)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=_random)


STATISTICS = (uniform(4), uniform(4) + 0.5)
WEIGHTS = (uniform(4), uniform(4))
GROUPS = (uniform(2, 2), uniform(2, 2) + 0.5)
POOL = ([2, 2], [2, 2], [0, 0])

# Each is given images that come from a convolution, and others that lie as usual; and a gradient.
KERNELS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "batch norm": lambda x, y: aten.native_batch_norm(x, *WEIGHTS, None, None, True, 0.1, 1e-5)[0],
    "batch norm backward": lambda x, y: aten.native_batch_norm_backward(
        x, y, WEIGHTS[0], None, None, *STATISTICS, True, 1e-5, [True, True, True]
    ),
    "group norm": lambda x, y: aten.native_group_norm(x, *WEIGHTS, 2, 4, 36, 2, 1e-5)[0],
    "group norm backward": lambda x, y: aten.native_group_norm_backward(
        x, y, *GROUPS, WEIGHTS[0], 2, 4, 36, 2, [True, True, True]
    ),
    "layer norm": lambda x, y: aten.native_layer_norm(x, [6], None, None, 1e-5)[0],
    "max pool": lambda x, y: aten.max_pool2d_with_indices(x, *POOL),
    "max pool backward": lambda x, y: aten.max_pool2d_with_indices_backward(
        x[:, :, ::2, ::2] * 1, y, *POOL, [1, 1], False, aten.max_pool2d_with_indices(y, *POOL)[1]
    ),
    "average pool": lambda x, y: aten.avg_pool2d(x, *POOL),
    "average pool backward": lambda x, y: aten.avg_pool2d_backward(
        x[:, :, ::2, ::2] * 1, y, *POOL, False, True, None
    ),
    "adaptive pool": lambda x, y: aten._adaptive_avg_pool2d(x, [3, 2]),
    "adaptive pool backward": lambda x, y: aten._adaptive_avg_pool2d_backward(x[..., :3], y),
    "nearest": lambda x, y: aten.upsample_nearest2d(x, [12, 12]),
    "nearest backward": lambda x, y: aten.upsample_nearest2d_backward(x, [6, 6], [2, 4, 3, 3]),
    "softmax": lambda x, y: aten._log_softmax(x, 1, False),
    "softmax backward": lambda x, y: aten._log_softmax_backward_data(x, y, 1, torch.float32),
    "threshold": lambda x, y: aten.threshold_backward(x, y, 0.3),
    "gelu": lambda x, y: aten.gelu_backward(x, y),
    "sum": lambda x, y: x.sum([0, 2, 3]) + y.mean([0, 2, 3]),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "padding": lambda x, y: aten.constant_pad_nd(x, [1, 1]),
    "reflection": lambda x, y: aten.reflection_pad2d(x, [1, 1, 1, 1]),
    "where": lambda x, y: torch.where(x > y, x, y),
    "flat": lambda x, y: x.reshape(2, -1) @ y.reshape(2, -1).t(),
    "permuted": lambda x, y: x.permute(0, 2, 3, 1).reshape(2, 36, 4).sum(1),
    "cumulated": lambda x, y: x.cumsum(1) + y.flip(1),
    "gathered": lambda x, y: x.gather(1, (y > 0).long()),
    "sorted": lambda x, y: x.sort(1)[0],
    "added": lambda x, y: (x * 2).add_(y),
}


@pytest.mark.parametrize("turned", [False, True], ids=["image", "gradient"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_read_what_lies_otherwise(
    monkeypatch: pytest.MonkeyPatch, kernel: str, turned: bool
) -> None:
    """Raw kernels, which trust autograd to have brought all they are given to one layout."""
    monkeypatch.setattr(images, "time_of_turning", lambda shape: 0.0)

    def step(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Any:
        x = aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return KERNELS[kernel](y, x) if turned else KERNELS[kernel](x, y)

    torch.manual_seed(2)
    inputs = [torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 6, 6)]
    module = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    assert use_faster_layout(module.graph, always) == 1
    module.recompile()
    for found, usual in zip(
        pytree.tree_leaves(Checking(module).run(*inputs)),
        pytree.tree_leaves(step(*inputs)),
        strict=True,
    ):
        assert found.is_contiguous()
        # Sums in another order; what reads the wrong layout is wrong in its first digit.
        torch.testing.assert_close(found, usual, rtol=1e-4, atol=1e-4)


def test_a_copy_of_what_is_changed_later_is_made_again() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        first = x * 2
        y = aten.convolution(first, w, None, *settings)
        first.mul_(3)
        return y + aten.convolution(first, w, None, *settings)

    inputs = [torch.randn(2, 3, 4, 4), torch.randn(3, 3, 3, 3)]
    module = make_fx(step, tracing_mode="fake")(*inputs)
    assert use_faster_layout(module.graph, always) == 2
    module.recompile()
    torch.testing.assert_close(module(*inputs), step(*inputs))


def test_what_is_not_known_is_given_the_usual_layout() -> None:
    """Operations that rewriting put into a graph have no example values."""

    def step(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
        settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        z = aten.convolution(x, w, None, *settings)
        return aten.convolution(z * (y + 1), w, None, *settings)

    inputs = [torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.randn(3, 3, 3, 3)]
    module = make_fx(step, tracing_mode="fake")(*inputs)
    (added,) = (node for node in module.graph.nodes if node.target is aten.add.Tensor)
    del added.meta["val"]
    assert use_faster_layout(module.graph, always) == 2
    module.recompile()
    torch.testing.assert_close(module(*inputs), step(*inputs))


def test_a_view_that_is_written_cannot_be_a_copy() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        y = aten.convolution(x, w, None, *settings)
        y.view(2, -1).mul_(3)
        return y

    inputs = [torch.randn(2, 3, 4, 4), torch.randn(3, 3, 3, 3)]
    module = make_fx(step, tracing_mode="fake")(*inputs)
    before = str(module.graph)
    assert use_faster_layout(module.graph, always) == 0
    assert str(module.graph) == before


def test_gains_that_turning_images_would_eat_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = _step_graph()
    before = str(module.graph)
    monkeypatch.setattr(images, "time_of_turning", lambda shape: 10.0)
    assert use_faster_layout(module.graph, always) == 0
    assert use_faster_layout(module.graph, lambda convolution, layout: 1.0) == 0
    assert str(module.graph) == before


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.ones(2, 3, 8, 8, dtype=torch.float64), torch.ones(4, 3, 3, 3, dtype=torch.float64)),
        (torch.ones(2, 3, 8, 8).bfloat16(), torch.ones(4, 3, 3, 3).bfloat16()),
        (torch.ones(0, 3, 8, 8), torch.ones(4, 3, 3, 3)),
        (torch.ones(2, 3, 8), torch.ones(4, 3, 3)),
    ],
)
def test_other_convolutions_stay(inputs: tuple[torch.Tensor, ...]) -> None:
    sides = inputs[1].dim() - 2
    settings = ([1] * sides, [1] * sides, [1] * sides, False, [0] * sides, 1)

    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        return aten.convolution(x, w, None, *settings)

    module = make_fx(step, tracing_mode="fake")(*inputs)
    assert use_faster_layout(module.graph, always) == 0


@pytest.mark.parametrize("layout", [LAST, USUAL])
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_both_ways_are_timed(layout: Layout, default: torch.dtype) -> None:
    settings = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    forward = Convolution((2, 3, 8, 8), (4, 3, 3, 3), (True, *settings[1:]))
    backward = Convolution(
        (2, 3, 8, 8), (4, 3, 3, 3), (*settings, (False, True, False)), (2, 4, 8, 8)
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    time_of.cache_clear()
    try:
        assert time_of(forward, layout) > 0
        assert time_of(backward, layout) > 0
    finally:
        torch.set_default_dtype(before)


def test_many_images_are_timed_by_fewer() -> None:
    settings = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    small = Convolution((16, 64, 32, 32), (64, 64, 3, 3), settings)
    assert small.likeness() == (small, 1.0)
    large = Convolution((32, 64, 224, 224), (64, 64, 3, 3), settings, (32, 128, 224, 224))
    less, times = large.likeness()
    assert less.images == (1, 64, 224, 224)
    assert less.gradient == (1, 128, 224, 224)
    assert times == 32
