"""Training steps for the equality tests, and the comparison with one device.

Each case builds a float64 model, its optimizer and a step from a seed; the distributed run gets
every worker's slice of the batches that the single-device run sees whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

SEED = 20240611
STEPS = 10
LOCAL_BATCH = 3
ROWS, WIDTH = 11, 4

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.05, amsgrad=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.05),
    "radam": lambda p: torch.optim.RAdam(p, 0.05),
    "adamax": lambda p: torch.optim.Adamax(p, 0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "asgd": lambda p: torch.optim.ASGD(p, 0.1, t0=3),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.05, weight_decay=0.01),
}
SPARSE_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(list(p), 0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}
BETWEEN = ("none", "clip_norm", "clip_value", "average")
MODELS = ("dense", "sparse", "lazy", "tied", "several")


@dataclass
class Case:
    """A model with its step; ``state`` is everything to compare."""

    step: Callable[..., Any]
    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    average: dict[str, torch.Tensor]


class _Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind != "dense":
            self.table = nn.Embedding(ROWS, WIDTH, sparse=kind == "lazy", padding_idx=2)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.zeros(3, WIDTH))
        self.out = nn.Linear(WIDTH, ROWS)
        if kind == "tied":
            self.out.weight = self.table.weight

    def forward(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x = values * self.frozen
        if self.kind != "dense":
            x = x + self.table(ids).mean(1)
        if self.kind == "several":
            x = x + F.embedding(ids[:, 0], self.table.weight, padding_idx=2) * 0.5
            x = x + F.embedding(ids[:, 1] // 2, self.table.weight, padding_idx=2)
        x = torch.tanh(self.hidden(x)) * self.scale
        # Expanded and strided gradients: the sum hands out one number for all elements, the
        # transposed product a gradient that is laid out by columns.
        x = x + self.offset.sum(0) * 0.1 + (self.offset.t() @ self.offset).sum() * 0.01
        return self.out(x)


def build(model: str, optimizer: str, between: str, seed: int = SEED) -> Case:
    """One case, with the same first values for the same seed."""
    torch.manual_seed(seed)
    net = _Net(model).double()
    optimizers = []
    if model == "lazy":
        optimizers.append(SPARSE_OPTIMIZERS[optimizer](net.table.parameters()))
        rest = [p for n, p in net.named_parameters() if not n.startswith("table")]
        optimizers.append(torch.optim.Adam(rest, 0.05))
    else:
        optimizers.append(OPTIMIZERS[optimizer](net.parameters()))
    average: dict[str, torch.Tensor] = {}
    if between == "average":
        average.update({n: p.detach().clone() for n, p in net.named_parameters()})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[-1], 0.97)
    dense = [p for n, p in net.named_parameters() if model != "lazy" or not n.startswith("table")]

    def step(ids: torch.Tensor, values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for one in optimizers:
            one.zero_grad()
        loss = F.cross_entropy(net(ids, values), targets)
        loss.backward()
        if between == "clip_norm":
            nn.utils.clip_grad_norm_(dense, 0.05)
        elif between == "clip_value":
            nn.utils.clip_grad_value_(dense, 0.01)
        for one in optimizers:
            one.step()
        scheduler.step()
        if between == "average":
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    average[name].mul_(0.9).add_(parameter, alpha=0.1)
        return loss

    return Case(step, [net], optimizers, average)


def batches(workers: int, seed: int = SEED) -> list[tuple[torch.Tensor, ...]]:
    """Whole batches of ``workers`` local ones."""
    generator = torch.Generator().manual_seed(seed + 1)
    rows = workers * LOCAL_BATCH
    return [
        (
            torch.randint(ROWS, (rows, 2), generator=generator),
            torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
            torch.randint(ROWS, (rows,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def built(device: torch.device, case: tuple[str, str, str]) -> Case:
    """One case, on a device."""
    with device:
        return build(*case)


def moved(data: Any, device: torch.device) -> Any:
    """Tensors in nested data, on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda item: item.to(device), data)


def difference(left: Any, right: Any) -> float:
    """The largest absolute difference between two nested states of equal structure."""
    a, spec_a = pytree.tree_flatten(left)
    b, spec_b = pytree.tree_flatten(right)
    assert spec_a == spec_b, (spec_a, spec_b)
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor):
            assert x.shape == y.shape, (x.shape, y.shape)
            assert x.dtype == y.dtype, (x.dtype, y.dtype)
            if x.numel():
                worst = max(worst, float((x.double().cpu() - y.double().cpu()).abs().max()))
        elif isinstance(x, float):
            worst = max(worst, abs(x - y))
        else:
            assert x == y, (x, y)
    return worst


def single_device(case: Case, data: list[tuple[torch.Tensor, ...]]) -> dict[str, Any]:
    """The state after training as PyTorch does it."""
    for batch in data:
        case.step(*batch)
    return {
        "models": [dict(m.state_dict()) for m in case.models],
        "optimizers": [o.state_dict() for o in case.optimizers],
        "average": case.average,
    }


def distributed(
    case: Case, data: list[tuple[torch.Tensor, ...]], runner: Runner, late: bool = False
) -> dict[str, Any]:
    """The same from a runner; every worker passes its slice.

    Args:
        late: steps leave updates to the ones that follow.
    """
    first = runner.worker_id * LOCAL_BATCH
    own = [tuple(item[first : first + LOCAL_BATCH] for item in batch) for batch in data]
    for part in runner.ahead(own, late_updates=True) if late else own:
        runner.run(*part)
    return state_of(case, runner)


def state_of(case: Case, runner: Runner) -> dict[str, Any]:
    """All that a runner trains, as :func:`single_device` has it."""
    state = runner.state_dict()
    names = runner._objects
    average = {
        key.removeprefix("average."): value
        for key, value in state.items()
        if key.startswith("average.")
    }
    return {
        "models": [dict(state[name]) for name in names.models],
        "optimizers": [state[name] for name in _in_order(names.optimizers, case)],
        "average": average,
    }


def _in_order(found: dict[str, torch.optim.Optimizer], case: Case) -> list[str]:
    return [
        next(name for name, o in found.items() if o is optimizer) for optimizer in case.optimizers
    ]


def compare(
    world: World, run_option: str, cases: list[tuple[str, str, str]], late: bool = False
) -> dict[str, float]:
    """Run cases on this worker and compare each with one device."""
    result = {}
    for model, optimizer, between in cases:
        wanted = (model, optimizer, between)
        data = moved(batches(world.size), world.device)
        expected = single_device(built(world.device, wanted), data)
        case = built(world.device, wanted)
        config = Config(run_option=run_option, workers=1, seed=SEED)  # type: ignore[arg-type]
        runner = Runner(case.step, discover(case.step), config, world)
        found = distributed(case, data, runner, late)
        result[f"{model}-{optimizer}-{between}"] = difference(expected, found)
    return result


def all_cases() -> list[tuple[str, str, str]]:
    """The whole matrix, optimizers that fit each kind of gradient."""
    cases = []
    for model in MODELS:
        optimizers = SPARSE_OPTIMIZERS if model == "lazy" else OPTIMIZERS
        cases += [(model, o, b) for o in optimizers for b in BETWEEN]
    return cases
