"""Steps whose regions are recorded, beside the same steps run as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from compiled_steps import LOCAL, _largest, batches, training
from equality import moved
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.program import Program
from parallax.runtime.recorded import Recorder
from parallax.runtime.runner import Runner

WORDS, WIDTH = 50, 8
ROUNDS = 3
"""How often the batches are gone through: what is recorded is repeated then."""
LENGTHS = [4, 5, 6, 7, 5, 6, 7, *[5, 6, 7] * 4, 8, 6]
"""Of sentences, by step: some come often."""


class Processor:
    """Records on the CPU: does what is recorded once to know the results, and undoes it."""

    memory = 1 << 40

    def __init__(self) -> None:
        self.recordings = 0

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        self.recordings += 1
        memory = [x for x in _inputs_of(run) if isinstance(x, torch.Tensor)]
        before, random = [x.clone() for x in memory], torch.get_rng_state()
        results = run()
        for one, value in zip(memory, before, strict=True):
            one.copy_(value)
        torch.set_rng_state(random)

        def repeat() -> None:
            for kept, value in zip(results, run(), strict=True):
                kept.copy_(value)

        return repeat, results


class Refusing(Processor):
    """Records nothing."""

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


class Picky(Processor):
    """Does not record some operations."""

    def __init__(self, *refused: Any) -> None:
        super().__init__()
        self.refused = refused

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        memory = [x for x in _inputs_of(run) if isinstance(x, torch.Tensor)]
        before = [x.clone() for x in memory]
        try:
            with _Without(self.refused):
                run()
        except RuntimeError:  # the end of a recording fails then, as on CUDA
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        finally:
            for one, value in zip(memory, before, strict=True):
                one.copy_(value)
        return super().record(run)


class _Without(TorchDispatchMode):
    def __init__(self, refused: Sequence[Any]) -> None:
        super().__init__()
        self.refused = refused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self.refused:
            raise RuntimeError(f"{func} is not permitted")
        return func(*args, **(kwargs or {}))


def regions_of(plan: str) -> int:
    """How many regions a plan tells of, if all are recorded; -1 if not."""
    ready, of, total = plan.split()[1:4]
    return int(total) if (ready, of) == (total, "of") else -1


def _inputs_of(run: Any) -> Sequence[Any]:
    """The inputs that a recording is made with: it closes over them."""
    cells = dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))
    static: Sequence[Any] = cells["static"].cell_contents
    return static


def record_on(runner: Runner, device: Any) -> Recorder:
    """Let a runner record the regions of its programs on a device."""
    recorder = Recorder(device)

    def recorder_of(program: Program) -> Recorder | None:
        return recorder if program.late is None else None

    runner._compiler._recorder = recorder_of  # type: ignore[method-assign]
    runner._compiler._recorders[torch.device("cpu")] = recorder
    return recorder


def compare(world: World, option: str, optimizer: str) -> dict[str, Any]:
    """How far workers whose regions are recorded are from workers without, in what a step returns
    and in the state in the end; and what the plan says of it."""
    found = []
    plan = ""
    for mode in ("none", "auto"):
        torch.manual_seed(11)
        with world.device:
            model, chosen, step = training(optimizer, whole=True)
        runner = Runner(step, discover(step), Config(strategy=option, compile=mode, seed=1), world)
        if mode == "auto" and world.device.type == "cpu":
            record_on(runner, Processor())
        losses = []
        for number in range(ROUNDS):
            for ids, labels in moved(batches(world.size), world.device):
                part = slice(world.rank * LOCAL, (world.rank + 1) * LOCAL)
                # In other memory in each step.
                losses.append(runner.run(ids[part].clone(), labels[part].clone()))
            if number == 0:
                _change(model, chosen, runner)
        found.append([*losses, runner.state_dict()])
        plan = runner._compiler.describe(runner._last)
    return {"difference": _largest(found[0], found[1]), "plan": plan}


class Reader(nn.Module):
    """Reads words in their order, looks at all of them at once, and forgets some."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.mixed = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.mixed(self.layer(self.table(ids))[0])
        near = torch.arange(ids.shape[1], device=ids.device) < 3
        return self.out(x * near[None, :, None] / ids.shape[1])


def compare_lengths(world: World, lengths: Sequence[int]) -> dict[str, Any]:
    """As :func:`compare`, for batches of sentences of these lengths."""
    found = []
    plan = ""
    for mode in ("none", "auto"):
        torch.manual_seed(11)
        with world.device:
            model = Reader().double()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        runner = Runner(
            step := _reading(model, optimizer),
            discover(step),
            Config(compile=mode, seed=1),
            world,
        )
        if mode == "auto" and world.device.type == "cpu":
            record_on(runner, Processor())
        torch.manual_seed(12 + world.rank)
        losses = []
        for length in lengths:
            ids = torch.randint(WORDS, (3, length), device=world.device)
            losses.append(runner.run(ids))
        found.append([*losses, runner.state_dict()])
        plan = runner._compiler.describe(runner._last)
    return {"difference": _largest(found[0], found[1]), "plan": plan}


def _reading(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


def _change(model: torch.nn.Module, chosen: torch.optim.Optimizer, runner: Runner) -> None:
    """What scripts do between epochs: other settings, other memory, a state from a file."""
    for group in chosen.param_groups:
        group["weight_decay"] = 0.03
        if "momentum" in group:
            group["momentum"] = 0.8
    bias = model.out.bias
    if bias.device.type != "meta":
        bias.data = bias.data.clone()
    runner.load_state_dict(runner.state_dict())
