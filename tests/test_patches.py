"""Gradients of weights as products of patches: the same numbers, where they are faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_faster_layouts import train_beside_eager
from torch.fx.experimental.proxy_tensor import make_fx

from parallax.ops.patches import weight_gradient
from parallax.runtime import binding
from parallax.runtime.compute import patches
from parallax.runtime.compute.images import Convolution
from parallax.runtime.compute.patches import fastest, use_patches
from parallax.runtime.compute.products import has_onednn

aten: Any = torch.ops.aten
WAYS = ["patches", pytest.param("onednn", marks=pytest.mark.skipif(not has_onednn(), reason=""))]

# Size, stride, padding, dilation, and the height and width of images.
CONVOLUTIONS = [
    ((3, 3), (1, 1), (1, 1), (1, 1), (4, 4)),
    ((3, 2), (2, 1), (0, 1), (1, 1), (7, 5)),
    ((2, 3), (1, 2), (2, 3), (2, 3), (6, 9)),
    ((1, 1), (2, 2), (0, 0), (1, 1), (5, 5)),
    ((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
]


def backward(settings: Any, mask: list[bool]) -> Any:
    _, stride, padding, dilation, _ = settings
    last = ([6], stride, padding, dilation, False, [0, 0], 1, mask)
    return lambda g, x, w: aten.convolution_backward(g, x, w, *last)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", CONVOLUTIONS)
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False], [False, True, True]])
def test_the_same_numbers(way: str, settings: Any, mask: list[bool]) -> None:
    torch.manual_seed(2)
    size, stride, padding, dilation, pixels = settings
    images, weight = torch.randn(3, 5, *pixels), torch.randn(6, 5, *size)
    out = torch.nn.functional.conv2d(images, weight, None, stride, padding, dilation)
    inputs = [torch.randn(out.shape), images, weight]
    module = make_fx(backward(settings, mask), tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    assert use_patches(module.graph, lambda one: way) == 1  # type: ignore[arg-type, return-value]
    module.graph.lint()
    module.recompile()
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert weight_gradient in called
    assert (aten.convolution_backward.default in called) is mask[0]
    for found, expected in zip(module(*inputs), backward(settings, mask)(*inputs), strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            assert found.is_contiguous()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("compiled", ["none", pytest.param("inductor", marks=pytest.mark.long)])
def test_training_gives_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, groups: int, compiled: Any
) -> None:
    counts: list[int] = []

    def counted(graph: torch.fx.Graph) -> int:
        counts.append(use_patches(graph, lambda one: "patches"))
        return counts[-1]

    monkeypatch.setattr(binding, "use_patches", counted)
    train_beside_eager(groups, compiled)
    assert counts
    assert set(counts) == {4 - groups}, "all but the one whose channels are in groups"


def test_other_kinds_of_convolutions_stay_as_they_are() -> None:
    def gradients(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        last = ([1, 1], [1, 1], [1, 1], True, [0, 0], 1, [True, True, False])
        transposed = aten.convolution_backward(g, x, w, None, *last)
        narrow = aten.convolution_backward(
            g.double(), x.double(), w.double(), None, *last[:3], False, *last[4:]
        )
        return *transposed[:2], *narrow[:2]

    inputs = [torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.randn(3, 3, 3, 3)]
    module = make_fx(gradients, tracing_mode="fake")(*inputs)
    assert use_patches(module.graph, lambda one: "patches") == 0


def _gradients(side: int, channels: int) -> Convolution:
    images = (4, channels, side, side)
    settings = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (True, True, False))
    return Convolution(images, (channels, channels, 3, 3), settings, images)


def test_the_fastest_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([3.0, 2.0, 2.1] if has_onednn() else [2.0, 2.1])
    monkeypatch.setattr(patches, "best_of", lambda compute, cold: next(taken))
    fastest.cache_clear()
    assert fastest(_gradients(2, 8)) == "usual", "not clearly faster"
    assert fastest(_gradients(2, 8)) == "usual", "known"
    assert next(taken, None) is None
    taken = iter([3.0, 1.0, 2.1] if has_onednn() else [1.0, 2.1])
    assert fastest(_gradients(2, 9)) == ("onednn" if has_onednn() else "patches")
    fastest.cache_clear()


def test_patches_of_large_images_are_not_even_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "best_of", lambda compute, cold: pytest.fail("was timed"))
    assert fastest(_gradients(17, 64)) == "usual"


def test_all_ways_can_be_timed() -> None:
    fastest.cache_clear()
    assert fastest(_gradients(3, 5)) in ("usual", "patches", "onednn")
