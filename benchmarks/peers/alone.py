"""No system: each worker trains by itself, as a measure of what computing alone takes."""

from __future__ import annotations

import torch

import parallax
from benchmarks.workloads import Step, Training, make_step
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.meeting import single
from parallax.runtime.runner import Runner


def build(training: Training, option: str) -> Step:
    """The step on one device.

    Args:
        training: what to train.
        option: ``"eager"``, with sparse gradients of tables: the least work there is for PyTorch;
            or ``"captured"``, by parallax.
    """
    torch.manual_seed(0)
    model = training.model(option == "eager")
    optimizer = training.optimizer(model.parameters())
    step = make_step(training, model, model, optimizer)
    if option == "eager":
        return step
    objects = discover(step, model=model, optimizer=optimizer)
    config = parallax.Config(workers=1, seed=0)
    return Runner(step, objects, config, single(torch.device("cpu"))).run
