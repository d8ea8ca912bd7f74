"""Training with recurrent layers on one device, captured and as PyTorch runs it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import single
from parallax.runtime.runner import Runner

SIZE, WIDTH, TIME, BATCH, STEPS = 5, 6, 7, 4, 6

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(SIZE, WIDTH),
    "lstm, both directions": lambda: nn.LSTM(
        SIZE, WIDTH, num_layers=2, bidirectional=True, batch_first=True
    ),
    "lstm, projected": lambda: nn.LSTM(SIZE, WIDTH, proj_size=3, bias=False),
    "gru": lambda: nn.GRU(SIZE, WIDTH, num_layers=2),
    "gru, both directions": lambda: nn.GRU(SIZE, WIDTH, bidirectional=True, bias=False),
    "rnn": lambda: nn.RNN(SIZE, WIDTH, bidirectional=True),
    "rnn, relu": lambda: nn.RNN(SIZE, WIDTH, nonlinearity="relu"),
}


class _Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = LAYERS[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, states = self.layer(x)
        ends = [states] if isinstance(states, torch.Tensor) else states
        return output.square().mean() + sum(one.sin().mean() for one in ends)


def compare(kind: str, dtype: torch.dtype, device: torch.device) -> float:
    """How far the parameters are from those of PyTorch's training, after some steps."""
    torch.manual_seed(5)
    models = [_Net(kind).to(device, dtype)]
    models.append(copy.deepcopy(models[0]))
    steps = [_step_of(model) for model in models]
    runner = Runner(steps[1], discover(steps[1]), Config(seed=1), single(device))
    for _ in range(STEPS):
        x = torch.randn(BATCH, TIME, SIZE, dtype=dtype, device=device)
        steps[0](x)
        runner.run(x)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


def _step_of(model: nn.Module) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss

    return step
