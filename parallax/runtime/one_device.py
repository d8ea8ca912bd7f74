"""How far a step of all workers is from one device that has their batches as one.

parallax promises the numbers of one device, and a loss may couple the rows of a batch in ways that
it does not see. This runs one step both ways from the same state, and compares.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

from parallax.errors import BatchError, ConfigError
from parallax.graph.common.operations import is_random
from parallax.graph.objects.draws import drawn
from parallax.graph.step_graph import StepGraph
from parallax.graph.symbols.assertions import LeftOutError
from parallax.graph.symbols.guesses import WrongGuessError
from parallax.runtime.comm.world import World
from parallax.runtime.state.checkpoint import gather
from parallax.runtime.state.state_table import StateTable

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""What a step takes: by place and by name."""
Join = Callable[[list[Batch]], Batch]
_MOST_LINES = 12


class Difference(NamedTuple):
    """Of one piece of state.

    Args:
        name: of the leaf.
        kind: parameter, slot, buffer and so on.
        change: what the step changes it by on one device, as a norm.
        far: how far the workers' value is from that of one device, as a norm.
    """

    name: str
    kind: str
    change: float
    far: float

    @property
    def share(self) -> float:
        """``far`` as a share of ``change``."""
        if self.far == 0:
            return 0.0
        return self.far / self.change if self.change else math.inf


@dataclass(frozen=True)
class Comparison:
    """A step on all workers beside the same step on one device.

    Args:
        differences: of all state, those first that are farthest.
        result: what the step returned on this worker.
        draws: the step draws random numbers, which are others on one device.
    """

    differences: tuple[Difference, ...]
    result: Any
    draws: bool

    @property
    def worst(self) -> float:
        """The largest difference, as a share of what the step changes: about 1e-6 in float32 and
        1e-14 in float64 if all is the same. Buffers, which are each worker's own, do not count."""
        return max((one.share for one in self.differences if one.kind != "buffer"), default=0.0)

    def __str__(self) -> str:
        table = Table()
        table.add_column("state")
        table.add_column("kind")
        for title in ("change", "difference", "share"):
            table.add_column(title, justify="right")
        told = [one for one in self.differences if one.change or one.far]
        for one in told[:_MOST_LINES]:
            numbers = (f"{value:.1e}" for value in (one.change, one.far, one.share))
            table.add_row(one.name, one.kind, *numbers)
        lines = [f"largest difference: {self.worst:.1e} of what the step changes"]
        if len(told) > _MOST_LINES:
            lines.append(f"{len(told) - _MOST_LINES} more are closer")
        if self.draws:
            lines.append("the step draws random numbers, which are others on one device")
        text = io.StringIO()
        console = Console(file=text, width=100, highlight=False)
        console.print(lines[0], table, *lines[1:], sep="\n")
        return text.getvalue().rstrip()


def values_of(state: StateTable, world: World) -> dict[str, Any]:
    """All state by name; of what workers share, whole. All workers must ask together."""
    state.refresh()
    found: dict[str, Any] = {}
    for name, leaf in state.leaves.items():
        if name in state.shards:
            found[name] = gather(state, name, world)
        elif isinstance(leaf.value, torch.Tensor):
            found[name] = leaf.value.detach().clone()
        else:
            found[name] = leaf.value
    return found


def joined(world: World, batch: Batch, join: Join | None) -> Batch:
    """What one device would be given: the batches of all workers as one.

    Args:
        batch: this worker's.
        join: makes one of all batches, in the order of workers; None to put tensors one behind the
            other, and to add up numbers that are not the same.

    Raises:
        BatchError: they cannot be put together.
    """
    flat, spec = pytree.tree_flatten(batch)
    sent = [one.cpu() if isinstance(one, torch.Tensor) else one for one in flat]
    sent = [one if isinstance(one, torch.Tensor | int | float | str) else None for one in sent]
    received = _everyones(world, sent)
    batches: list[Batch] = []
    for other in received:
        pairs = zip(other, flat, strict=True)
        leaves = [_like(one, own) for one, own in pairs]
        batches.append(pytree.tree_unflatten(leaves, spec))
    if join is not None:
        return join(batches)
    columns = zip(*(pytree.tree_leaves(one) for one in batches), strict=True)
    whole = [_together(place, items) for place, items in enumerate(columns)]
    result: Batch = pytree.tree_unflatten(whole, spec)
    return result


def _everyones(world: World, flat: Sequence[Any]) -> list[list[Any]]:
    """Every worker's flat batch."""
    file = io.BytesIO()
    torch.save(list(flat), file)
    own = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(world.device)
    lengths = [int(text) for text in world.texts("compared-batches", str(len(own)))]
    found = []
    for worker, length in enumerate(lengths):
        buffer = own if worker == world.rank else own.new_empty(length)
        if world.size > 1:
            world.broadcast(buffer, worker, "compared batches")
        content = io.BytesIO(buffer.cpu().numpy().tobytes())
        found.append(torch.load(content, weights_only=True))
    if len({len(one) for one in found}) > 1:
        raise BatchError(
            "The workers' batches have several structures, so that one device cannot be given them "
            "as one.",
            hint="compare with batches that have equally many parts.",
        )
    return found


def _like(item: Any, own: Any) -> Any:
    """Another worker's item of a batch, where this worker has its own; what is not sent is taken to
    be the same."""
    if isinstance(item, torch.Tensor):
        return item.to(own.device) if isinstance(own, torch.Tensor) else item
    return own if item is None else item


def _together(place: int, items: Sequence[Any]) -> Any:
    first = items[0]
    if isinstance(first, torch.Tensor) and first.dim():
        shapes = [tuple(one.shape) for one in items]
        if len({(one.dtype, shape[1:]) for one, shape in zip(items, shapes, strict=True)}) > 1:
            raise BatchError(
                f"Part {place} of the workers' batches cannot be put together along its first "
                f"dimension: shapes {', '.join(map(str, shapes))}.",
                hint="compare with batches of one shape, or pass join=, a function that makes one "
                "batch (args, kwargs) of a list of them.",
            )
        return torch.cat([*items])
    if isinstance(first, torch.Tensor):
        alike = all(torch.equal(one, first) for one in items)
        return first if alike else torch.stack([*items]).sum().to(first.dtype)
    if all(one == first for one in items) or not isinstance(first, int | float):
        return first
    return sum(items)


def stepped(step: StepGraph, before: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
    """The state after a captured step on one device, by name.

    Args:
        step: captured for ``batch``; nothing outside of the graph is changed.
        before: the state.

    Raises:
        ConfigError: a branch of the step goes another way than it was captured.
    """
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in before.items()
    }
    flat = pytree.tree_leaves(batch)
    numbers, put_back = drawn(step.draws)
    values = dict(zip((draw.name for draw in step.draws), numbers, strict=True))
    read: dict[str, Callable[[Any], Any]] = {
        "state": lambda item: state[item.name],
        "number": lambda item: state[item.name],
        "outside": lambda item: step.outside[item.name](),
        "drawn": lambda item: values[item.name],
        "batch": lambda item: flat[item.index],
    }
    devices = {one.device for one in flat if isinstance(one, torch.Tensor) and one.is_cuda}
    try:
        with torch.no_grad(), torch.random.fork_rng(list(devices)):
            results = step.graph_module(*(read[item.kind](item) for item in step.inputs))
    except (LeftOutError, WrongGuessError) as error:
        raise ConfigError(
            "The step leaves its update out, or a branch goes another way, on one device.",
            hint="compare once more, with another batch.",
        ) from error
    finally:
        put_back()
    state.update(step.constants)
    for output, value in zip(step.outputs, results, strict=True):
        if output.kind == "state":
            state[output.name] = value
    return state


def compared(
    state: StateTable,
    step: StepGraph,
    before: Mapping[str, Any],
    one: Mapping[str, Any],
    many: Mapping[str, Any],
    result: Any,
) -> Comparison:
    """The same step both ways.

    Args:
        state: of the run.
        step: on one device.
        before: all state before the step.
        one, many: after it: on one device, and on all workers.
        result: what the step has returned.
    """
    found = [
        Difference(
            name,
            leaf.kind,
            _norm(one[name], before.get(name)),
            _norm(many[name], one[name]),
        )
        for name, leaf in state.leaves.items()
        if name in one and name in many
    ]
    found.sort(key=lambda difference: -difference.share)
    draws = bool(step.draws) or any(map(is_random, step.graph.nodes))
    return Comparison(tuple(found), result, draws)


def _norm(left: Any, right: Any) -> float:
    """How far two values are from each other; of what is not there, from nothing."""
    if not isinstance(left, torch.Tensor):
        return abs(float(left) - float(right or 0)) if isinstance(left, int | float) else 0.0
    dense = _as_numbers(left)
    if isinstance(right, torch.Tensor) and right.shape != left.shape:
        return math.inf
    other = _as_numbers(right) if isinstance(right, torch.Tensor) else torch.zeros_like(dense)
    return float(torch.linalg.vector_norm(dense - other))


def _as_numbers(value: torch.Tensor) -> torch.Tensor:
    dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)
