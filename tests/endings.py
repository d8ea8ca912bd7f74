"""Steps that leave their update out where something is not finite, run alone or on workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from assertions import Net, batches
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World, single
from parallax.runtime.runner import Runner

KINDS = ("returns", "number", "update", "counts", "scaled", "clipped")
SCALE = 4096.0


class Training:
    """A model, and the step that trains it."""

    def __init__(self, kind: str, device: torch.device) -> None:
        torch.manual_seed(2)
        self.kind = kind
        self.net = Net().double().to(device)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        scaled = kind in ("scaled", "clipped")
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=SCALE, growth_interval=2, enabled=scaled
        )
        self.left_out = 0

    def step_of(self) -> Callable[..., Any]:
        """What trains it, as a user writes it."""
        kind, net, optimizer = self.kind, self.net, self.optimizer
        schedule, scaler, counted = self.schedule, self.scaler, self

        def step(words: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(words, x), y)
            if kind == "returns" and not torch.isfinite(loss):
                schedule.step()
                return loss
            if kind == "number" and not math.isfinite(loss.item()):
                schedule.step()
                return -1.0
            if kind == "counts" and torch.isnan(loss):
                counted.left_out += 1
                schedule.step()
                return loss
            scaler.scale(loss).backward()
            norm = None
            if kind in ("update", "clipped"):
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            if kind != "update" or norm.isfinite():
                scaler.step(optimizer)
            scaler.update()
            schedule.step()
            return loss if norm is None else {"loss": loss, "norm": norm.detach()}

        return step


def half(device: torch.device, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Losses of PyTorch's training in float16, those of the captured step, and the latter's scales:
    the first ones are too large."""
    losses: list[list[float]] = [[], []]
    scales = []
    for number, found in enumerate(losses):
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**22)
        step = _in_half(net, optimizer, scaler)
        torch.manual_seed(3)
        data = [torch.randn(32, 16, device=device) for _ in range(steps)]
        run = step if number == 0 else Runner(step, discover(step), Config(), single(device)).run
        for x in data:
            found.append(float(run(x)))
            scales.append(scaler.get_scale())
    return losses[0], losses[1], scales[steps:]


def _in_half(
    net: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.float16):
            loss = F.mse_loss(net(x), x.cumsum(1)) * 10
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def train(
    world: World, kind: str, counts: Sequence[Sequence[int]], settings: dict[str, Any]
) -> dict[str, Any]:
    """How far workers are from one device, whose batches are all of theirs.

    Args:
        kind: of the step.
        counts: by step and worker, rows; fewer than none with numbers that are not finite.
        settings: beside the number of workers.

    Returns:
        How far parameters are apart, whether learning rates and scales are the same, how many steps
        the run says it left out, and what it returned in these.
    """
    device = world.device
    given = [
        [tuple(one.to(device) for one in batch) for batch in parts] for parts in batches(counts)
    ]
    alone, shared = Training(kind, device), Training(kind, device)
    step = alone.step_of()
    runner = Runner(own := shared.step_of(), discover(own), Config(workers=1, **settings), world)
    returned = []
    for division, parts in zip(counts, given, strict=True):
        step(*(torch.cat(both) for both in zip(*parts, strict=True)))
        result = runner.run(*parts[world.rank])
        if min(division) < 0:
            returned.append(result)
    (model,) = runner._objects.models
    found: dict[str, Any] = runner.state_dict()[model]
    expected = alone.net.state_dict()
    return {
        "difference": max(
            float((expected[key] - found[key].to(device)).abs().max()) for key in expected
        ),
        "rate": shared.schedule.get_last_lr() == alone.schedule.get_last_lr(),
        "scale": shared.scaler.get_scale() == alone.scaler.get_scale(),
        "left out": (alone.left_out, shared.left_out),
        "returned": returned,
    }
