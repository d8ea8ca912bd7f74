"""An encoder-decoder LSTM with attention, written for one device.

Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", 2015, with the
bidirectional encoder of Wu et al. 2016. Two vocabularies: the source and the target embedding are
only read by rows, while the projection to the target vocabulary is read whole in every step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from examples.optimizers import make_optimizer as make_optimizer

PADDING, UNKNOWN, BEGIN, END = range(4)
SPECIAL_WORDS = ("<pad>", "<unk>", "<s>", "</s>")
State = tuple[torch.Tensor, torch.Tensor]


class Translator(nn.Module):
    """Predicts each next word of the target from the words before it and the whole source.

    Sentences are rows of ids that end in ``END`` and are filled with ``PADDING``; targets begin
    with ``BEGIN``. All rows of a batch have the same length.

    Args:
        source_vocab: rows of the source embedding.
        target_vocab: rows of the target embedding and of the projection.
        embedding: features of a word.
        hidden: LSTM cells of the decoder; each direction of the encoder has half of them.
        layers: LSTM layers of the encoder and of the decoder.
        dropout: share of features that are dropped between layers and before the projection.
        sparse: let the embeddings' gradients be torch's sparse tensors.
    """

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        embedding: int = 256,
        hidden: int = 512,
        layers: int = 2,
        dropout: float = 0.0,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        if hidden % 2:
            raise ValueError(f"hidden must be even, for two directions, found {hidden}.")
        self.source_embedding = nn.Embedding(source_vocab, embedding, PADDING, sparse=sparse)
        self.target_embedding = nn.Embedding(target_vocab, embedding, PADDING, sparse=sparse)
        between = dropout if layers > 1 else 0.0
        self.encoder = nn.LSTM(
            embedding, hidden // 2, layers, batch_first=True, bidirectional=True, dropout=between
        )
        self.decoder = nn.LSTM(embedding, hidden, layers, batch_first=True, dropout=between)
        self.attention = nn.Linear(hidden, hidden, bias=False)
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.projection = nn.Linear(hidden, target_vocab)
        for table in (self.source_embedding, self.target_embedding):
            nn.init.uniform_(table.weight, -0.1, 0.1)
            with torch.no_grad():
                table.weight[PADDING].zero_()

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean over sentences of the loss of a whole target, in nats.

        Args:
            source: [batch, source length] ids.
            target: [batch, target length] ids.

        A mean over sentences, not over words, as in Luong's program: each worker's part of a batch
        has as many sentences, but not as many words.
        """
        logits = self.logits(source, target[:, :-1])
        losses = F.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PADDING, reduction="none"
        )
        return losses.view(target.shape[0], -1).sum(1).mean()

    def logits(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Scores of the words after each of ``target``: [batch, target length, target_vocab]."""
        memory, state = self.encode(source)
        return self.decode(target, memory, source == PADDING, state)[0]

    def encode(self, source: torch.Tensor) -> tuple[torch.Tensor, State]:
        """Features of each source word, [batch, source length, hidden], and the decoder's state."""
        memory, (hidden, cells) = self.encoder(self.source_embedding(source))
        return memory, (_both_directions(hidden), _both_directions(cells))

    def decode(
        self, target: torch.Tensor, memory: torch.Tensor, padding: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, State]:
        """Scores after each word of ``target``, and the state after the last.

        Args:
            target: [batch, target length] ids.
            memory: [batch, source length, hidden].
            padding: [batch, source length], true where the source is filled up.
            state: of the decoder before the first word of ``target``.
        """
        output, state = self.decoder(self.target_embedding(target), state)
        scores = self.attention(output) @ memory.transpose(1, 2)
        weights = scores.masked_fill(padding[:, None, :], float("-inf")).softmax(2)
        features = torch.tanh(self.combine(torch.cat([weights @ memory, output], 2)))
        return self.projection(self.dropout(features)), state


def _both_directions(state: torch.Tensor) -> torch.Tensor:
    """[layers * 2, batch, features] of an encoder as [layers, batch, 2 * features]."""
    return torch.cat([state[0::2], state[1::2]], 2)


def lengths(sentences: torch.Tensor) -> torch.Tensor:
    """Words of each row, with ``BEGIN`` and ``END``: [rows]."""
    return (sentences != PADDING).sum(1)


def trimmed(sentences: torch.Tensor) -> torch.Tensor:
    """Without the columns that are ``PADDING`` in every row."""
    return sentences[:, : int(lengths(sentences).max())]


def make_step(
    model: Translator, optimizer: torch.optim.Optimizer, clip: float = 5.0
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The training step for one device; ``clip`` bounds the norm of the dense gradients."""
    tables = {model.source_embedding.weight, model.target_embedding.weight}
    # The tables' gradients may be sparse tensors, which torch does not clip.
    clipped = [parameter for parameter in model.parameters() if parameter not in tables]

    def train_step(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(source, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(clipped, clip)
        optimizer.step()
        return loss

    return train_step


@torch.no_grad()
def evaluate(
    model: Translator, source: torch.Tensor, target: torch.Tensor, batch: int = 64
) -> tuple[float, float]:
    """Perplexity of the target's words, and the share of them that is predicted right.

    Each word is predicted from the right words before it; ``END`` counts as a word.
    """
    model.eval()
    loss, right, words = 0.0, 0, 0
    order = lengths(source).argsort()
    for rows in order.split(batch):
        sources, targets = trimmed(source[rows]), trimmed(target[rows])
        logits = model.logits(sources, targets[:, :-1]).flatten(0, 1)
        wanted = targets[:, 1:].flatten()
        loss += float(F.cross_entropy(logits, wanted, ignore_index=PADDING, reduction="sum"))
        right += int(((logits.argmax(1) == wanted) & (wanted != PADDING)).sum())
        words += int((wanted != PADDING).sum())
    return float(torch.tensor(loss / words, dtype=torch.float64).exp()), right / words


@torch.no_grad()
def translate(model: Translator, source: torch.Tensor, longest: int) -> torch.Tensor:
    """The likeliest next word, again and again: [batch, at most ``longest``] ids.

    Rows end in ``END``, unless they reach ``longest`` before, and are filled with ``PADDING``.
    """
    model.eval()
    memory, state = model.encode(source)
    padding = source == PADDING
    word = torch.full((len(source), 1), BEGIN)
    ended = torch.zeros(len(source), 1, dtype=torch.bool)
    found: list[torch.Tensor] = []
    for _ in range(longest):
        logits, state = model.decode(word, memory, padding, state)
        word = logits.argmax(2).masked_fill(ended, PADDING)
        found.append(word)
        ended |= word == END
        if bool(ended.all()):
            break
    return torch.cat(found, 1)
