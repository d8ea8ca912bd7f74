"""Steps with packed sequences, as people write them: see user_steps."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from user_cases import CASES, LOCAL, STEPS, Built, case, numbers

WORDS, WIDTH, HIDDEN = 23, 4, 3


def _padded(rows: int, steps: int, ordered: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, with zeros after the end; each worker's rows have one that is as long as can be."""
    lengths = torch.randint(1, steps + 1, (rows,))
    lengths[::LOCAL] = steps
    if ordered:
        lengths = lengths.sort(descending=True)[0]
    ids = torch.randint(1, WORDS, (rows, steps))
    return ids * (torch.arange(steps) < lengths.unsqueeze(1)), lengths


def _training(model: nn.Module, rows: int, ordered: bool = False) -> Built:
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(ids, lengths)
        loss.backward()
        optimizer.step()
        return loss

    # The second and the third are of other lengths than the first: one graph for all these.
    return [model], step, [_padded(rows, 5 + 2 * number, ordered) for number in range(STEPS)]


class Tagger(nn.Module):
    """Several layers in both directions; what comes out is padded again, and so are its states."""

    def __init__(self, kind: str, total: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        kinds = {"projected": functools.partial(nn.LSTM, proj_size=2)}
        make = kinds.get(kind) or getattr(nn, kind)
        self.layers = make(WIDTH, HIDDEN, 2, batch_first=True, bidirectional=True)
        self.tags = nn.LazyLinear(2)
        self.total = total

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.words(ids), lengths, batch_first=True, enforce_sorted=False
        )
        packed, states = self.layers(packed)
        total = ids.shape[1] if self.total else None
        outputs, found = pad_packed_sequence(packed, batch_first=True, total_length=total)
        states = states if isinstance(states, tuple) else (states,)
        tags = self.tags(outputs)
        inside = (torch.arange(tags.shape[1]) < found.unsqueeze(1)).unsqueeze(2)
        loss = (tags.square() * inside).sum() / ids.shape[0]
        for state in states:
            loss = loss + (state.sin() * torch.arange(1, 5).view(4, 1, 1)).sum() / ids.shape[0]
        return loss


for _kind in ("LSTM", "GRU", "RNN", "projected"):
    for _total in (True, False):

        def _tagger(rows: int, kind: str = _kind, total: bool = _total) -> Built:
            model = Tagger(kind, total).double()
            model(*_padded(LOCAL, 3))
            return _training(model, rows)

        CASES[f"packed {_kind}, {'whole' if _total else 'cut'}"] = _tagger


@case
def captions(rows: int) -> Built:
    """Sorted by length; scores and labels meet as packed rows, and a first state is given."""

    class Captions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.layer = nn.GRU(WIDTH, HIDDEN)
            self.scores = nn.Linear(HIDDEN, WORDS)
            self.state = nn.Parameter(numbers(1, 1, HIDDEN))

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            labels = pack_padded_sequence(ids, lengths, batch_first=True).data
            words = self.words(ids).transpose(0, 1)
            packed = pack_padded_sequence(words, lengths)
            outputs, _ = self.layer(packed, self.state.expand(-1, len(ids), -1).contiguous())
            losses = F.cross_entropy(self.scores(outputs.data), labels, reduction="sum")
            return losses / len(ids)

    return _training(Captions(), rows, ordered=True)


@case
def packed_ids(rows: int) -> Built:
    """Words are looked up of packed ids, and rows changed between two layers, without padding."""

    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.first = nn.LSTM(WIDTH, HIDDEN, bidirectional=True)
            self.norm = nn.LayerNorm(2 * HIDDEN)
            self.second = nn.RNN(2 * HIDDEN, HIDDEN, nonlinearity="relu", bias=False)

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            lengths = (ids != 0).sum(1)
            packed = pack_padded_sequence(ids, lengths, batch_first=True, enforce_sorted=False)
            outputs, _ = self.first(PackedSequence(self.words(packed.data), *packed[1:]))
            outputs = outputs._replace(data=self.norm(outputs.data))
            _, states = self.second(outputs)
            return states.square().sum() / len(ids)

    return _training(Classes(), rows)


@case
def lengths_in_lists(rows: int) -> Built:
    """As many data loaders give them: whole numbers, other ones on each worker and in each step."""
    batches = [_padded(rows, 5 + number % 2) for number in range(6)]
    model = Tagger("LSTM", True).double()
    model(*batches[0])
    models, step, _ = _training(model, rows)
    return models, step, [(ids, lengths.tolist()) for ids, lengths in batches]
