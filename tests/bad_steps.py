"""What workers do in the tests of errors among several workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equality
import torch
from errors_help import alone, among, linear, rows, warnings_of_parallax
from torch import nn

import parallax.api
from parallax.config import Config
from parallax.errors import DisagreementError, ParallaxError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

State = dict[str, Any]


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """Class and text of what a call raises."""
    try:
        call()
    except ParallaxError as error:
        return type(error).__name__, str(error)
    return "", ""


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal, NaN included."""
    a, spec = torch.utils._pytree.tree_flatten(left)
    b, other = torch.utils._pytree.tree_flatten(right)
    return spec == other and all(
        torch.allclose(x, y, rtol=0, atol=1e-10, equal_nan=True)
        if isinstance(x, torch.Tensor)
        else x == y
        for x, y in zip(a, b, strict=True)
    )


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).float().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


# -- Before the first step --------------------------------------------------------------------


def differing(world: World, what: str) -> None:
    """Worker 1 builds something else."""
    odd = world.rank == 1
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    if what == "shape" and odd:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if what == "layer" and odd:
        model.append(nn.Linear(2, 1))
    if what == "dtype" and odd:
        model.double()
    if what == "order":
        model = nn.ModuleDict()
        for name in ("b", "a") if odd else ("a", "b"):
            model[name] = nn.Linear(3, 3)
        model.forward = lambda x: model["b"](model["a"](x))
    if what == "frozen" and odd:
        model[1].bias.requires_grad_(False)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), 0.2 if what == "rate" and odd else 0.1
    )
    if what == "optimizer" and odd:
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
    if what == "loaded":
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        before = alone(plain(model, optimizer))
        before.run(rows())
        saved = before.state_dict()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
    config = Config(workers=1, seed=3)
    if what == "average" and odd:
        config = Config(workers=1, seed=3, average_dense=False)
    sizes = ["a list of 10 items"] if what == "sizes" and odd else ["a list of 12 items"]
    step = plain(model, optimizer)
    if what == "held":
        held = {"scales": torch.ones(3 if odd else 4, 1)}
        inner = step

        def step(x: torch.Tensor) -> torch.Tensor:
            return inner(x * held["scales"].sum())

    runner = Runner(step, discover(step), config, world, lambda: sizes)
    if what == "loaded" and odd:
        runner.load_state_dict(saved)
    batch: Any = rows()
    if what == "dims" and odd:
        batch = batch[None]
    if what == "batch dtype" and odd:
        batch = batch.double()
    if what == "nesting" and odd:
        runner.run([batch])
    elif what == "micro-batches":
        runner.run([batch, batch] if odd else [batch])
    elif what == "keyword" and odd:
        runner.run(x=batch)
    else:
        runner.run(batch)


def different_values(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights after a step from other first values on every worker, and what they should be."""
    expected, optimizer = linear(100)
    plain(expected, optimizer)(rows())
    model, optimizer = linear(100 + world.rank)
    among(world, plain(model, optimizer)).run(rows())
    return model.weight.detach(), expected.weight.detach()


# -- In a step ----------------------------------------------------------------------------------


class Words(nn.Module):
    """A sparse table, one that is also a dense projection, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.tied = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.tied.weight

    def forward(self, ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.words(ids) + self.tied(others))))


def rates(world: World, ahead: bool, differ: bool) -> tuple[str, int]:
    """Learning rates that change between steps, on worker 1 to others from the third step on: the
    error, and how many steps ran."""
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(ids, ids % 6).square().mean().backward()
        optimizer.step()

    runner = among(world, step)
    batches: Any = [torch.arange(4) for _ in range(12)]
    ran = 0
    try:
        for batch in runner.ahead(batches) if ahead else batches:
            runner.run(batch)
            ran += 1
            # As schedulers do on machines that compute the last digits differently.
            rate = 0.1 / ran * (1 + 1e-15 * world.rank)
            optimizer.param_groups[0]["lr"] = rate * (1 + world.rank * (differ and ran > 2))
    except DisagreementError as error:
        return str(error), ran
    return "", ran


def two_runners(world: World) -> None:
    """The second finds what the first one deals to the workers."""
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(ids, ids % 6).square().mean().backward()
        optimizer.step()

    first, second = among(world, step), among(world, step)
    first.run(torch.arange(4))
    second.run(torch.arange(4))


def bad_row(world: World, option: str, table: str, bad: int) -> tuple[str, str, bool, bool]:
    """The last worker asks for a bad row: the error, nothing updated, the next step works."""
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(ids, others).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    runner = among(world, step, option)
    good = torch.tensor([1, 2, 3])
    runner.run(good, good)
    before = runner.state_dict()
    wrong = good.clone()
    if world.rank == world.size - 1:
        wrong[1] = bad
    batch = (wrong, good) if table == "words" else (good, wrong)
    kind, text = outcome(lambda: runner.run(*batch))
    unchanged = same(before, runner.state_dict())
    runner.run(good, good)
    return kind, text, unchanged, not same(before, runner.state_dict())


def uneven(
    world: World, option: str, model: str, between: str, shares: list[list[int]]
) -> tuple[bool, list[float]]:
    """Steps with other numbers of rows per worker, against one device on all rows."""
    data = equality.batches(4)
    expected = equality.build(model, "adagrad", between)
    case = equality.build(model, "adagrad", between)
    runner = among(world, case.step, option)
    losses = []
    for batch, share in zip(data, shares, strict=False):
        ends = [sum(share[: w + 1]) for w in range(world.size)]
        expected.step(*(item[: ends[-1]] for item in batch))
        first, last = ends[world.rank] - share[world.rank], ends[world.rank]
        losses.append(float(runner.run(*(item[first:last] for item in batch))))
    found = runner.state_dict()
    optimizer = expected.optimizers[0].state_dict()
    names = {id(o): n for n, o in runner._objects.optimizers.items()}
    return (
        same(dict(expected.models[0].state_dict()), dict(found["net"]))
        and same(optimizer["state"], found[names[id(case.optimizers[0])]]["state"]),
        losses,
    )


def all_empty(world: World, option: str, model: str) -> tuple[str, str, bool]:
    case = equality.build(model, "adam", "none")
    batch = equality.batches(1)[0]
    runner = among(world, case.step, option)
    runner.run(*batch)
    before = runner.state_dict()
    kind, text = outcome(lambda: runner.run(*(item[:0] for item in batch)))
    return kind, text, same(before, runner.state_dict())


def other_structure(world: World, option: str, sparse: bool) -> tuple[str, str, bool, bool]:
    """Worker 1 passes a batch of another structure in the second step."""
    torch.manual_seed(0)
    layers = [nn.Embedding(9, 3), nn.Linear(3, 2)] if sparse else [nn.Linear(3, 2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    runner = among(world, plain(model, optimizer), option)
    batch = torch.tensor([1, 2, 3]) if sparse else rows()
    runner.run(batch)
    before = runner.state_dict()
    odd = batch[None] if world.rank == 1 else batch
    kind, text = outcome(lambda: runner.run(odd))
    unchanged = same(before, runner.state_dict())
    runner.run(batch)
    return kind, text, unchanged, not same(before, runner.state_dict())


def loaded_alone(world: World, option: str) -> list[tuple[str, str, bool]]:
    """Worker 0 loads a state between two steps, and then the others do as well."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    runner = among(world, plain(model, optimizer), option)
    runner.run(rows())
    best = runner.state_dict()
    runner.run(rows())
    found = []
    for rank in range(world.size):
        if world.rank == rank:
            runner.load_state_dict(best)
        kind, text = outcome(lambda: runner.run(rows()))
        found.append((kind, text, same(best, runner.state_dict())))
    return found


def not_finite(world: World, option: str, model: str, value: float, norm: float) -> bool:
    """A NaN or infinite value in the last worker's rows, against one device."""

    def run(case: equality.Case, call: Callable[..., Any], own: slice) -> None:
        for number, batch in enumerate(equality.batches(world.size)[:3]):
            ids, values, targets = (item.clone() for item in batch)
            if number == 1:
                values[-1, 0] = value
            call(*(item[own] for item in (ids, values, targets)))

    whole = equality.build(model, "momentum", "none")
    part = equality.build(model, "momentum", "none")

    def clipped(case: equality.Case) -> Callable[..., torch.Tensor]:
        net, (optimizer,) = case.models[0], case.optimizers

        def step(*batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(*batch[:2]), batch[2])
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type=norm)
            optimizer.step()
            return loss

        return step

    run(whole, clipped(whole), slice(None))
    runner = among(world, clipped(part), option)
    size = equality.LOCAL_BATCH
    run(part, runner.run, slice(world.rank * size, (world.rank + 1) * size))
    found = runner.state_dict()
    names = {id(m): n for n, m in runner._objects.models.items()}
    return same(
        dict(whole.models[0].state_dict()), dict(found[names[id(part.models[0])]])
    ) and not all(value.isfinite().all() for value in found[names[id(part.models[0])]].values())


# -- What one worker alone would do ----------------------------------------------------------------


def drifts(model: nn.Linear, optimizer: Any, loss: torch.Tensor, noise: Any) -> None:
    with torch.no_grad():
        model.weight.mul_(loss.detach())  # here


def drifts_by_chance(model: nn.Linear, optimizer: Any, loss: torch.Tensor, noise: Any) -> None:
    with torch.no_grad():
        model.bias.add_(torch.rand(2))  # here


def drifts_by_view(model: nn.Linear, optimizer: Any, loss: torch.Tensor, noise: Any) -> None:
    with torch.no_grad():
        model.weight[0].fill_(loss.item())  # here


def drifts_by_data(model: nn.Linear, optimizer: Any, loss: torch.Tensor, noise: Any) -> None:
    model.weight.data.copy_(noise.expand(2, 3))  # here


def slot_drifts(model: nn.Linear, optimizer: Any, loss: torch.Tensor, noise: Any) -> None:
    optimizer.state[model.weight]["momentum_buffer"].mul_(loss.detach())  # here


def scheduler_drifts(model: nn.Linear, optimizer: Any, loss: torch.Tensor, noise: Any) -> None:
    optimizer.plateau.step(loss.detach())


def rate_drifts(model: nn.Linear, optimizer: Any, loss: torch.Tensor, noise: Any) -> None:
    optimizer.param_groups[0]["lr"] = loss.item()


def clamps(model: nn.Linear, optimizer: Any, loss: torch.Tensor, noise: Any) -> None:
    with torch.no_grad():
        model.weight.clamp_(-0.3, 0.3)


def by_gradients(model: nn.Linear, optimizer: Any, loss: torch.Tensor, noise: Any) -> None:
    with torch.no_grad():
        model.weight.sub_(0.01 * model.weight.grad)


def changing(world: World, name: str) -> float:
    """Train with a body that changes state by hand; the largest difference from one device."""
    body = globals()[name]
    results = []
    for distributed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        optimizer.plateau = plateau

        def step(
            x: torch.Tensor,
            noise: torch.Tensor,
            model: nn.Linear = model,
            optimizer: torch.optim.SGD = optimizer,
            plateau: Any = plateau,
        ) -> None:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            body(model, optimizer, loss, noise)

        whole = rows(2 * world.size).double()
        if distributed:
            runner = among(world, step)
            for _ in range(3):
                runner.run(whole[2 * world.rank : 2 * world.rank + 2], torch.zeros(1))
        else:
            for _ in range(3):
                step(whole, torch.zeros(1))
        results.append(model.weight.detach())
    return float((results[0] - results[1]).abs().max())


def freezes(world: World) -> None:
    """A table that is frozen when its rows are on the workers."""
    model = nn.Sequential(nn.Embedding(20, 3), nn.Linear(3, 1))
    step = plain(model, torch.optim.SGD(model.parameters(), 0.1))
    config = Config(workers=1, strategy="Parallax")
    runner = Runner(step, discover(step), config, world)
    ids = torch.arange(4)
    runner.run(ids)
    model[0].requires_grad_(False)
    runner.run(ids)


def batch_norm_warning(world: World) -> list[str]:
    """What is logged for a model whose numbers depend on how the batch is divided."""
    with warnings_of_parallax() as seen:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        runner = among(world, plain(model, torch.optim.SGD(model.parameters(), 0.1)), "HYBRID")
        for _ in range(2):
            runner.run(rows())
    return seen


def workers_warning(world: World, asked: list[int]) -> list[str]:
    """What is logged of runners that ask for so many workers, one after the other."""
    parallax.api._first_workers.clear()
    with warnings_of_parallax() as seen:
        for count in asked:
            parallax.api._tell_of_workers(count, world)
    return seen
