"""DistributedDataParallel: dense and sparse gradients, hooks, and ZeRO-1."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import Step, Training, make_step

BUCKET_MB = 25  # the default
WHOLE_MB = 1 << 20
"""For all gradients in one bucket: PowerSGD's hook starts its second sum from a thread of the first
one's, in an order that with several buckets differs between workers, which Gloo does not notice."""


def build(training: Training, option: str) -> Step:
    """A step under DDP.

    Args:
        training: what to train.
        option: ``"dense"``, ``"sparse"``, ``"fp16"``, ``"powersgd"``, ``"zero1"`` or
            ``"compiled"``.
    """
    torch.manual_seed(0)
    model = training.model(option == "sparse")
    # Gradients in the buckets: the faster setting, and one copy of the gradients less. Sparse
    # tensors cannot lie there.
    replica = DistributedDataParallel(
        model,
        gradient_as_bucket_view=option != "sparse",
        bucket_cap_mb=WHOLE_MB if option == "powersgd" else BUCKET_MB,
    )
    if option == "fp16":
        replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif option == "powersgd":
        # From the third step on, so that a short trial sees it work.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    # Compiled around DDP, which lets PyTorch cut the graph where buckets are full.
    forward = torch.compile(replica) if option == "compiled" else replica
    return make_step(training, model, forward, _optimizer(training, model, option))


def _optimizer(training: Training, model: nn.Module, option: str) -> torch.optim.Optimizer:
    whole = training.optimizer(model.parameters())
    if option != "zero1":
        return whole
    settings = {name: value for name, value in whole.defaults.items() if name in _SETTINGS}
    return ZeroRedundancyOptimizer(model.parameters(), type(whole), **settings)


_SETTINGS = ("lr", "momentum", "weight_decay")
