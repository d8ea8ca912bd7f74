"""The training that `benchmarks.compare` measures, in parts that each system can put together.

A `Training` is what one device would do: a model, a loss, clipping, an optimizer. Systems that
wrap a model get the same parts; parallax gets them as one step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import GPT, Batch, Step, words
from examples.dlrm.model import DLRM
from examples.lm.model import LanguageModel
from examples.lm.sampling import log_uniform_sample
from examples.nmt.model import BEGIN, END, Translator
from examples.resnet.model import ResNet
from examples.vgg.model import VGG


@dataclass(frozen=True)
class Training:
    """One device's training, in parts.

    Args:
        model: makes the model, with sparse gradients of its tables or without.
        loss: of a model, or of what a system wrapped around it, and a batch.
        batch: makes a local batch out of torch's random numbers.
        optimizer: of parameters.
        clipped: the parameters whose gradients are clipped together; none if nothing is.
        clip: the norm that they are clipped to.
        tables: names of the modules that are looked up by rows; empty for a dense model.
    """

    name: str
    model: Callable[[bool], nn.Module]
    loss: Callable[..., torch.Tensor]
    batch: Callable[[], Batch]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    clipped: Callable[[nn.Module], list[nn.Parameter]]
    clip: float = 10.0
    tables: tuple[str, ...] = ()


def make_step(
    training: Training, model: nn.Module, forward: nn.Module, optimizer: torch.optim.Optimizer
) -> Step:
    """The step in plain PyTorch; ``forward`` is the model or what is wrapped around it."""
    clipped = training.clipped(model)

    def train_step(*batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = training.loss(forward, *batch)
        loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(clipped, training.clip)
        optimizer.step()
        return loss

    return train_step


def zipf(count: int, rows: int) -> torch.Tensor:
    """Ids by Zipf's law, the frequent ones first: [count]."""
    return log_uniform_sample(count, rows, torch.device("cpu"))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Iterable[nn.Parameter], rate: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=5e-4)


def nothing(model: nn.Module) -> list[nn.Parameter]:
    return []


def lm(
    vocab: int,
    *,
    embedding: int = 256,
    hidden: int = 512,
    projection: int = 256,
    sampled: int = 1024,
    batch: int = 32,
    unroll: int = 20,
    clip_tables: bool = False,
) -> Training:
    """The language model of ``examples/lm`` on words by Zipf's law.

    Its tables' gradients are clipped together with the others if ``clip_tables``; they are never
    sparse tensors then, of which torch has no norm.
    """
    clipped = "" if clip_tables else "lstm"

    def model(sparse: bool) -> nn.Module:
        sparse = sparse and not clip_tables
        return LanguageModel(vocab, embedding, hidden, projection, sampled, sparse)

    return Training(
        name=f"lm-{vocab // 1000}k" if vocab >= 1000 else f"lm-{vocab}",
        model=model,
        loss=lambda model, tokens, targets: model(tokens, targets),
        batch=lambda: words(vocab, batch, unroll),
        optimizer=sgd,
        clipped=lambda model: list(model.get_submodule(clipped).parameters()),
        tables=("embedding", "softmax_weight", "softmax_bias"),
    )


def in_bfloat16(training: Training) -> Training:
    """The same under autocast, which casts rows as they are looked up."""

    def model(sparse: bool) -> nn.Module:
        made = training.model(sparse)
        for name in training.tables:
            made.get_submodule(name).register_forward_hook(lambda _, __, rows: rows.bfloat16())
        return made

    def loss(model: nn.Module, *batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return training.loss(model, *batch)

    return replace(training, name=f"{training.name}-bf16", model=model, loss=loss)


def table_rows(tables: int, rows: int, ratio: float = 1.45) -> list[int]:
    """Sizes of tables that sum to ``rows``, each ``ratio`` times the one before.

    Real tables differ as much: from a handful of weekdays to all users.
    """
    shares = [ratio**number for number in range(tables)]
    sizes = [max(4, int(rows * share / sum(shares))) for share in shares]
    sizes[-1] += rows - sum(sizes)
    return sizes


def dlrm(
    *,
    tables: int = 26,
    rows: int = 4_000_000,
    features: int = 32,
    lookups: int = 117,
    batch: int = 256,
    numbers: int = 13,
    hidden: tuple[int, ...] = (256, 64),
) -> Training:
    """DLRM with as many single ids as bags, so that small and large tables have both."""
    sizes = table_rows(tables, rows)
    single = tables // 2
    bag = (lookups - (tables - single)) // single
    each = [1 if number % 2 == 0 else bag for number in range(tables)]
    each[-1] += lookups - sum(each)

    def samples() -> Batch:
        ids = [zipf(batch * n, size).view(batch, n) for n, size in zip(each, sizes, strict=True)]
        return torch.randn(batch, numbers), ids, torch.randint(2, (batch,)).float()

    def loss(model: nn.Module, given: torch.Tensor, ids: Any, clicks: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(given, ids), clicks)

    return Training(
        name="dlrm",
        model=lambda sparse: DLRM(numbers, sizes, features, hidden, hidden, sparse),
        loss=loss,
        batch=samples,
        optimizer=sgd,
        clipped=nothing,
        tables=tuple(f"tables.{number}" for number in range(tables)),
    )


def nmt(
    vocab: int = 20_000,
    *,
    embedding: int = 256,
    hidden: int = 256,
    layers: int = 1,
    batch: int = 16,
    length: int = 16,
) -> Training:
    """The translator of ``examples/nmt`` on words by Zipf's law, sentences of one length."""

    def sentences() -> Batch:
        def ids() -> torch.Tensor:
            return zipf(batch * length, vocab - 4).view(batch, length) + 4

        begin, end = torch.full((batch, 1), BEGIN), torch.full((batch, 1), END)
        return torch.cat([ids(), end], 1), torch.cat([begin, ids(), end], 1)

    def dense(model: nn.Module) -> list[nn.Parameter]:
        tables = {"source_embedding.weight", "target_embedding.weight"}
        return [value for name, value in model.named_parameters() if name not in tables]

    return Training(
        name="nmt",
        model=lambda sparse: Translator(vocab, vocab, embedding, hidden, layers, sparse=sparse),
        loss=lambda model, source, target: model(source, target) / length,
        batch=sentences,
        optimizer=sgd,
        clipped=dense,
        clip=5.0,
        tables=("source_embedding", "target_embedding"),
    )


def classification(
    name: str, model: Callable[[], nn.Module], side: int, batch: int, rate: float = 0.01
) -> Training:
    """A network for images, by cross entropy."""

    def images() -> Batch:
        return torch.randn(batch, 3, side, side), torch.randint(10, (batch,))

    return Training(
        name=name,
        model=lambda sparse: model(),
        loss=lambda model, x, labels: F.cross_entropy(model(x), labels),
        batch=images,
        optimizer=functools.partial(momentum, rate=rate),
        clipped=nothing,
    )


def vgg(
    *,
    depth: int = 11,
    width: int = 64,
    features: int = 1024,
    batch: int = 8,
    rate: float = 0.01,
) -> Training:
    """VGG for images of 32 x 32 pixels, without dropout: all systems train on the same numbers."""
    return classification(
        "vgg", lambda: VGG(depth, 3, 10, 32, width, features, dropout=0.0), 32, batch, rate
    )


def resnet(*, blocks: int = 3, width: int = 64, batch: int = 8) -> Training:
    """ResNet-20, four times as wide."""
    return classification("resnet", lambda: ResNet(3, 10, blocks, width), 32, batch)


def gpt(
    *,
    layers: int = 4,
    width: int = 256,
    heads: int = 4,
    vocab: int = 4_000,
    batch: int = 8,
    length: int = 128,
) -> Training:
    """A small GPT without dropout, with AdamW and clipping."""

    def loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return Training(
        name="gpt",
        model=lambda sparse: GPT(layers, width, heads, vocab, length),
        loss=loss,
        batch=lambda: words(vocab, batch, length),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        clipped=lambda model: list(model.parameters()),
        clip=1.0,
    )


WORKLOADS: dict[str, Callable[[], Training]] = {
    "lm-50k": lambda: lm(50_000),
    "lm-800k": lambda: lm(800_000),
    "dlrm": dlrm,
    "nmt": nmt,
    "vgg": vgg,
    "resnet": resnet,
    "gpt": gpt,
}

# The models of the Parallax paper's tables, so small that eight workers train each of them on two
# cores over slow links, with variables large enough to have several owners.
PAPER: dict[str, Callable[[], Training]] = {
    "paper-resnet": lambda: resnet(blocks=1),
    "paper-vgg": lambda: vgg(width=24, features=128, batch=4),
    "paper-lm": lambda: lm(20_000, projection=128, sampled=4096, clip_tables=True),
    "paper-lm-bf16": lambda: in_bfloat16(PAPER["paper-lm"]()),
    "paper-nmt": lambda: nmt(6_000, hidden=128, batch=24),
}

# Of 56 million parameters 54 million are in fully connected layers (thesis, chapter 3).
PAPER["vgg-fc"] = lambda: vgg(width=24, features=7300, rate=1e-5)

# The same at sizes for a test.
QUICK: dict[str, Callable[[], Training]] = {
    "lm-50k": lambda: lm(300, embedding=8, hidden=12, projection=8, sampled=16, batch=4, unroll=5),
    "lm-800k": lambda: lm(900, embedding=8, hidden=12, projection=8, sampled=16, batch=4, unroll=5),
    "dlrm": lambda: dlrm(tables=4, rows=600, features=8, lookups=8, batch=16, hidden=(8,)),
    "nmt": lambda: nmt(200, embedding=8, hidden=8, batch=4, length=5),
    "vgg": lambda: vgg(width=4, features=8, batch=2),
    "resnet": lambda: resnet(blocks=1, width=8, batch=2),
    "gpt": lambda: gpt(layers=1, width=8, heads=2, vocab=50, batch=2, length=5),
    "paper-resnet": lambda: resnet(blocks=1, width=8, batch=2),
    "paper-vgg": lambda: vgg(width=4, features=8, batch=2),
    "vgg-fc": lambda: vgg(width=4, features=40, batch=2),
    "paper-lm": lambda: lm(
        300, embedding=8, hidden=12, projection=8, sampled=16, batch=4, clip_tables=True
    ),
    "paper-lm-bf16": lambda: in_bfloat16(QUICK["paper-lm"]()),
    "paper-nmt": lambda: nmt(200, embedding=8, hidden=8, batch=4, length=5),
}


def find(name: str, quick: bool) -> Training:
    """The workload of that name; ``quick`` at sizes for a test."""
    return (QUICK if quick else {**WORKLOADS, **PAPER})[name]()


def parameter_bytes(model: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in model.parameters())


def batches(training: Training, count: int, seed: int) -> list[Batch]:
    """The same local batches for every system; drawing them is no part of a step."""
    torch.manual_seed(seed)
    return [training.batch() for _ in itertools.repeat(None, count)]
