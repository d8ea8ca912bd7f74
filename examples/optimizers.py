"""Optimizers of the examples, by name."""

from __future__ import annotations

import torch
from torch import nn


def make_optimizer(model: nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    """An optimizer by name: ``"sgd"``, ``"adagrad"`` or ``"adam"``."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr)
    if name == "adagrad":
        # Without an initial value the first gradient of each row moves it by the full rate.
        return torch.optim.Adagrad(model.parameters(), lr=lr, initial_accumulator_value=0.1)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    raise ValueError(f'optimizer must be "sgd", "adagrad" or "adam", found {name!r}.')
