"""No system: each worker trains by itself, as a measure of what computing alone takes."""

from __future__ import annotations

import torch

from benchmarks.workloads import Step, Training, make_step


def build(training: Training, option: str) -> Step:
    """The step on one device, with sparse gradients of tables: the least work there is."""
    torch.manual_seed(0)
    model = training.model(True)
    return make_step(training, model, model, training.optimizer(model.parameters()))
