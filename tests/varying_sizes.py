"""Steps whose batches have other sizes from call to call; run alone or on the pool's workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallax import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

ROWS, WIDTH, LABELS, BATCH = 40, 6, 5, 4
STEPS = 12
Batch = tuple[torch.Tensor, ...]


class Tagger(nn.Module):
    """A label for each word, by two recurrent layers in both directions."""

    def __init__(self, layers: Callable[..., nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.words = layers(WIDTH, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(8, LABELS)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.out(self.words(self.table(words))[0])
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten()) / words.shape[1]


class Bags(nn.Module):
    """Bags of as many ids each, and bags of any number, whose ids are one list."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.EmbeddingBag(ROWS, WIDTH, mode="mean")
        self.uneven = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor, others: torch.Tensor, starts: torch.Tensor) -> Any:
        return self.out(self.even(ids) * self.uneven(others, starts)).square().mean()


class Counting(nn.Module):
    """Python that counts the words: a graph for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.cell = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(words.shape[0], WIDTH, dtype=torch.float64)
        for place in range(words.shape[1]):
            both = torch.cat([state, self.table(words[:, place])], 1)
            state = torch.tanh(self.cell(both))
        return state.square().mean()


class Counted(nn.Module):
    """Python that counts words and rows for numbers, and makes tensors of so many."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(words[0])) / float(len(words.T))
        found = self.out(self.table(words)) * places.unsqueeze(1)
        return found.square().sum() / float(words.size(1)) / len(words)


class Branching(nn.Module):
    """Python that asks whether there are many words: two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = self.table(words)
        total = rows.mean(1) if words.shape[1] > 6 else rows.sum(1)
        return self.out(total).square().mean()


class Images(nn.Module):
    """Convolutions on batches of any number and images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.out = nn.Linear(4, LABELS)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(images)))
        return F.cross_entropy(self.out(self.second(x).mean((2, 3))), labels)


class Sequences(nn.Module):
    """Products over all words, whose gradients have as many rows as there are words."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.second = nn.Linear(8, LABELS)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(values))
        both = self.second(x).flatten(0, 1)
        return F.cross_entropy(both, labels.flatten()) + self.second(x[:, 1:]).square().mean()


class Attending(nn.Module):
    """Words that look at each other, by PyTorch's layer and by products of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, LABELS)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.table(words).transpose(0, 1)).transpose(0, 1)
        parts = (self.queries(x), self.keys(x), self.values(x))
        queries, keys, values = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in parts)
        scores = torch.matmul(queries, keys.transpose(2, 3)).softmax(3)
        scores = self.out((scores @ values).transpose(1, 2).flatten(2))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Plain(nn.Module):
    """Python that insists on plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if type(words.shape[1]) is not int:
            raise TypeError("a length is a number")
        return self.table(words).sum(1).square().mean() / words.shape[1]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tagger": Tagger,
    "gru": lambda: Tagger(nn.GRU),
    "rnn": lambda: Tagger(nn.RNN),
    "bags": Bags,
    "counting": Counting,
    "counted": Counted,
    "branching": Branching,
    "attending": Attending,
    "images": Images,
    "plain": Plain,
    "sequences": Sequences,
}
LENGTHS = (5, 7, 9, 9, 4, 12, 6, 5, 11, 8, 7, 13)


def batch(kind: str, step: int, worker: int, rows: int = BATCH) -> Batch:
    """The batch of a worker; its length differs from step to step, and from worker to worker."""
    generator = torch.Generator().manual_seed(100 * step + worker)
    length = LENGTHS[(step + 5 * worker) % len(LENGTHS)]
    if kind == "images":
        images = torch.randn(rows, 3, length, 10, generator=generator, dtype=torch.float64)
        return images, torch.randint(LABELS, (rows,), generator=generator)
    labels = torch.randint(LABELS, (rows, length), generator=generator)
    if kind == "sequences":
        return torch.randn(rows, length, 3, generator=generator, dtype=torch.float64), labels
    words = torch.randint(ROWS, (rows, length), generator=generator)
    if kind == "bags":
        others = torch.randint(ROWS, (3 * length,), generator=generator)
        starts = torch.arange(rows) * (3 * length // rows)
        return words, others, starts
    return words, labels


def make(kind: str, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(6)
    model = MODELS[kind]().double()
    kinds: dict[str, Any] = {
        "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, 0.02),
    }
    return model, kinds[optimizer](model.parameters())


def reference(kind: str, optimizer: str, batches: list[list[Batch]]) -> nn.Module:
    """Trained on one device, with the mean over all workers' batches of each step."""
    model, made = make(kind, optimizer)
    for parts in batches:
        made.zero_grad()
        rows = sum(len(part[0]) for part in parts)
        for part in parts:
            (model(*part) * len(part[0]) / rows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        made.step()
    return model


def train(
    world: World, kind: str, optimizer: str, batches: list[Batch], **settings: Any
) -> tuple[dict[str, torch.Tensor], Runner]:
    """Trained on workers, each with its batches."""
    model, made = make(kind, optimizer)

    def step(*given: torch.Tensor) -> torch.Tensor:
        made.zero_grad()
        loss: torch.Tensor = model(*given)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        made.step()
        return loss

    config = Config(workers=1, seed=3, **settings)
    runner = Runner(step, discover(step), config, world)
    for one in batches:
        runner.run(*one)
    return runner.state_dict()["model"], runner


def difference(state: dict[str, torch.Tensor], model: nn.Module) -> float:
    expected = model.state_dict()
    return max(float((state[name] - value).abs().max()) for name, value in expected.items())


def compare(
    world: World, kind: str, optimizer: str, settings: dict[str, Any], rows: list[int] | None = None
) -> dict[str, float]:
    """How far this worker's training is from one device's, and how often it captured."""
    each = rows or [BATCH] * STEPS
    batches = [
        [batch(kind, step, worker, each[step]) for worker in range(world.size)]
        for step in range(STEPS)
    ]
    own = [parts[world.rank] for parts in batches]
    state, runner = train(world, kind, optimizer, own, **settings)
    return {
        "difference": difference(state, reference(kind, optimizer, batches)),
        "captures": runner._preparation.captures.count,
    }
