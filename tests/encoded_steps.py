"""Training with encoded gradients, on the workers of the pool."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from by_host import FLAT, forced
from torch import nn

from parallax.config import Config
from parallax.errors import BatchError, CheckpointError
from parallax.graph.objects.discovery import discover
from parallax.ops.specs import BucketEntry, BucketsSpec
from parallax.runtime.comm.control import Step, StepControl
from parallax.runtime.comm.texts import digest
from parallax.runtime.comm.world import World
from parallax.runtime.encoded.pool import STATE, EncodedBuckets
from parallax.runtime.exchange.dense import Buckets
from parallax.runtime.runner import Runner
from parallax.strategy.builders import Encoded, StrategyBuilder
from parallax.strategy.builders.all_reduce import Replicated
from parallax.strategy.builders.hybrid import Hybrid

SEED = 3
WIDTH, HIDDEN, ROWS = 24, 96, 8
Options = dict[str, float]


def model(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Callable[..., Any]]:
    """A small regression, the same on all workers."""
    torch.manual_seed(SEED)
    sizes = (WIDTH, HIDDEN, HIDDEN, 4)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    net = nn.Sequential(*layers[:-1]).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), 0.02)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return net, step


def batch(rank: int, step: int, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Any:
    """What one worker gets in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, WIDTH, generator=generator).to(dtype)
    return x, torch.stack([x.sum(1), x.prod(1), x.max(1).values, x.std(1)], 1)


def runner_for(
    world: World, step: Callable[..., Any], encoder: str, options: Options | None = None
) -> Runner:
    config = Config(strategy=Encoded(encoder, **(options or {})), workers=1, seed=SEED)
    return Runner(step, discover(step), config, world)


def _hash(tensors: Sequence[torch.Tensor]) -> str:
    return digest(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors))


def trained(
    world: World, encoder: str, options: Options, steps: int, uneven: bool, levels: str = FLAT
) -> dict[str, Any]:
    """Train; what came of it on this worker.

    With ``uneven`` workers have batches of other sizes, and the last one an empty one now and then.
    """
    net, step = model()
    losses = []
    runner = runner_for(world, step, encoder, options)
    before = 0, 0
    for number in range(steps):
        rows = ROWS + 3 * world.rank if uneven else ROWS
        if uneven and number % 3 == 2 and world.rank == world.size - 1:
            rows = 0
        if number == 2:
            before = _sent(world)
        with forced(levels):
            losses.append(float(runner.run(*batch(world.rank, number, rows))))
    sent, across = (
        (now - then) / (steps - 2) for now, then in zip(_sent(world), before, strict=True)
    )
    return {
        "parameters": _hash(list(net.parameters())),
        "losses": losses,
        "sent": sent,
        "across": across,
        "formula": runner.plan.bytes_per_step,
        "formula across": runner.plan.bytes_across,
        "levels": {row.choice.hierarchy for row in runner.plan.rows},
    }


def _sent(world: World) -> tuple[int, int]:
    """Bytes so far: in all, and to other hosts."""
    return sum(world.traffic.sent.values()), sum(world.traffic.across.values())


def one_device(workers: int, steps: int) -> list[float]:
    """Losses of worker 0's batches when one device has the batches of all."""
    net, step = model()
    losses = []
    for number in range(steps):
        parts = [batch(rank, number) for rank in range(workers)]
        with torch.no_grad():
            x, y = parts[0]
            losses.append(float((net(x) - y).square().mean()))
        step(*(torch.cat(items) for items in zip(*parts, strict=True)))
    return losses


def _put(buckets: Buckets, gradients: Sequence[torch.Tensor]) -> None:
    for index, gradient in enumerate(gradients):
        buckets.put(index, gradient)


def _buckets(
    world: World,
    encoder: str,
    options: Options,
    dtype: torch.dtype,
    by_host: bool = False,
    buckets: Sequence[int] = (0, 0, 0, 0),
    average: bool = False,
) -> tuple[Buckets, EncodedBuckets, StepControl]:
    """Buckets of gradients without a graph."""
    control = StepControl(world, 1)
    pool = EncodedBuckets(world, control)
    given = tuple(sorted(options.items()))
    entries = tuple(
        BucketEntry(f"v{i}", shape, dtype, average, bucket, by_host, 1, encoder, given)
        for i, (shape, bucket) in enumerate(zip(SHAPES, buckets, strict=True))
    )
    return Buckets(BucketsSpec(entries), world, control, pool), pool, control


SHAPES = ((40, 30), (7,), (3, 500, 2), (2000,))


def owed(
    world: World,
    encoder: str,
    options: Options,
    steps: int,
    by_host: bool = False,
    uneven: bool = False,
) -> dict[str, float]:
    """Sum random gradients in float64; or take their means over batches of very different sizes.

    Returns:
        By how much all that was decoded, and all residuals, differ from all gradients; how large
        the residuals are, beside one step's gradients and beside all of them; and how much of the
        sum of all steps is missing.
    """
    buckets, pool, control = _buckets(
        world, encoder, options, torch.float64, by_host, average=uneven
    )
    generators = [torch.Generator().manual_seed(17 + rank) for rank in range(world.size)]
    means = [torch.randn(s, generator=generators[0], dtype=torch.float64) / 4 for s in SHAPES]
    total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    decoded = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for number in range(steps):
        rows = [(7 * number + 3 * w) % 5 ** (1 + number % 3) for w in range(world.size)]
        rows[number % world.size] += 1
        control.begin(Step.of(1, number, rows[world.rank] if uneven else 1))
        by_worker = [
            [m + torch.randn(m.shape, generator=g, dtype=torch.float64) for m in means]
            for g in generators
        ]
        for sums, parts in zip(total, zip(*by_worker, strict=True), strict=True):
            shares = [count / sum(rows) if uneven else 1 for count in rows]
            sums += sum(share * part for share, part in zip(shares, parts, strict=True))
        _put(buckets, by_worker[world.rank])
        for sums, gradient in zip(decoded, buckets.wait(), strict=True):
            sums += gradient
    kept = [torch.zeros_like(sums) for sums in total]
    for name, parts in pool.state().items():
        place = kept[int(name[1:])]
        place += parts["residuals"].sum(0) + parts.get("sums", 0)
    difference = max(
        float((d + k - t).abs().max()) for d, k, t in zip(decoded, kept, total, strict=True)
    )
    missing = sum(float((d - t).norm() ** 2) for d, t in zip(decoded, total, strict=True))
    whole = sum(float(t.norm() ** 2) for t in total)
    return {"difference": difference, "missing": (missing / whole) ** 0.5}


def specials(world: World, encoder: str, options: Options) -> dict[str, Any]:
    """What NaN and infinity on one worker come to, and the step after it."""
    buckets, _, control = _buckets(world, encoder, options, torch.float32)
    found = {}
    for number, value in enumerate((torch.nan, torch.inf, 1.0, 1.0)):
        control.begin(Step.of(1, number, 1))
        gradients = [torch.ones(shape) for shape in SHAPES]
        if world.rank == world.size - 1:
            gradients[0][3, 4] = value
            gradients[1][2] = value
        _put(buckets, gradients)
        found[number] = [gradient.clone() for gradient in buckets.wait()]
    return found


def started_early(world: World, encoder: str) -> list[int]:
    """Messages that were started without any wait: by the last gradient of a bucket, and later by
    one of another bucket, when the first message had come."""
    buckets, _, control = _buckets(world, encoder, {}, torch.float32, buckets=(0, 1, 0, 1))
    gradients = [torch.ones(shape) for shape in SHAPES]
    started = []
    for number in range(2):
        control.begin(Step.of(1, number, 1))
        before = world.traffic.messages
        for index in (0, 1, 2):
            buckets.put(index, gradients[index])
        (full,) = buckets._full
        started.append(world.traffic.messages - before)
        deadline = time.monotonic() + 60
        while not full.pending.has_arrived:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        buckets.put(3, gradients[3])
        started.append(world.traffic.messages - before)
        for index, gradient in enumerate(buckets.wait()):
            torch.testing.assert_close(gradient, world.size * gradients[index])
    return started


def continued(world: World, encoder: str, options: Options) -> tuple[str, str, str]:
    """Parameters after eight steps: at one go, resumed after four, and so without residuals."""
    results = []
    net, step = model()
    runner = runner_for(world, step, encoder, options)
    for number in range(8):
        if number == 4:
            saved = runner.state_dict()
        runner.run(*batch(world.rank, number))
    results.append(_hash(list(net.parameters())))
    for state in (saved, {k: v for k, v in saved.items() if k != STATE}):
        net, step = model()
        runner = runner_for(world, step, encoder, options)
        runner.run(*batch(world.rank, 99))
        runner.load_state_dict(state)
        for number in range(4, 8):
            runner.run(*batch(world.rank, number))
        results.append(_hash(list(net.parameters())))
    return results[0], results[1], results[2]


def refused_step(world: World, encoder: str, options: Options) -> bool:
    """Whether a step that all workers refuse leaves no trace."""
    hashes = []
    for refuse in (False, True):
        net, step = model()
        runner = runner_for(world, step, encoder, options)
        for number in range(6):
            if refuse and number == 3:
                with contextlib.suppress(BatchError):
                    runner.run(*batch(world.rank, 50, 0))
                    raise AssertionError("an empty step was not refused")
            runner.run(*batch(world.rank, number))
        hashes.append(_hash([*net.parameters(), *_residuals(runner)]))
    return hashes[0] == hashes[1]


def _residuals(runner: Runner) -> list[torch.Tensor]:
    kept = runner.state_dict()[STATE]
    return [value for name in sorted(kept) for _, value in sorted(kept[name].items())]


def saved(world: World, encoder: str, options: Options, given: Any) -> Any:
    """Load a state, if there is one, before or after the first step; what is saved at once, and
    after a step."""
    _, step = model()
    runner = runner_for(world, step, encoder, options)
    if given is not None:
        runner.load_state_dict(given)
        unread = runner.state_dict()
        runner.run(*batch(world.rank, 0))
        runner.load_state_dict(given)
        return unread, runner.state_dict()
    for number in range(3):
        runner.run(*batch(world.rank, number))
    return runner.state_dict()


def bad_states(world: World) -> list[str]:
    """Errors of states of encoders that do not fit."""
    texts = []
    net, step = model()
    runner = runner_for(world, step, "int8", {})
    runner.run(*batch(world.rank, 0))
    state = runner.state_dict()
    before = _hash(list(net.parameters()))
    kept = state[STATE]
    name = next(iter(kept))
    for change in (
        3,
        {**kept, "net.9": kept[name]},
        {**kept, name: {"residuals": torch.zeros(2, 5)}},
        {**kept, name: {"residuals": None}},
    ):
        try:
            runner.load_state_dict({**state, STATE: change})
        except CheckpointError as error:
            texts.append(str(error))
    assert _hash(list(net.parameters())) == before
    return texts


BUILDERS: dict[str, type[StrategyBuilder]] = {"HYBRID": Hybrid, "AR": Replicated}


def rows(world: World, option: str, encoder: str) -> dict[str, Any]:
    """Train a table of rows that travel encoded; what it came to, and the bytes of a step."""
    torch.manual_seed(SEED)
    table = nn.Embedding(5000, 64)
    first = table.weight.detach().clone()
    optimizer = torch.optim.SGD(table.parameters(), 10.0)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (table(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    builder = Encoded(encoder, BUILDERS[option](), rows=True)
    config = Config(strategy=builder, workers=1, seed=SEED)
    runner = Runner(step, discover(step), config, world)
    generator = torch.Generator().manual_seed(world.rank)
    before = 0
    for number in range(6):
        if number == 2:
            before = sum(runner.traffic.values())
        runner.run(torch.randint(5000, (400,), generator=generator))
    (row,) = runner.plan.rows
    sent = sum(runner.traffic.values()) - before
    trained = runner.state_dict()["table"]["weight"]
    return {
        "synchronizer": row.choice.synchronizer,
        "plan": str(runner.plan),
        "sent": sent / 4,
        "formula": row.bytes_per_step,
        "table": trained,
        "moved": (trained - first).abs().max(),
    }
