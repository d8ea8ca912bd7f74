"""Runs that stop and go on from their state, on the workers of the pool."""

from __future__ import annotations

from typing import Any

import equality
import torch
from equality import LOCAL_BATCH, SEED, Case
from torch import nn

import parallax
from parallax.config import Config
from parallax.errors import CheckpointError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

SAVED_AFTER = 4


def _runner(case: Case, option: str, world: World) -> Runner:
    config = Config(run_option=option, workers=1, seed=SEED)  # type: ignore[arg-type]
    return Runner(case.step, discover(case.step), config, world)


def _train(runner: Runner, data: list[tuple[torch.Tensor, ...]]) -> None:
    """Every worker takes its slice of each batch, whatever the number of workers."""
    for batch in data:
        size = len(batch[0]) // runner.num_workers
        runner.run(*(x[runner.worker_id * size : (runner.worker_id + 1) * size] for x in batch))


def resumed(world: World, option: str, kind: tuple[str, str, str], before: int) -> float:
    """Save after 4 steps; another run loads it after ``before`` steps of its own and goes on.

    Returns:
        The largest difference from training on one device throughout.
    """
    data = equality.batches(world.size)
    expected = equality.single_device(equality.build(*kind), data)
    first = _runner(equality.build(*kind), option, world)
    _train(first, data[:SAVED_AFTER])
    saved = first.state_dict()
    kept = equality.pytree.tree_map(
        lambda x: x.clone() if isinstance(x, torch.Tensor) else x, saved
    )
    case = equality.build(*kind, seed=SEED + 1)
    other = _runner(case, option, world)
    _train(other, data[:before])
    other.load_state_dict(saved)
    worst = equality.difference(saved, other.state_dict())
    found = equality.distributed(case, data[SAVED_AFTER:], other)
    assert equality.difference(saved, kept) == 0, "the given state was changed"
    return max(worst, equality.difference(expected, found))


def moved(world: World, option: str, kind: tuple[str, str, str], given: Any, part: int) -> Any:
    """Go on with part ``part`` of three of one training, on any number of workers."""
    data = equality.batches(12 // LOCAL_BATCH)
    runner = _runner(equality.build(*kind), option, world)
    if given is not None:
        runner.load_state_dict(given)
    _train(runner, data[3 * part : 3 * part + 3])
    return runner.state_dict()


def throughout(kind: tuple[str, str, str]) -> Any:
    """What the three parts should come to, on one device."""
    return equality.single_device(equality.build(*kind), equality.batches(12 // LOCAL_BATCH)[:9])


def deferred_table(world: World, before: int, fresh: bool) -> float:
    """A state loaded into a model whose table has no storage (yet)."""

    def build(defer: bool) -> tuple[Any, nn.Module]:
        torch.manual_seed(3 if defer else 4)
        if defer:
            with parallax.deferred():
                table = nn.Embedding(9, 2)
        else:
            table = nn.Embedding(9, 2)
        out = nn.Linear(2, 1)
        optimizer = torch.optim.Adam([*table.parameters(), *out.parameters()], 0.1)

        def step(ids: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = out(table(ids)).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, table

    ids = torch.tensor([[1, 8, 3, 3], [0, 1, 5, 8], [2, 2, 7, 1], [4, 6, 8, 0]])
    plain, _ = build(False)
    whole = Runner(plain, discover(plain), Config(workers=1, seed=1), world)
    for row in ids[: 0 if fresh else 2]:
        whole.run(row)
    saved = whole.state_dict()
    step, _ = build(True)
    runner = Runner(step, discover(step), Config(workers=1, seed=1), world)
    for row in ids[:before]:
        runner.run(row)
    runner.load_state_dict(saved)
    worst = equality.difference(saved, runner.state_dict())
    for row in ids[2:]:
        whole.run(row)
        runner.run(row)
    return max(worst, equality.difference(whole.state_dict(), runner.state_dict()))


def loaded_into_the_optimizer(world: World) -> tuple[str, float]:
    """The optimizer's own ``load_state_dict`` on a sharded table, then the runner's."""
    data = equality.batches(world.size)
    case = equality.build("sparse", "adam", "none")
    runner = _runner(case, "HYBRID", world)
    _train(runner, data[:2])
    saved = runner.state_dict()
    name = next(name for name in saved if name.startswith("optimizers"))
    case.optimizers[0].load_state_dict(saved[name])
    text = ""
    try:
        _train(runner, data[2:3])
    except CheckpointError as error:
        text = str(error)
    runner.load_state_dict(saved)
    _train(runner, data[2:])
    expected = equality.single_device(equality.build("sparse", "adam", "none"), data)
    return text, equality.difference(expected["models"][0], dict(runner.state_dict()["net"]))
