"""Random strategies of one small model: valid ones, mutations of them, and how they train.

The model has every kind of variable. Its step is captured once for each process and number of
workers, and every strategy gets a copy of the graph: what differs is what is rewritten and run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import equality
import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from parallax.config import Config
from parallax.errors import StrategyError
from parallax.graph.analysis.variables import Variable, analyze
from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover
from parallax.graph.objects.state import aliases, leaves
from parallax.graph.step_graph import StepGraph
from parallax.runtime import captures, preparation
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner
from parallax.strategy.data import Strategy, VariableStrategy, described, fingerprint
from parallax.strategy.registry import synchronizers
from parallax.strategy.verify import findings

STEPS, LOCAL_BATCH, ROWS, WIDTH = 3, 3, 11, 4
TRIES = 60
# Fields that change the numbers (average) or are for people (why) stay as they are.
DRAWN = (
    *("axis", "shards", "reduction", "order", "memory", "pieces"),
    *("group", "late_turn", "pull_group"),
)

Batch = tuple[torch.Tensor, ...]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.bag = nn.EmbeddingBag(ROWS - 2, WIDTH, mode="sum")
        self.hidden = nn.Linear(WIDTH, 6)
        self.out = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.linspace(-1, 1, 7 * WIDTH).view(7, WIDTH))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x = values + self.table(ids).mean(1) + self.bag(ids % (ROWS - 2))
        x = torch.tanh(self.hidden(x)) * self.scale
        # The transposed product has a gradient that is laid out by columns.
        return self.out(x) + (self.offset.t() @ self.offset).sum() * 0.01


def build() -> equality.Case:
    """The model after a first step, with its slots."""
    torch.manual_seed(equality.SEED)
    net = _Net().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step(ids: torch.Tensor, values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(ids, values), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        return loss

    step(*batches(1)[0])
    return equality.Case(step, [net], [optimizer], {})


def batches(workers: int) -> list[Batch]:
    """Whole batches of ``workers`` local ones."""
    draw = torch.Generator().manual_seed(equality.SEED + 1)
    rows = workers * LOCAL_BATCH
    return [
        (
            torch.randint(ROWS, (rows, 2), generator=draw),
            torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64),
            torch.randint(5, (rows,), generator=draw),
        )
        for _ in range(STEPS)
    ]


def variables() -> list[Variable]:
    """What a strategy for the model decides about."""
    case = build()
    objects = discover(case.step)
    step = capture(case.step, objects, batches(1)[0], {})
    return list(analyze(step, leaves(objects), aliases(objects)).variables.values())


# -- Drawing --------------------------------------------------------------------------------------


def problems(choice: VariableStrategy, variable: Variable, workers: int) -> list[Any]:
    """What is wrong with one decision."""
    alone = Strategy(fingerprint([variable]), workers, {variable.name: choice})
    return findings(alone, [variable], workers, two_levels=False)


def random_choice(variable: Variable, workers: int, draw: random.Random) -> VariableStrategy:
    """A decision that fits: a synchroniser, then each other field as far as it may be changed."""
    if not variable.trainable:
        return VariableStrategy("none")
    kinds = [name for name in synchronizers() if name != "none"]
    found: VariableStrategy | None = None
    while found is None:
        found = _placed(draw.choice(kinds), variable, workers, draw)
    for field in draw.sample(DRAWN, len(DRAWN)):
        changed = msgspec.structs.replace(
            found, **{field: _value(field, found, variable, workers, draw)}
        )
        if not problems(changed, variable, workers):
            found = changed
    return found


def _placed(
    name: str, variable: Variable, workers: int, draw: random.Random
) -> VariableStrategy | None:
    """One that fits with this synchroniser, by trying where it may live."""
    for _ in range(TRIES):
        owners = tuple(draw.sample(range(workers), draw.randint(0, workers)))
        if draw.random() < 0.5:
            owners = tuple(sorted(owners))
        partition = draw.choice(["whole", "cyclic", "block"])
        choice = VariableStrategy(name, partition=partition, owners=owners)  # type: ignore[arg-type]
        if not problems(choice, variable, workers):
            return choice
    return None


def _value(
    field: str, choice: VariableStrategy, variable: Variable, workers: int, draw: random.Random
) -> Any:
    if field == "axis":
        return draw.randrange(max(len(variable.shape), 1))
    if field == "shards":
        size = variable.shape[choice.axis] if variable.shape else 1
        count = max(len(choice.owners), 1)
        cuts = sorted(draw.randint(0, size) for _ in range(count - 1))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True))
    if field == "reduction":
        return draw.choice(["auto", "ring", "tree", "halving"])
    if field == "order":
        return tuple(draw.sample(range(workers), workers))
    if field == "memory":
        return draw.choice(["device", "host"])
    return draw.randint(0, 3)


def random_strategy(found: Sequence[Variable], workers: int, seed: int) -> Strategy:
    """A strategy that fits, drawn at random."""
    draw = random.Random(seed)
    chosen = {one.name: random_choice(one, workers, draw) for one in found}
    strategy = Strategy(fingerprint(found), workers, chosen, described(found))
    for finding in findings(strategy, found, workers, two_levels=False):
        # What travels together must be alike; every single decision fits.
        assert finding.field == "group", finding
        name = finding.variable
        chosen[name] = msgspec.structs.replace(chosen[name], group=0)
    return strategy


VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 10**9, 0.5, -0.5, 1e300),
    *("", "rows", "owner", "allreduce", "bags", "allgather", "factors", "factor_push", "none"),
    *("scatter", "broadcast", "gossip", "ring", "tree", "halving", "auto", "hosts", "flat"),
    *("whole", "cyclic", "block", "device", "host", "bf16", "one_bit", "top_k", "ring "),
    *([], [0], [1], [0, 1], [1, 0], [0, 0], [0, 2], [-1], ["0"], [0.5], [5, 6], [3, 4], [11]),
    *({}, {"ratio": 0.1}, {"a": "b"}),
)


def mutated(strategy: Strategy, draw: random.Random) -> tuple[str, str, str]:
    """A strategy's JSON with one thing changed at random; the variable and field that it was."""
    tree = msgspec.json.decode(msgspec.json.encode(strategy))
    names = list(tree["variables"])
    name = draw.choice(names)
    kind = draw.random()
    if kind < 0.03:
        del tree["variables"][name]
        return msgspec.json.encode(tree).decode(), name, "variables"
    if kind < 0.06:
        tree["variables"][f"{name}x"] = tree["variables"][name]
        return msgspec.json.encode(tree).decode(), f"{name}x", "variables"
    if kind < 0.12:
        field = draw.choice(["fingerprint", "replicas", "version", "odd", "variables"])
        tree[field] = draw.choice(VALUES)
        return msgspec.json.encode(tree).decode(), "", field
    field = draw.choice([*VariableStrategy.__struct_fields__, "colour"])
    readable = [value for value in VALUES if _is_readable(field, value)]
    wanted = readable if readable and draw.random() < 0.8 else VALUES
    tree["variables"][name][field] = draw.choice(wanted)
    return msgspec.json.encode(tree).decode(), name, field


def _is_readable(field: str, value: Any) -> bool:
    try:
        msgspec.convert({"synchronizer": "none", field: value}, VariableStrategy)
    except msgspec.ValidationError:
        return False
    return True


# -- Training -------------------------------------------------------------------------------------

_expected: dict[int, Any] = {}
_captured: dict[str, StepGraph] = {}
_measured: dict[tuple[str, int], Any] = {}


@contextmanager
def prepared() -> Iterator[None]:
    """Lets runners take what was captured and measured before."""

    def once(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def measure(world: World) -> Any:
            key = (name, world.size)
            if key not in _measured:
                _measured[key] = function(world)
            return _measured[key]

        return measure

    def again(step: Any, objects: Any, batch: Any, *rest: Any, **named: Any) -> StepGraph:
        key = str([tuple(item.shape) for item in batch])
        if key not in _captured:
            _captured[key] = capture(step, objects, batch, *rest, **named)
            assert not _captured[key].new_leaves
            assert not _captured[key].calls
        return _captured[key].copy()

    with ExitStack() as stack:
        for name in ("measure_network", "measure_speed"):
            measure = once(name, getattr(preparation, name))
            stack.enter_context(mock.patch.object(preparation, name, measure))
        stack.enter_context(mock.patch.object(captures, "capture", again))
        yield


def difference(world: World, strategy: Strategy, late: bool) -> float:
    """How far training by a strategy is from one device; with late updates or without."""
    data = batches(world.size)
    if world.size not in _expected:
        _expected[world.size] = equality.single_device(build(), data)
    case = build()
    config = Config(strategy=strategy, workers=1, seed=equality.SEED)
    runner = Runner(case.step, discover(case.step), config, world)
    state = equality.distributed(case, data, runner, late)
    return equality.difference(_expected[world.size], state)


def train(world: World, strategies: Mapping[int, bytes]) -> dict[int, float | str]:
    """By seed, how far training is from one device, or what was raised.

    Those with an odd seed leave updates to the next step where they can.
    """
    found: dict[int, float | str] = {}
    with prepared():
        for seed, text in strategies.items():
            try:
                found[seed] = difference(world, Strategy.from_json(text), bool(seed % 2))
            except StrategyError as error:
                found[seed] = str(error)
    return found
