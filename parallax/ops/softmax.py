"""The softmax of a cross entropy, written where its scores lie.

PyTorch writes the logarithms of the softmax to new memory, and backward reads them again to make
the softmax of them. With many classes these are passes over memory that no cache holds. Here a few
rows at a time are read once, and stay in the cache until they are their own softmax.
"""

from __future__ import annotations

import torch

from parallax.ops.kernels import OPERATIONS, publish

BLOCK = 1 << 17
"""Numbers for each thread that are worked on together: half a megabyte, which a cache holds."""


def write_softmax(scores: torch.Tensor, classes: torch.Tensor, ignored: int) -> torch.Tensor:
    """Turn scores into their softmax, in place.

    Args:
        scores: [rows, classes], floating point; afterwards each row sums to one.
        classes: [rows], the right class of each row.
        ignored: what stands in place of a class in rows that do not count.

    Returns:
        The logarithm of the share of each row's class, [rows, 1]; of a row that does not count,
        that of class 0.

    Raises:
        IndexError: a class is none of the scores'; nothing was changed then. As of PyTorch.
    """
    count = scores.shape[1]
    chosen = classes.masked_fill(classes == ignored, 0)
    wrong = chosen[(chosen < 0) | (chosen >= count)]
    if wrong.numel():
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
    logarithms = scores.gather(1, chosen.unsqueeze(1))
    rows = max(1, BLOCK * torch.get_num_threads() // max(1, count))
    for part, own in zip(scores.split(rows), logarithms.split(rows), strict=True):
        largest = part.amax(1, keepdim=True)
        part.sub_(largest).exp_()
        total = part.sum(1, keepdim=True)
        part.mul_(total.reciprocal())
        own.sub_(largest).sub_(total.log_())
    return logarithms


def _sizes(scores: torch.Tensor, classes: torch.Tensor, ignored: int) -> torch.Tensor:
    return scores.new_empty(scores.shape[0], 1)


publish(write_softmax, "(Tensor(a!) scores, Tensor classes, int ignored) -> Tensor", _sizes)
WRITE_SOFTMAX = OPERATIONS[write_softmax]
