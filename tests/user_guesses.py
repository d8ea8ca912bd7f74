"""Steps whose Python branches on gradients, parameters and slots, and goes on both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from user_cases import STEPS, Built, case, mlp, numbers, stepping


class TrustRatios(torch.optim.Optimizer):
    """LAMB, as it is written beside papers: the ratio is left out where a norm is zero."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.mul_(first).add_(p.grad, alpha=1 - first)
                square.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                update = mean / square.sqrt().add(group["eps"])
                norm, of_update = p.norm(), update.norm()
                ratio = 1.0 if norm == 0 or of_update == 0 else norm / of_update
                p.add_(update * ratio, alpha=-group["lr"])


class Scaled(torch.optim.Optimizer):
    """LARS, with momentum: rates are scaled where both norms are not zero."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                norm, of_gradient = torch.norm(p).item(), torch.norm(p.grad).item()
                rate = group["lr"]
                if norm > 0 and of_gradient > 0:
                    rate *= norm / (of_gradient + group["weight_decay"] * norm)
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad.add(p, alpha=group["weight_decay"]), alpha=rate)
                p.sub_(buffer)


class FoundRate(torch.optim.Optimizer):
    """Takes the largest rate that it has seen to be right, as D-Adaptation does."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1.0, "d": 1e-3, "k": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        d, above = group["d"], 0.0
        for p in group["params"]:
            total = self.state[p].setdefault("s", torch.zeros_like(p))
            above += (p.grad * total).sum().item()
            total.add_(p.grad, alpha=d)
        below = sum(self.state[p]["s"].abs().sum().item() for p in group["params"])
        if below > 0:
            found = 40 * above / below
            if found > d:
                d = found
        group["d"] = d
        for p in group["params"]:
            p.sub_(p.grad, alpha=d * group["lr"])
        group["k"] += 1


class Bounded(torch.optim.Optimizer):
    """Divides Python's numbers, where it has seen that it may."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            norm, of_gradient = p.norm().item(), p.grad.norm().item()
            ratio = 1.0
            if of_gradient != 0:
                ratio = norm / of_gradient
                if ratio > 2:
                    ratio = 2.0
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * ratio)


def _with_zeros(rows: int, make: Callable[[Any], torch.optim.Optimizer]) -> Built:
    model = mlp(4, 3)
    nn.init.zeros_(model[0].bias)
    nn.init.zeros_(model[2].bias)
    return stepping(rows, model, make(model.parameters()))


@case
def trust_ratios(rows: int) -> Built:
    return _with_zeros(rows, lambda parameters: TrustRatios(parameters, 0.1))


@case
def scaled_rates(rows: int) -> Built:
    return _with_zeros(rows, lambda parameters: Scaled(parameters, 0.1))


@case
def found_rate(rows: int) -> Built:
    return _with_zeros(rows, FoundRate)


def _large_and_small(rows: int, small: float = 1.0) -> list[tuple[torch.Tensor, ...]]:
    """Batches whose gradients are large in one step and small in the next."""
    return [
        (numbers(rows, 4) * (small if number % 2 else 30), numbers(rows, 3))
        for number in range(STEPS + 1)
    ]


def clip(parameters: Iterable[nn.Parameter], most: float) -> torch.Tensor:
    """As it was written before PyTorch had a function for it."""
    parameters = list(parameters)
    total = sum(p.grad.norm().item() ** 2 for p in parameters) ** 0.5  # type: ignore[union-attr]
    factor = most / (total + 1e-6)
    if factor < 1:
        for p in parameters:
            p.grad.mul_(factor)  # type: ignore[union-attr]
    return total


@case
def bounded_rates(rows: int) -> Built:
    """In every second step the first layer's weight has no gradient."""
    model = mlp(4, 3)
    optimizer = Bounded(model.parameters())

    def step(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), wanted)
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, _large_and_small(rows, 0.0)


@case
def clipped_by_hand(rows: int) -> Built:
    model = mlp(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        F.mse_loss(model(x) * x.norm(dim=1, keepdim=True), wanted).backward()
        total = clip(model.parameters(), 5.0)
        optimizer.step()
        return total

    return [model], step, _large_and_small(rows)


@case
def clipped_beside_a_table(rows: int) -> Built:
    """Rows of a table have an optimizer of their own."""
    table = nn.Embedding(50, 4, sparse=True).double()
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    of_rows = torch.optim.SparseAdam(table.parameters(), 0.1)

    def step(ids: torch.Tensor, scale: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        of_rows.zero_grad()
        loss = F.mse_loss(model(table(ids) * scale), wanted)
        loss.backward()
        of_rows.step()
        clip(model.parameters(), 1.0)
        optimizer.step()
        return loss

    batches = _large_and_small(rows)
    return [table, model], step, [(torch.randint(50, (rows,)), x, wanted) for x, wanted in batches]
