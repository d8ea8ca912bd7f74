"""An LSTM language model with sampled softmax, written for one device.

Jozefowicz et al., "Exploring the Limits of Language Modeling", 2016: word embedding, one LSTM
layer projected to fewer features, and a softmax over the whole vocabulary that is trained on the
target and on a sample of the other words. Both big tables, the embedding and the softmax weights,
are only ever read by rows; nothing in this file knows about that or about workers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from examples.lm.sampling import log_expected_count, log_uniform_sample, sampled_softmax_loss
from examples.optimizers import make_optimizer as make_optimizer


class LanguageModel(nn.Module):
    """Predicts each next word.

    Args:
        vocab: rows of the word tables; ids are sorted by falling frequency.
        embedding: features of a word.
        hidden: LSTM cells.
        projection: features that the cells are projected to.
        sampled: classes drawn for the softmax of a training step.
        sparse: let the tables' gradients be torch's sparse tensors.
    """

    def __init__(
        self,
        vocab: int,
        embedding: int = 256,
        hidden: int = 512,
        projection: int = 256,
        sampled: int = 1024,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.sampled = sampled
        self.embedding = nn.Embedding(vocab, embedding, sparse=sparse)
        # LSTM takes a projection only to fewer features than it has cells.
        narrower = projection if projection != hidden else 0
        self.lstm = nn.LSTM(embedding, hidden, proj_size=narrower, batch_first=True)
        self.softmax_weight = nn.Embedding(vocab, projection, sparse=sparse)
        self.softmax_bias = nn.Embedding(vocab, 1, sparse=sparse)
        nn.init.uniform_(self.embedding.weight, -0.5, 0.5)
        nn.init.uniform_(self.softmax_weight.weight, -0.1, 0.1)
        nn.init.zeros_(self.softmax_bias.weight)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean sampled-softmax loss of ``targets`` after ``tokens``, both [batch, unroll]."""
        hidden = self.features(tokens)
        targets = targets.flatten()
        sampled = log_uniform_sample(self.sampled, self.vocab, targets.device)
        # One lookup for targets and candidates: one gradient for the table.
        ids = torch.cat([targets, sampled])
        return sampled_softmax_loss(
            hidden,
            targets,
            sampled,
            self.softmax_weight(ids),
            self.softmax_bias(ids).squeeze(1),
            log_expected_count(ids, self.sampled, self.vocab),
        )

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the LSTM makes of [batch, unroll] words: [batch * unroll, projection]."""
        output, _ = self.lstm(self.embedding(tokens))
        return output.flatten(0, 1)

    def full_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss over the whole vocabulary, for evaluation."""
        logits = F.linear(
            self.features(tokens), self.softmax_weight.weight, self.softmax_bias.weight.squeeze(1)
        )
        return F.cross_entropy(logits, targets.flatten())


def make_step(
    model: LanguageModel, optimizer: torch.optim.Optimizer, clip: float = 10.0
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The training step for one device; ``clip`` bounds the norm of the LSTM's gradient."""

    def train_step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        # Only the recurrent weights' gradients explode, and the tables' may be sparse tensors.
        torch.nn.utils.clip_grad_norm_(model.lstm.parameters(), clip)
        optimizer.step()
        return loss

    return train_step


@torch.no_grad()
def perplexity(
    model: LanguageModel,
    ids: torch.Tensor,
    *,
    limit: int = 20_000,
    rows: int = 8,
    unroll: int = 20,
) -> float:
    """Perplexity over the whole vocabulary of at most ``limit`` words of ``ids``.

    Words are predicted from up to ``unroll`` words before them, as in training, and in chunks of
    ``rows * unroll``: a chunk's logits are the largest tensor there is.
    """
    model.eval()
    count = min(limit, len(ids) - 1)
    rows = min(rows, count // unroll)
    if rows < 1:
        raise ValueError(f"perplexity needs more than {unroll} words, found {count}.")
    chunk = rows * unroll
    chunks = count // chunk
    # Spread over all that is held out, whose blocks come from all parts of the text.
    starts = torch.linspace(0, len(ids) - 1 - chunk, chunks).long().tolist()
    total = 0.0
    for start in starts:
        window = ids[start : start + chunk + 1].long()
        tokens, targets = window[:-1].view(rows, unroll), window[1:].view(rows, unroll)
        total += float(model.full_loss(tokens, targets))
    return float(torch.tensor(total / chunks, dtype=torch.float64).exp())
