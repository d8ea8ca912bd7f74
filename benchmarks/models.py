"""The training steps that are measured, in plain PyTorch for one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from examples.lm.model import LanguageModel, make_step
from examples.lm.sampling import log_uniform_sample

Batch = tuple[Any, ...]
Step = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A model with its optimizer, its training step and a source of batches.

    ``batch()`` makes a new local batch out of torch's random numbers.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    batch: Callable[[], Batch]


def lm(
    vocab: int = 50_000,
    *,
    sparse: bool = False,
    embedding: int = 256,
    hidden: int = 512,
    projection: int = 256,
    sampled: int = 1024,
    batch: int = 32,
    unroll: int = 20,
    lr: float = 0.1,
) -> Workload:
    """The language model of ``examples/lm`` with SGD, on words drawn by Zipf's law."""
    model = LanguageModel(vocab, embedding, hidden, projection, sampled, sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    return Workload(
        model, optimizer, make_step(model, optimizer), lambda: words(vocab, batch, unroll)
    )


def words(vocab: int, batch: int, unroll: int) -> Batch:
    """Words by Zipf's law, and those that follow them: [batch, unroll] each."""
    ids = log_uniform_sample(batch * (unroll + 1), vocab, torch.device("cpu"))
    window = ids.view(batch, unroll + 1)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def resnet18(
    *, small: bool = True, classes: int = 10, batch: int = 16, lr: float = 0.05
) -> Workload:
    """ResNet-18 with batch normalisation, SGD and momentum.

    ``small`` takes 32 x 32 images, by a 3 x 3 stem without pooling; else 224 x 224.
    """
    model = ResNet18(classes, small)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    side = 32 if small else 224

    def images() -> Batch:
        return torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))

    return Workload(model, optimizer, classification_step(model, optimizer), images)


def mlp(
    *, layers: int = 40, width: int = 256, classes: int = 10, batch: int = 64, lr: float = 1e-3
) -> Workload:
    """A deep perceptron with Adam: many small operations and many small variables."""
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(width, classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def points() -> Batch:
        return torch.randn(batch, width), torch.randint(classes, (batch,))

    return Workload(model, optimizer, classification_step(model, optimizer), points)


def classification_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Cross entropy, backward, update."""

    def train_step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with batch normalisation and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet18(nn.Module):
    """He et al. 2016: a stem, four stages of two blocks with 64 to 512 channels, a classifier."""

    def __init__(self, classes: int, small: bool) -> None:
        super().__init__()
        if small:
            stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        else:
            stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
            stem.append(nn.MaxPool2d(3, 2, 1))
        self.stem = nn.Sequential(*stem)
        blocks = []
        inputs = 64
        for stage in range(4):
            outputs = 64 * 2**stage
            blocks.append(BasicBlock(inputs, outputs, 2 if stage else 1))
            blocks.append(BasicBlock(outputs, outputs, 1))
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.blocks(self.stem(images)).mean((2, 3)))


class GPT(nn.Module):
    """Radford et al. 2019: blocks of causal attention and a perceptron, normalised before; a head
    of its own."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(GPTBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.words(tokens) + self.places)))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))
