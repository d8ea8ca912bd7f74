"""The VGG example's own parts, in plain PyTorch."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from examples.images import load_images
from examples.resnet.model import accuracy
from examples.vgg.model import VGG, make_optimizer, make_step

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_defaults_are_the_papers() -> None:
    with torch.device("meta"):
        model = VGG()
    assert sum(parameter.numel() for parameter in model.parameters()) == 138_357_544
    assert model(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 1000)


@pytest.mark.parametrize("depth", [11, 13, 16, 19])
def test_a_network_is_named_after_its_layers_with_weights(depth: int) -> None:
    model = VGG(depth, channels=1, classes=10, size=8, width=2, features=4)
    assert sum(1 for name, _ in model.named_parameters() if name.endswith("weight")) == depth


@pytest.mark.parametrize("size", [8, 28, 32, 33])
def test_small_images_fit(size: int) -> None:
    model = VGG(11, channels=1, classes=10, size=size, width=2, features=4)
    assert model(torch.randn(3, 1, size, size)).shape == (3, 10)


@pytest.mark.parametrize("size", [8, 28])
def test_features_keep_their_size_through_the_layers(size: int) -> None:
    torch.manual_seed(0)
    model = VGG(16, channels=1, classes=10, size=size, width=16, features=256, dropout=0.0)
    features = model.classifier[:-1](model.convolutions(torch.randn(64, 1, size, size)).flatten(1))
    # A factor of three in each of 15 layers would be 10^7.
    assert 0.2 < float(features.detach().square().mean().sqrt()) < 20
    assert float(model(torch.randn(64, 1, size, size)).detach().abs().max()) < 5


def test_an_unknown_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="depth must be one of 11, 13, 16, 19, found 12"):
        VGG(12)


def test_it_learns_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    data = load_images("digits", tmp_path)
    model = VGG(11, 1, 10, size=8, width=8, features=64, dropout=0.0)
    step = make_step(model, make_optimizer(model))
    parts = zip(data.train_images.split(64), data.train_labels.split(64), strict=True)
    for images, labels in itertools.islice(itertools.cycle(parts), 60):
        loss = step(images, labels)
    assert float(loss.detach()) < 1.3  # log(10) = 2.3 at the beginning
    assert accuracy(model, data.test_images, data.test_labels) > 0.4
