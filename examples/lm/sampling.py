"""Sampled softmax with a log-uniform candidate sampler (Jean et al. 2015, Jozefowicz et al. 2016).

Classes are sorted by falling frequency, and word frequencies are near Zipf's law, so candidates
are drawn from the log-uniform distribution

    P(class) = (log(class + 2) - log(class + 1)) / log(classes + 1).
"""

from __future__ import annotations

import math

import torch


def log_uniform_sample(count: int, classes: int, device: torch.device) -> torch.Tensor:
    """``count`` classes drawn independently, with repetition: [count] int64.

    Float64, because float32 steps over some of the last of more than a few hundred thousand.
    """
    uniform = torch.rand(count, dtype=torch.float64, device=device)
    drawn = torch.exp(uniform * math.log(classes + 1.0)).long() - 1
    return drawn.clamp_(0, classes - 1)


def log_expected_count(ids: torch.Tensor, count: int, classes: int) -> torch.Tensor:
    """Log of how often each of ``ids`` is expected among ``count`` draws: float32, ids' shape."""
    rank = ids.to(torch.float64)
    probability = torch.log1p(1.0 / (rank + 1.0)) / math.log(classes + 1.0)
    return torch.log(count * probability).float()


def sampled_softmax_loss(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    sampled: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    log_expected: torch.Tensor,
) -> torch.Tensor:
    """Mean cross entropy of the targets among themselves and the sampled classes.

    Args:
        hidden: [words, features].
        targets: [words] class of each word.
        sampled: [samples] candidate classes, which all words share.
        weight: [words + samples, features] rows of the targets, then of the sampled classes.
        bias: [words + samples].
        log_expected: [words + samples] log expected counts, subtracted from the logits so that
            the partition function over the sample estimates the one over all classes.
    """
    words = targets.shape[0]
    offset = bias - log_expected
    true = (hidden * weight[:words]).sum(1) + offset[:words]
    noise = hidden @ weight[words:].T + offset[words:]
    # A candidate that happens to be a word's own target must not count against it.
    noise = noise.masked_fill(targets[:, None] == sampled[None, :], float("-inf"))
    logits = torch.cat([true[:, None], noise], dim=1)
    return (torch.logsumexp(logits, dim=1) - true).mean()
