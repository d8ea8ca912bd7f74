"""FSDP2: each parameter in equal parts on all workers, gathered whole where it is used."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.workloads import Step, Training, make_step


def build(training: Training, option: str) -> Step:
    """A step of a model whose tables, recurrent layers and rest are sharded separately.

    Weights are kept between forward and backward: they fit, and gathering them again costs time.
    """
    torch.manual_seed(0)
    model = training.model(False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # One unit for each table and recurrent layer, as its guide advises for the large parts.
    for part in model.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag | nn.LSTM) and len(training.tables) < 10:
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return make_step(training, model, model, training.optimizer(model.parameters()))
