"""Codebooks that follow averages of what is nearest to their entries: for the tests.

As they are published: buffers changed in place without ``no_grad()``, buffers that are replaced,
and within ``no_grad()``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from equality import difference
from errors_help import warnings_of_parallax
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

WIDTH, ENTRIES, DECAY, LEAST = 4, 5, 0.9, 1e-5
Quantised = tuple[torch.Tensor, torch.Tensor]


class _Codebook(nn.Module):
    counts: torch.Tensor
    sums: torch.Tensor
    entries: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("entries", torch.randn(ENTRIES, WIDTH))
        self.register_buffer("counts", torch.zeros(ENTRIES))
        self.register_buffer("sums", self.entries.clone())

    def nearest(self, rows: torch.Tensor) -> torch.Tensor:
        distances = rows.square().sum(1, keepdim=True) - 2 * rows @ self.entries.t()
        return (distances + self.entries.square().sum(1)).argmin(1)

    def smoothed(self) -> torch.Tensor:
        whole = self.counts.sum()
        return (self.counts + LEAST) / (whole + ENTRIES * LEAST) * whole

    def quantised(self, x: torch.Tensor, chosen: torch.Tensor) -> Quantised:
        found = F.embedding(chosen, self.entries).view(x.shape)
        return x + (found - x).detach(), F.mse_loss(x, found.detach())


class InPlace(_Codebook):
    def forward(self, x: torch.Tensor) -> Quantised:
        rows = x.reshape(-1, WIDTH)
        chosen = self.nearest(rows)
        result = self.quantised(x, chosen)
        one_hot = F.one_hot(chosen, ENTRIES).type(rows.dtype)
        self.counts.data.mul_(DECAY).add_(one_hot.sum(0), alpha=1 - DECAY)
        self.sums.data.mul_(DECAY).add_(one_hot.t() @ rows, alpha=1 - DECAY)
        self.entries.data.copy_(self.sums / self.smoothed().unsqueeze(1))
        return result


class Replaced(_Codebook):
    def forward(self, x: torch.Tensor) -> Quantised:
        rows = x.reshape(-1, WIDTH)
        chosen = self.nearest(rows)
        result = self.quantised(x, chosen)
        one_hot = torch.zeros(len(rows), ENTRIES, dtype=rows.dtype)
        one_hot.scatter_(1, chosen.unsqueeze(1), 1)
        self.counts = DECAY * self.counts + (1 - DECAY) * one_hot.sum(0)
        self.counts = self.smoothed()
        self.sums = DECAY * self.sums + (1 - DECAY) * one_hot.t() @ rows.detach()
        self.entries = self.sums / self.counts.unsqueeze(1)
        return result


class Within(_Codebook):
    def forward(self, x: torch.Tensor) -> Quantised:
        with torch.no_grad():
            rows = x.reshape(-1, WIDTH)
            chosen = torch.cdist(rows, self.entries).argmin(-1)
        result = self.quantised(x, chosen)
        with torch.no_grad():
            one_hot = F.one_hot(chosen, ENTRIES).type(rows.dtype)
            self.counts.lerp_(one_hot.sum(0), 1 - DECAY)
            self.sums.lerp_(one_hot.t() @ rows, 1 - DECAY)
            self.entries.copy_(self.sums / self.smoothed().unsqueeze(-1))
        return result


KINDS: dict[str, type[_Codebook]] = {"in place": InPlace, "replaced": Replaced, "within": Within}


class Images(nn.Module):
    """Each place of an image has an entry."""

    def __init__(self, kind: type[_Codebook]) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(2, WIDTH, 2, 2)
        self.codebook = kind()
        self.decoder = nn.ConvTranspose2d(WIDTH, 2, 2, 2)

    def forward(self, x: torch.Tensor) -> Quantised:
        found, distance = self.codebook(self.encoder(x).permute(0, 2, 3, 1).contiguous())
        return self.decoder(found.permute(0, 3, 1, 2)), distance


def train(
    world: World, kind: str, division: list[tuple[int, ...]], strategy: str
) -> tuple[float, list[str]]:
    """How far parameters and codebooks are from those of one device, and warnings.

    Args:
        kind: of the codebook.
        division: by step and worker, images.
    """
    torch.manual_seed(0)
    net = Images(KINDS[kind]).double()
    start = {key: value.clone() for key, value in net.state_dict().items()}
    given = [
        [torch.randn(rows, 2, 4, 6, dtype=torch.float64) + w for w, rows in enumerate(counts)]
        for counts in division
    ]

    def stepping() -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            found, distance = net(x)
            loss = F.mse_loss(found, x) + 0.25 * distance
            loss.backward()
            optimizer.step()
            return loss

        return step

    step = stepping()
    for parts in given:
        step(torch.cat(parts))
    expected = {key: value.clone() for key, value in net.state_dict().items()}
    net.load_state_dict(start)
    step = stepping()
    with warnings_of_parallax() as said:
        runner = Runner(step, discover(step), Config(workers=1, strategy=strategy), world)
        for parts in given:
            runner.run(parts[world.rank])
    (model,) = runner._objects.models
    return difference(expected, dict(runner.state_dict()[model])), said
