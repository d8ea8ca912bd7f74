"""The full single-device state of a run, gathered from and given back to its workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallax.errors import CheckpointError
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.state import Leaf
from parallax.runtime.comm.world import World
from parallax.runtime.encoded.pool import STATE as ENCODERS_STATE
from parallax.runtime.encoded.pool import EncodedBuckets
from parallax.runtime.encoded.pool import problems as encoder_problems
from parallax.runtime.state.advice import Fits, advice
from parallax.runtime.state.later import GivenLater, holds_tensors, needed_later, saved_later
from parallax.runtime.state.state_table import StateTable
from parallax.strategy.layout import RowLayout


def read_state(
    objects: StepObjects, state: StateTable, world: World, encoded: EncodedBuckets
) -> dict[str, Any]:
    """Everything by the name the step uses; sharded tensors are gathered by all workers."""
    state.refresh()
    result: dict[str, Any] = {}
    names = {
        id(leaf.value): leaf.name
        for leaf in state.leaves.values()
        if isinstance(leaf.value, torch.Tensor)
    }

    def whole(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        name = names.get(id(item))
        if name in state.shards:
            assert name is not None
            return gather(state, name, world)
        return item.detach().clone()

    for name, model in objects.models.items():
        result[name] = pytree.tree_map(whole, dict(model.state_dict(keep_vars=True)))
    for name, optimizer in objects.optimizers.items():
        result[name] = pytree.tree_map(whole, optimizer.state_dict())
    for leaf in _loose(state):
        if state.is_state(leaf) is not False and not state.is_later(leaf):
            result[leaf.name] = whole(leaf.value)
    for name, value in saved_later(state).items():
        result[name] = pytree.tree_map(whole, value)
    if kept := encoded.state():
        result[ENCODERS_STATE] = kept
    return result


def _loose(state: StateTable) -> list[Leaf]:
    """State outside of models and optimizers: moving averages, lone parameters."""
    models = set(state.objects.models)
    return [
        leaf
        for leaf in state.leaves.values()
        if leaf.kind == "tensor" or (leaf.kind == "parameter" and leaf.root not in models)
    ]


def _parameters(state: StateTable) -> list[Leaf]:
    return [leaf for leaf in state.leaves.values() if leaf.kind == "parameter"]


def gather(state: StateTable, name: str, world: World) -> torch.Tensor:
    """A sharded leaf as a whole, on every worker."""
    shard = state.shards[name]
    if shard.layout is not torch.strided:  # a slot by sparse gradients, such as a momentum
        return _gather(state.layouts[name], shard.to_dense(), world).to_sparse(1)
    return _gather(state.layouts[name], shard, world)


def _gather(layout: RowLayout, shard: torch.Tensor, world: World) -> torch.Tensor:
    shard = layout.rows_first(shard)
    if world.size == 1:
        return layout.assemble([shard])
    if layout.partition == "whole":
        (owner,) = layout.owners
        whole = (
            shard.clone(memory_format=torch.contiguous_format)
            if world.rank == owner
            else shard.new_empty((layout.rows, *shard.shape[1:]))
        )
        world.broadcast(whole, owner, "state")
        return whole
    counts = [layout.local_rows(worker) for worker in range(world.size)]
    most = max(counts)
    sent = shard.new_zeros((most, *shard.shape[1:]))
    sent[: len(shard)] = shard
    received = shard.new_empty((world.size * most, *shard.shape[1:]))
    world.all_gather(received, sent, "state").wait()
    parts = [part[:count] for part, count in zip(received.split(most), counts, strict=True)]
    return layout.assemble(parts)


def load_state(
    objects: StepObjects, state: StateTable, given: Mapping[str, Any], encoded: EncodedBuckets
) -> None:
    """Check everything, then take it; sharded tensors keep their rows only."""
    if not isinstance(given, Mapping):
        raise CheckpointError(
            f"A state is a dict of states, found {type(given).__name__}.",
            hint="load what was saved of runner.state_dict(): "
            'runner.load_state_dict(torch.load("checkpoint.pt")).',
        )
    state.refresh()
    problems: list[str] = []
    kept = given.get(ENCODERS_STATE, {})
    shapes = {leaf.name: tuple(leaf.value.shape) for leaf in _parameters(state)}
    problems += encoder_problems(kept, shapes)
    known = {leaf.name: leaf for leaf in _loose(state) if not state.is_later(leaf)}
    whole = {*objects.models, *objects.optimizers}
    needed = {name for name, leaf in known.items() if state.is_state(leaf)}
    others = {n: value for n, value in given.items() if n not in whole and n != ENCODERS_STATE}
    later = GivenLater(objects, others, set(known))
    taken = {name: value for name, value in given.items() if name in whole} | later.flat
    made = needed_later(state)
    missing = ((whole | needed) - taken.keys()) | (made - others.keys())
    problems += [f"missing {name!r}" for name in sorted(missing)]
    problems += [f"unexpected {name!r}" for name in sorted(later.unexpected, key=str)]
    loose = {
        name: leaf
        for name, leaf in known.items()
        if name in taken and state.is_state(leaf) is not False
    }
    for name, model in objects.models.items():
        if name in taken:
            own = model.state_dict(keep_vars=True)
            problems += _compare(f"{name}.", own, taken[name])
    for name, leaf in loose.items():
        problems += _compare_value(name, leaf.value, taken[name])
    for name, optimizer in objects.optimizers.items():
        if name in taken:
            problems += _compare_optimizer(name, optimizer, taken[name])
    if problems:
        parts = _parts(objects, [known[name] for name in sorted(needed | (known.keys() & given))])
        parts |= dict.fromkeys(made, holds_tensors)
        if ENCODERS_STATE in given:
            parts[ENCODERS_STATE] = lambda value: not encoder_problems(value, shapes)
        raise _refused(problems, advice(given, parts, objects.models))
    later.take()
    _take(objects, state, taken, loose)
    encoded.load(kept)


def _parts(objects: StepObjects, loose: Sequence[Leaf]) -> dict[str, Fits]:
    """By name of each part of a run's state, whether something can be it."""

    def compared(find: Callable[..., list[str]], *own: Any) -> Fits:
        return lambda value: not find(*own, value)

    parts = {
        name: compared(_compare, "", model.state_dict(keep_vars=True))
        for name, model in objects.models.items()
    }
    parts |= {n: compared(_compare_optimizer, n, one) for n, one in objects.optimizers.items()}
    return parts | {leaf.name: compared(_compare_value, leaf.name, leaf.value) for leaf in loose}


def _refused(problems: Sequence[str], advised: str) -> CheckpointError:
    more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
    usual = (
        "load the state of the same models and optimizers, under the same names; slots of "
        "variables that were frozen then are missing to a run that has trained them, and not "
        "to a new one"
    )
    return CheckpointError(
        f"The state does not fit this run: {'; '.join(problems[:10])}{more}.",
        hint=f"{advised or usual}; nothing was changed.",
    )


def _take(
    objects: StepObjects, state: StateTable, given: Mapping[str, Any], loose: Mapping[str, Leaf]
) -> None:
    by_id = {
        id(leaf.value): leaf
        for leaf in state.leaves.values()
        if isinstance(leaf.value, torch.Tensor)
    }
    for name, model in objects.models.items():
        for key, target in model.state_dict(keep_vars=True).items():
            if not isinstance(target, torch.Tensor):
                continue
            if (leaf := by_id.get(id(target))) is not None:
                state.fill(leaf, given[name][key])
            else:
                with torch.no_grad():
                    target.copy_(given[name][key])
    for name, leaf in loose.items():
        state.fill(leaf, given[name])
    for name, optimizer in objects.optimizers.items():
        _take_optimizer(state, optimizer, given[name])
    state.refresh()
    state.forget_removed()


def _take_optimizer(
    state: StateTable, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]
) -> None:
    """Let the optimizer take its state, then put the slots' values as they were saved.

    ``load_state_dict`` moves slots to the device of their parameter, which has no values where it
    is sharded, and to its dtype, which not all slots have. :meth:`StateTable.refresh` keeps this
    worker's rows of what is put here as a whole.
    """
    optimizer.load_state_dict(dict(given))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in given["param_groups"] for index in group["params"]]
    devices = {
        id(leaf.value): state.device_of(leaf)
        for leaf in state.leaves.values()
        if leaf.kind == "parameter"
    }
    for parameter, index in zip(parameters, indices, strict=True):
        device = devices[id(parameter)]
        slots = optimizer.state.get(parameter, {})
        for key, held in slots.items():
            whole = given["state"][index][key]
            slots[key] = pytree.tree_map(partial(_as_saved, device), held, whole)


def _as_saved(sharded: torch.device, held: Any, whole: Any) -> Any:
    if not isinstance(held, torch.Tensor):
        return held
    device = sharded if held.device.type == "meta" else held.device
    return whole.detach().to(device, copy=True)


def _compare_value(name: str, own: Any, given: Any) -> list[str]:
    return _compare("", {name: own}, {name: given})


def _compare(prefix: str, own: Mapping[str, Any], given: Any) -> list[str]:
    if not isinstance(given, Mapping):
        return [f"{prefix or 'a tensor'} is a {type(given).__name__}, not a state dict"]
    problems = [f"missing '{prefix}{key}'" for key in own if key not in given]
    problems += [f"unexpected '{prefix}{key}'" for key in given if key not in own]
    for key, target in own.items():
        if not isinstance(target, torch.Tensor) or key not in given:
            continue
        value = given[key]
        if not isinstance(value, torch.Tensor):
            problems.append(f"'{prefix}{key}' is a {type(value).__name__}, not a tensor")
        elif value.shape != target.shape:
            problems.append(
                f"'{prefix}{key}' has shape {tuple(value.shape)}, expected {tuple(target.shape)}"
            )
        elif value.dtype is not target.dtype:
            problems.append(f"'{prefix}{key}' is {value.dtype}, expected {target.dtype}")
    return problems


def _compare_optimizer(name: str, optimizer: torch.optim.Optimizer, given: Any) -> list[str]:
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        return [f"{name!r} is no optimizer state"]
    own = optimizer.state_dict()
    problems = []
    sizes: Callable[[Any], list[int]] = lambda s: [len(g["params"]) for g in s["param_groups"]]  # noqa: E731
    if sizes(own) != sizes(given):
        problems.append(
            f"{name!r} has parameter groups of {sizes(given)} parameters, expected {sizes(own)}"
        )
    settings = {key for group in own["param_groups"] for key in group}
    found = {key for group in given["param_groups"] for key in group}
    if settings - found:
        missing = ", ".join(sorted(settings - found))
        problems.append(f"{name!r} is the state of another kind of optimizer (it lacks {missing})")
    for index, slots in own["state"].items():
        other = given["state"].get(index)
        if other is None:
            if slots and given["state"]:  # else it is of an optimizer that has not stepped yet
                problems.append(f"missing '{name}.{index}'")
            continue
        for key, slot in slots.items():
            if isinstance(slot, torch.Tensor) and key in other:
                problems += _compare(f"{name}.{index}.", {key: slot}, {key: other[key]})
            elif key not in other:
                problems.append(f"missing '{name}.{index}.{key}'")
    return problems
