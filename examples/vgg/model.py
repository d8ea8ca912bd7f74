"""VGG (Simonyan and Zisserman 2014), for images from 8 x 8 to 224 x 224, written for one device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

# Convolutions of each of the five stages; a network is named after its layers with weights.
STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


class VGG(nn.Module):
    """Stages of 3 x 3 convolutions, each halving the image, and three fully connected layers.

    Args:
        depth: layers with weights: 11, 13, 16 or 19.
        channels: of the images.
        classes: to tell apart.
        size: height and width of the images in pixels; an odd one is halved upwards.
        width: channels of the first stage; the later ones have 2, 4, 8 and 8 times as many.
        features: of the two hidden layers after the convolutions.
        dropout: share of these features that is dropped.

    The defaults are VGG-16 of the paper (138 million parameters, 103 million of them in the first
    fully connected layer).
    """

    def __init__(
        self,
        depth: int = 16,
        channels: int = 3,
        classes: int = 1000,
        size: int = 224,
        width: int = 64,
        features: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if depth not in STAGES:
            raise ValueError(f"depth must be one of {', '.join(map(str, STAGES))}, found {depth}.")
        layers: list[nn.Module] = []
        inputs = channels
        for stage, convolutions in enumerate(STAGES[depth]):
            outputs = width * min(2**stage, 8)
            for _ in range(convolutions):
                convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
                # Of 3 x 3 inputs, an image this small has so many on average; the rest is padding.
                _initialize(convolution, inputs * (3 - 2 / size) ** 2)
                layers += [convolution, nn.ReLU()]
                inputs = outputs
            # Rounded up: 28 x 28 pixels are 1 x 1 after five halvings, and not none.
            layers.append(nn.MaxPool2d(2, 2, ceil_mode=True))
            size = (size + 1) // 2
        self.convolutions = nn.Sequential(*layers)
        fully_connected = [
            nn.Linear(inputs * size * size, features),
            nn.Linear(features, features),
            nn.Linear(features, classes),
        ]
        for layer in fully_connected:
            _initialize(layer, layer.in_features)
        first, second, last = fully_connected
        # As in the paper: the first guess is close to even.
        nn.init.normal_(last.weight, std=0.01)
        hidden = [[layer, nn.ReLU(), nn.Dropout(dropout)] for layer in (first, second)]
        self.classifier = nn.Sequential(*hidden[0], *hidden[1], last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores, [batch, classes], of [batch, channels, size, size] images."""
        return self.classifier(self.convolutions(images).flatten(1))


def _initialize(layer: nn.Conv2d | nn.Linear, inputs: float) -> None:
    """He et al. 2015: features keep their size from layer to layer, or deep networks stay still."""
    nn.init.normal_(layer.weight, std=(2 / inputs) ** 0.5)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


def make_optimizer(
    model: nn.Module, lr: float = 0.01, momentum: float = 0.9, weight_decay: float = 5e-4
) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)


def make_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: float = 5.0
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The training step for one device; ``clip`` bounds the norm of the gradient."""

    def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        # Without normalisation a first bad batch can throw a deep network out of its course.
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    return train_step
