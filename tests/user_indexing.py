"""Steps that index by numbers which follow from the batch or from state: see user_steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from user_cases import STEPS, Built, case, numbers

WORDS, WIDTH, TAGS, START, STOP = 17, 4, 5, 3, 4


def _ids(rows: int, steps: int, end: int = WORDS) -> torch.Tensor:
    return torch.randint(end, (rows, steps))


class Table(nn.Module):
    """Rows in a parameter and in an embedding, and places in buffers and in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.words = nn.Embedding(WORDS, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("queue", torch.zeros(3, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))
        self.count = 0


def _training(
    rows: int,
    loss_of: Callable[[Table, torch.Tensor, torch.Tensor], torch.Tensor],
    after: Callable[[Table], None] = lambda model: None,
) -> Built:
    model = Table().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)

    def step(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, ids)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            after(model)
        return loss

    return [model], step, [(numbers(rows, WIDTH), _ids(rows, 3)) for _ in range(STEPS)]


@case
def sentences_with_tags(rows: int) -> Built:
    """A conditional random field as PyTorch's tutorial has it: sentence by sentence, tag by tag."""

    def best(scores: torch.Tensor) -> Any:
        return torch.max(scores, 1)[1].item()

    def log_sum_exp(scores: torch.Tensor) -> torch.Tensor:
        top = scores[0, best(scores)]
        spread = top.view(1, -1).expand(1, scores.size()[1])
        return top + torch.log(torch.sum(torch.exp(scores - spread)))

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.layer = nn.LSTM(WIDTH, 3, bidirectional=True)
            self.scores = nn.Linear(6, TAGS)
            self.moves = nn.Parameter(torch.randn(TAGS, TAGS))
            self.moves.data[START, :] = -10000
            self.moves.data[:, STOP] = -10000

        def all_paths(self, scores: torch.Tensor) -> torch.Tensor:
            reached = scores.new_full((1, TAGS), -10000.0)
            reached[0][START] = 0.0
            for score in scores:
                ways = []
                for tag in range(TAGS):
                    emitted = score[tag].view(1, -1).expand(1, TAGS)
                    ways.append(log_sum_exp(reached + self.moves[tag].view(1, -1) + emitted))
                reached = torch.stack(ways).view(1, -1)
            return log_sum_exp(reached + self.moves[STOP])

        def path(self, scores: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
            total = scores.new_zeros(1)
            tags = torch.cat([torch.tensor([START]), tags])
            for place, score in enumerate(scores):
                total = total + self.moves[tags[place + 1], tags[place]] + score[tags[place + 1]]
            return total + self.moves[STOP, tags[-1]]

        def forward(self, ids: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
            outputs, _ = self.layer(self.words(ids).view(len(ids), 1, -1))
            scores = self.scores(outputs.view(len(ids), 6))
            return self.all_paths(scores) - self.path(scores, tags)

    model = Tagger().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, weight_decay=1e-4)

    def step(ids: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(model(own, wanted) for own, wanted in zip(ids, tags, strict=True)) / len(ids)
        loss.backward()
        optimizer.step()
        return loss

    batches = [(_ids(rows, 3), _ids(rows, 3, START)) for _ in range(STEPS)]
    return [model], step, batches


@case
def rows_of_tables(rows: int) -> Built:
    """Read by numbers and by tensors that hold one, from the end too, and looked up as well."""

    def loss(model: Table, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        total = model.words(ids).square().sum()
        for row, (first, second, third) in zip(model.out(x), ids, strict=True):
            number = first.item()
            total = total + (model.rows[number] * row).sum() + model.rows[-1 - second, third % 3]
            total = total + (model.words.weight[number] * model.words.weight[third]).sum()
        return total / len(x)

    return _training(rows, loss)


@case
def columns_of_rows(rows: int) -> Built:
    """Which columns of looked-up rows are read is known when the step runs."""

    def loss(model: Table, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        total = model.out(x).square().sum()
        for row, own in zip(model.words(ids), ids, strict=True):
            column = own[0] % WIDTH
            total = total + row[:, column : column + 1].sin().sum() + row[1, : own[2] % 3].sum()
        return total / len(x)

    return _training(rows, loss)


@case
def written_at_the_best(rows: int) -> Built:
    """What a row's largest value chooses is changed, in place and by assignments."""

    def loss(model: Table, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for scores, own in zip(model.out(x), ids, strict=True):
            found = scores.sin()
            best = scores.argmax().item()
            found[best] *= 2
            found[-1] = scores[best].exp()
            square = found.unsqueeze(0) * model.rows[:WIDTH]
            square[best, own[0] % WIDTH] = model.rows[own[1], 0]
            square[:, best] += scores
            total = total + square.square().sum()
        return total / len(x)

    return _training(rows, loss)


@case
def places_that_move(rows: int) -> Built:
    """A queue whose place is in a buffer, and rows whose place is counted: equal on all workers."""

    def loss(model: Table, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        others = model.queue[model.place - 1].detach() + model.rows[model.count]
        return (model.out(x) * others).square().sum(1).mean()

    def after(model: Table) -> None:
        model.queue[model.place] = model.out.weight.sum(0)
        model.place[...] = (model.place + 1) % 3
        model.rows[model.count] *= 0.5
        model.count = (model.count + 5) % WORDS

    return _training(rows, loss, after)


@case
def last_of_each(rows: int) -> Built:
    """A sequence's last step, by its length, in batches of several lengths."""
    layer, out = nn.GRU(WIDTH, 3, batch_first=True).double(), nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD([*layer.parameters(), *out.parameters()], 0.1)

    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        outputs, _ = layer(x)
        ends = [own[length - 1] for own, length in zip(outputs, lengths, strict=True)]
        whole = outputs[:, x.shape[1] - 1]
        loss = out(torch.stack(ends) + whole).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def batch(steps: int) -> tuple[torch.Tensor, ...]:
        return numbers(rows, steps, WIDTH), torch.randint(1, steps + 1, (rows,))

    return [layer, out], step, [batch(2 + number) for number in range(STEPS)]
