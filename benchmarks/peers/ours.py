"""parallax, on the plain model with ``nn.Embedding`` as it is."""

from __future__ import annotations

import torch

import parallax
from benchmarks.workloads import Step, Training, make_step


def build(training: Training, option: str) -> Step:
    """A step of parallax with ``run_option=option``."""
    torch.manual_seed(0)
    model = training.model(False)
    step = make_step(training, model, model, training.optimizer(model.parameters()))
    config = parallax.Config(run_option=option, seed=0)
    runner = parallax.get_runner(step, config=config)
    return runner.run
