"""A small residual network for small images (He et al. 2016, the CIFAR-10 form), one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

Norm = Literal["group", "batch"]
CHANNELS_PER_GROUP = 8


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(norm, outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of ``blocks`` blocks with ``width``, 2 and 4 times ``width`` channels.

    ``blocks=3, width=16`` is ResNet-20. Group normalisation is the default: unlike the batch kind
    it does not look at other images of the batch, so any division of a global batch over workers
    gives the same numbers.
    """

    def __init__(
        self,
        channels: int = 1,
        classes: int = 10,
        blocks: int = 3,
        width: int = 16,
        norm: Norm = "group",
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stem_norm = _norm(norm, width)
        stages = []
        inputs = width
        for stage in range(3):
            outputs = width * 2**stage
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                stages.append(Block(inputs, outputs, stride, norm))
                inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores, [batch, classes], of [batch, channels, height, width] images."""
        x = F.relu(self.stem_norm(self.stem(images)))
        return self.classifier(self.stages(x).mean((2, 3)))


def make_optimizer(
    model: nn.Module, lr: float = 0.03, momentum: float = 0.9, weight_decay: float = 5e-4
) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)


def make_step(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The training step for one device."""

    def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


@torch.no_grad()
def accuracy(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, batch: int = 500
) -> float:
    """Share of the images that the model labels right."""
    model.eval()
    parts = zip(images.split(batch), labels.split(batch), strict=True)
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
    return right / len(labels)


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(max(1, channels // CHANNELS_PER_GROUP), channels)
