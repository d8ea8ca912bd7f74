"""Where people keep state: see user_steps."""

from __future__ import annotations

import collections
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from user_cases import STEPS, Built, case, classes, mlp, stepping

sys.path.insert(0, str(Path(__file__).parent / "site-packages"))
import averaging


class _Lookahead(torch.optim.Optimizer):
    """Holds another optimizer, slow weights in a list, and how often it stepped in a tensor."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.steps = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.steps += 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        for slow, parameter in zip(self.slow, parameters, strict=True):
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow + 0.01 / self.steps)


class _Remembering(torch.optim.Optimizer):
    """Makes what it remembers when it needs it, in a dict of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.sums: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if number not in self.sums:
                    self.sums[number] = torch.zeros_like(parameter)
                parameter.sub_(group["lr"] * self.sums[number].mul_(0.9).add_(parameter.grad))


class _Counting(torch.optim.Optimizer):
    """Counts in its groups, in numbers that it makes there, as LAMB of apex does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            group["calls"] += 2
            rate = group["lr"] / (1 - 0.9 ** group["step"])
            for parameter in group["params"]:
                parameter.sub_(rate * parameter.grad)
                if group["calls"] > 4:
                    parameter.mul_(0.9)


class _Bounded(torch.optim.Optimizer):
    """Keeps its first rates in a list of its own, as AdaBound does, counts in the state of each
    parameter, and what is of no parameter in the state itself, as MADGRAD does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.rates = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if "calls" not in self.state:
            self.state["calls"] = torch.zeros((), dtype=torch.float64)  # type: ignore[index]
        self.state["calls"] += 1  # type: ignore[index]
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(parameter)
                state["step"] += 1
                state["mean"].lerp_(parameter.grad, 0.1)
                size = rate / math.sqrt(self.state["calls"])  # type: ignore[index]
                size /= 1 - math.pow(0.9, state["step"])
                parameter.sub_(state["mean"].clamp(-1, 1 + 1 / state["step"]), alpha=size)


class _Preconditioned(torch.optim.Optimizer):
    """Keeps containers of tensors and of other things for each parameter, as SOAP and PSGD do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if "kinds" not in state:
                    state["kinds"] = ("diagonal", None)
                    state["sums"] = [torch.zeros_like(parameter), None, torch.ones_like(parameter)]
                    state["last"] = collections.deque([gradient.clone() * 0] * 2, maxlen=2)
                    state["shape"], state["old"] = parameter.shape, None
                    state["warm"] = False
                state["last"].append(gradient.clone())
                if state["kinds"][0] == "diagonal" and state["sums"][1] is None:
                    state["sums"][0].mul_(0.9).add_(state["last"][0])
                    state["sums"][2] = state["sums"][2] * 0.9 + gradient.square()
                step = state["sums"][0].reshape(state["shape"]) / state["sums"][2].sqrt()
                if state["warm"]:
                    step = step + 0.1 * state["old"]
                state["calls"] = state.get("calls", 0) + 1
                state["warm"] = state["calls"] > 1  # decides in the next step
                state["old"] = step.clone()
                parameter.sub_(group["lr"] * step)


class _SetUp(torch.optim.Optimizer):
    """Notes in its groups that it has set them up, as torch-optimi does: with a flag, a text, a
    whole number, a counter in a tensor, and what it keeps of each parameter in a dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "setup": False, "phase": "first"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["setup"]:
                group["setup"], group["phase"], group["order"] = True, "second", 2
                group["step"] = torch.zeros((), dtype=torch.int32)
                group["means"] = {p: {"mean": torch.zeros_like(p)} for p in group["params"]}
            group["step"] += 1
            rate = group["lr"] / (1 - 0.9 ** group["step"].item())
            for parameter in group["params"]:
                mean = group["means"][parameter]["mean"].lerp_(parameter.grad, 0.1)
                parameter.sub_(rate * mean * group["order"])


@case
def optimizer_that_sets_its_groups_up(rows: int) -> Built:
    model = mlp(4, 3)
    return stepping(rows, model, _SetUp(model.parameters()))


@case
def optimizer_in_an_object_of_a_package(rows: int) -> Built:
    model = mlp(4, 3)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return stepping(rows, model, averaging.Wrapped(inner))


@case
def average_in_an_object_of_a_package(rows: int) -> Built:
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = averaging.Average(model.parameters(), 0.8)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        for value, parameter in zip(average.values, model.parameters(), strict=True):
            loss = loss + (parameter - value).square().sum()
        loss.backward()
        optimizer.step()
        average.update()
        return loss

    return [model], step, classes(rows)


@case
def optimizer_with_a_list(rows: int) -> Built:
    model = mlp(4, 3)
    return stepping(rows, model, _Bounded(model.parameters()))


@case
def optimizer_with_containers(rows: int) -> Built:
    model = mlp(4, 3)
    return stepping(rows, model, _Preconditioned(model.parameters()))


@case
def optimizer_that_counts_in_its_groups(rows: int) -> Built:
    model = mlp(4, 3)
    return stepping(rows, model, _Counting(model.parameters()))


@case
def optimizer_of_an_optimizer(rows: int) -> Built:
    model = mlp(4, 3)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return stepping(rows, model, _Lookahead(inner))


@case
def optimizer_with_a_dict(rows: int) -> Built:
    model = mlp(4, 3)
    return stepping(rows, model, _Remembering(model.parameters()))


class _Sharpness(torch.optim.Optimizer):
    """SAM: climbs, and steps by another optimizer with the gradients of that place."""

    def __init__(self, parameters: Any, kind: Any, **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = kind(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        found = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        for parameter in found:
            self.state[parameter]["old"] = parameter.detach().clone()
            parameter.add_(parameter.grad * 0.05 / norm)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()


@case
def sharpness_aware(rows: int) -> Built:
    model = mlp(4, 3)
    optimizer = _Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.climb()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, classes(rows)


class _Centred(nn.Module):
    """Keeps a tensor as a plain attribute, assigned anew, and another in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.pulls = torch.zeros(3, dtype=torch.float64)
        self.seen = [torch.zeros((), dtype=torch.float64)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pulls = 0.5 * self.pulls + 0.1 * self.layer.weight.detach().sum(1)
        self.seen[0].add_(1)
        return self.layer(x) - self.pulls / self.seen[0]


@case
def attributes_of_a_module(rows: int) -> Built:
    model = _Centred()
    return stepping(rows, model, torch.optim.SGD(model.parameters(), 0.1))


@case
def momentum_encoder(rows: int) -> Built:
    """A copy of the model that follows it by assigning .data, as MoCo and BYOL have it."""
    model, target = mlp(4, 3), mlp(4, 3)
    target.load_state_dict(model.state_dict())
    target.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels) + (model(x) - target(x)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data * 0.5
        optimizer.step()
        for slow, parameter in zip(target.parameters(), model.parameters(), strict=True):
            slow.data = slow.data * 0.9 + parameter.data * 0.1
            parameter.data = parameter.data.to(parameter.device)  # is what it was
        return loss

    return [model, target], step, classes(rows)


@case
def thawing(rows: int) -> Built:
    """A table and a layer that are trained from the second step on."""
    table, layer, head = nn.Embedding(20, 4), nn.Linear(4, 4), nn.Linear(4, 3)
    model = nn.Sequential(table, layer, head).double()
    model[:2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    models, step, _ = stepping(rows, model, optimizer)

    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randint(20, (rows,)), torch.randint(3, (rows,))

    return models, step, [batch() for _ in range(STEPS)]


class _Meter:
    """As scripts beside papers have it; what the step sets, it need not read."""

    def __init__(self) -> None:
        self.value = self.average = self.total = 0.0
        self.count = 0
        self.last: float | None = None

    def update(self, value: float, rows: int) -> None:
        self.value = self.last = value
        self.total += value * rows
        self.count += rows
        self.average = self.total / self.count


@case
def meters(rows: int) -> Built:
    model, meter = mlp(4, 3), _Meter()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        meter.update(loss.item(), len(x))
        return loss

    return [model], step, classes(rows)


@case
def rates_by_a_wrapper(rows: int) -> Built:
    """The annotated transformer's: an object that counts steps, and sets the rate from that."""

    class Noam:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.count = optimizer, 0

        def step(self) -> None:
            self.count += 1
            rate = 0.5 * min(self.count**-0.5, self.count * 3**-1.5)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()

    model = mlp(4, 3)
    noam = Noam(torch.optim.Adam(model.parameters(), 0.1))

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        noam.optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        noam.step()
        return loss.detach()

    return [model], step, classes(rows)


@case
def pictures_with_their_paths(rows: int) -> Built:
    """Each worker has other texts, which the step does not read."""
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(x: torch.Tensor, labels: torch.Tensor, paths: list[str]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    names = [f"{row}.png" for row in range(rows)]
    return [model], step, [(*batch, names) for batch in classes(rows)]


@case
def optimizer_that_looks_ahead(rows: int) -> Built:
    """A wrapper that does not call its base class, and keeps the state of what it wraps."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups
            self.state = collections.defaultdict(dict)
            self.fast_state = optimizer.state
            for group in self.param_groups:
                group["counter"] = 0

        def step(self) -> None:  # type: ignore[override]
            self.optimizer.step()
            for group in self.param_groups:
                if group["counter"] == 0:
                    for fast in group["params"]:
                        kept = self.state[fast]
                        if "slow" not in kept:
                            kept["slow"] = torch.zeros_like(fast.data).copy_(fast.data)
                        kept["slow"] += (fast.data - kept["slow"]) * 0.5
                        fast.data.copy_(kept["slow"])
                group["counter"] = (group["counter"] + 1) % 2

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.optimizer.zero_grad()

    table = nn.Embedding(20, 4).double()
    model = nn.Sequential(table, mlp(4, 3))
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), 0.1))

    data = [(torch.randint(20, (rows,)), torch.randint(3, (rows,))) for _ in range(STEPS)]
    return stepping(rows, model, optimizer, data)


class _Schedule:
    """Counts, and remembers what it gave."""

    def __init__(self) -> None:
        self.calls = 0
        self.given: list[float] = []

    def __call__(self) -> float:
        self.calls += 1
        self.given.append(self.calls)
        return min(1.0, self.calls / 3)


class _Annealed(nn.Module):
    """Has a schedule of the user's in an attribute, and another one in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp(4, 3)
        self.schedule = _Schedule()
        self.others = {"noise": _Schedule()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(x) * self.schedule() + 0.1 * self.others["noise"]()
        return found


class _Settled(torch.optim.Optimizer):
    """Has flags, texts, numbers, a list and an object of the user's in its attributes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})
        self.is_first, self.largest = True, None
        self.phases = {"phase": "warm", "calls": 0}
        self.schedule = _Schedule()
        self.norms: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rate = 0.1 if self.is_first else 1.0
        rate *= 0.5 if self.phases["phase"] == "warm" else 1.0
        rate *= self.schedule() / (1 + self.phases["calls"])
        rate *= 1.0 if self.largest is None else 0.9
        self.is_first, self.phases["phase"] = False, "main"
        self.phases["calls"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self.largest = parameter.grad.norm().item()
                self.norms.append(parameter.grad.norm().item())
                parameter.sub_(parameter.grad * group["lr"] * rate)

    def kept(self) -> list[Any]:
        return [
            *(self.is_first, self.largest, self.phases),
            *(self.schedule.calls, self.schedule.given, self.norms),
        ]


def settled(captured: bool, run: Any) -> list[Any]:
    """What a model and its optimizer have in their attributes after a few steps, and parameters.

    Args:
        captured: the steps run as ``run(step)`` has them.
    """
    torch.manual_seed(7)
    model = _Annealed()
    optimizer = _Settled(model.parameters())
    _, step, _ = stepping(4, model, optimizer)
    called = run(step) if captured else step
    for batch in [*classes(4), *classes(4)]:
        called(*batch)
    noise = model.others["noise"]
    seen = [model.schedule.calls, model.schedule.given, noise.calls, noise.given]
    return [*seen, *optimizer.kept(), [float(p.detach().sum()) for p in model.parameters()]]


@case
def clipped_to_what_the_step_computes(rows: int) -> Built:
    """As AutoClip does: a share of what norms were."""
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    usual: dict[str, Any] = {"norm": 1.0}

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        usual["norm"] = 0.9 * usual["norm"] + 0.1 * norm.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2 * usual["norm"])
        nn.utils.clip_grad_value_(model.parameters(), norm * 0.05)
        optimizer.step()
        return loss

    return [model], step, classes(rows)
