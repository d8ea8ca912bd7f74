"""What workers settle before the first step: that they run the same thing, from the same values.

Differences are found here and named, not later by a hang or a wrong sum.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import pickle
import random
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from parallax.config import Config
from parallax.errors import BatchError, DisagreementError
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.draws import Streams
from parallax.graph.objects.state import Leaf
from parallax.runtime.comm.world import World
from parallax.runtime.state.deferral import common_seeds

logger = logging.getLogger("parallax")

_CHUNK = 1 << 22


def seed_worker(world: World, base: int | None) -> None:
    """Give every worker random numbers of its own, all from one seed.

    Args:
        base: the seed; None for the one that torch of worker 0 began with.
    """
    if world.size > 1:
        own = base if base is not None else torch.initial_seed() & 0x7FFFFFFFFFFFFFFF
        base = int(world.texts("seed", str(own))[0])
    if base is not None:
        torch.manual_seed((base + world.rank) & 0x7FFFFFFFFFFFFFFF)
        random.seed(base + world.rank)


def agree_on_everything(
    world: World,
    leaves: Mapping[str, Leaf],
    config: Config,
    data_sizes: Sequence[str],
    description: str,
) -> None:
    """Compare models, settings, data and batches of all workers, and take worker 0's values.

    Args:
        leaves: all but tensors of the user's objects, of which the step may use none.
        data_sizes: lines about the sharded data.
        description: structure of the batch.

    Raises:
        DisagreementError, BatchError: on every worker; the first that differs, and how.
    """
    agree_on(
        world,
        "models",
        describe_state(leaves),
        "build the same model and optimizer with the same settings on every worker; load a state "
        "on all of them, or on none.",
    )
    agree_on(
        world,
        "settings",
        describe_settings(config),
        "start every worker with the same Config.",
    )
    agree_on(
        world,
        "data sizes",
        data_sizes,
        "give every worker the same dataset; parallax.shard() splits it.",
    )
    agree_on_batch(world, description)
    differing = take_values_of_chief(world, leaves)
    if differing:
        shown = some_of(differing)
        logger.info("first values differed between workers; all took worker 0's: %s", shown)


def agree_on_tensors(world: World, leaves: Mapping[str, Leaf]) -> None:
    """The same for tensors of the user's objects that the captured step uses.

    Raises:
        DisagreementError: on every worker; the first that differs, and how.
    """
    agree_on(
        world,
        "tensors that the step uses",
        describe_state(leaves),
        "make them alike on every worker, and pass what is each worker's own with the batch.",
    )
    differing = take_values_of_chief(world, leaves)
    if differing:
        logger.warning(
            "tensors that the step uses differed between workers; all took worker 0's: %s; pass "
            "what is each worker's own (data) with the batch",
            some_of(differing),
        )


def some_of(names: Sequence[str]) -> str:
    """The first of several names, for messages."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def agree_on(world: World, topic: str, lines: Sequence[str], hint: str) -> None:
    """Compare lines of text between all workers.

    Raises:
        DisagreementError: on every worker; names the first that differs from worker 0, and how.
    """
    found = _difference(world, topic, lines)
    if found is not None:
        worker, own, chief = found
        world.settle()
        raise DisagreementError(
            f"Workers differ in {topic}: worker {worker} has {own}, worker 0 has {chief}.",
            hint=hint,
        )


def agree_on_batch(world: World, description: str) -> None:
    """Compare the structure of the first batch.

    Raises:
        BatchError: on every worker; names the first that differs from worker 0, and how.
    """
    found = _difference(world, "the structure of the batch", [description])
    if found is not None:
        worker, own, chief = found
        world.settle()
        raise BatchError(
            f"Batches differ in structure between workers: worker {worker} passes {own}, worker 0 "
            f"passes {chief}.",
            hint="give every worker's runner.run() the same nesting, dtypes and ranks; where they "
            "have lists of several lengths (of micro-batches), pass them as one tensor, and split "
            "that in the step.",
        )


def _difference(world: World, topic: str, lines: Sequence[str]) -> tuple[int, str, str] | None:
    texts = world.texts(topic.replace(" ", "-"), "\n".join(lines))
    chief = texts[0].split("\n")
    for worker, text in enumerate(texts):
        own = text.split("\n")
        for index in range(max(len(own), len(chief))):
            left = own[index] if index < len(own) else "nothing"
            right = chief[index] if index < len(chief) else "nothing"
            if left != right:
                return worker, left, right
    return None


def describe_code(step: Callable[..., Any]) -> list[str]:
    """The user's script and the file that defines the step, with hashes of their text."""
    files = {getattr(sys.modules.get("__main__"), "__file__", None)}
    code = getattr(getattr(step, "__func__", step), "__code__", None)
    files.add(getattr(code, "co_filename", None))
    lines = []
    for file in sorted(str(f) for f in files if f):
        path = Path(file)
        if path.is_file():
            text = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            lines.append(f"file {path.name} with hash {text}")
    return lines


def describe_settings(config: Config) -> list[str]:
    """A line for each setting that workers must have alike; what makes strategies by its kind."""
    strategy = config.strategy
    if not (strategy is None or isinstance(strategy, str | Path)):
        strategy = type(strategy).__name__
    averages = ("average_dense", "average_sparse", "sync_batch_norm")
    names = (*averages, "search_partitions", "compile")
    lines = [f"{name}={getattr(config, name)!r}" for name in names]
    return [f"run_option={config.run_option!r}", f"strategy={str(strategy)!r}", *lines]


def describe_state(leaves: Mapping[str, Leaf]) -> list[str]:
    """Every piece of state with its shape and dtype."""
    lines = []
    for leaf in leaves.values():
        value = leaf.value
        if isinstance(value, torch.Tensor):
            kind = "frozen " if leaf.kind == "parameter" and not value.requires_grad else ""
            shape = tuple(value.shape)
            dtype = str(value.dtype).removeprefix("torch.")
            lines.append(f"{kind}{leaf.kind} {leaf.name} of shape {shape} and {dtype}")
        elif leaf.kind == "group":
            lines.append(f"{leaf.name} = {value}")
    return lines


def take_values_of_chief(world: World, leaves: Mapping[str, Leaf]) -> list[str]:
    """Let every worker start from worker 0's values; only what differs is sent.

    Returns:
        Names of the leaves that differed on some worker.
    """
    tensors = {n: x.value for n, x in leaves.items() if isinstance(x.value, torch.Tensor)}
    deferred = [value for value in tensors.values() if value.device.type == "meta"]
    seeds = world.texts("seeds", " ".join(map(str, common_seeds(deferred))))[0]
    common_seeds(deferred, [int(word) for word in seeds.split()])
    real = {n: value for n, value in tensors.items() if value.device.type != "meta"}
    texts = world.texts("values", " ".join(str(_checksum(value)) for value in real.values()))
    columns = [text.split() for text in texts]
    differing = []
    for index, (name, value) in enumerate(real.items()):
        if len({column[index] for column in columns}) > 1:
            differing.append(name)
            _broadcast(world, value)
    return differing


def draw_alike(world: World, streams: Streams, objects: StepObjects) -> None:
    """Let steps of all workers draw the same numbers of Python's and NumPy's generators: those that
    worker 0 would have drawn."""
    text = base64.b64encode(pickle.dumps(streams.states(objects))).decode()
    streams.share(objects, pickle.loads(base64.b64decode(world.texts("generators", text)[0])))


def _checksum(value: torch.Tensor) -> int:
    result = 0
    for stored in _stored(value):
        for part in stored.reshape(-1).split(_CHUNK):
            data = part.cpu().contiguous().view(torch.uint8).numpy()
            result = zlib.crc32(data, result)
    return result


def _stored(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that say all of a tensor: itself, or where the values of a sparse one are,
    and these."""
    value = value.detach()
    if value.layout is torch.strided:
        return (value,)
    value = value.coalesce()
    return value.indices(), value.values()


def _broadcast(world: World, value: torch.Tensor) -> None:
    """Worker 0's value, in chunks of our own dense buffers."""
    whole = value.detach()
    if whole.layout is not torch.strided:
        _broadcast_sparse(world, whole)
        return
    if whole.dim() == 0:
        whole = whole.view(1)
    rows = max(1, _CHUNK // max(whole[0].numel(), 1)) if len(whole) else 1
    for first in range(0, len(whole), rows):
        part = whole[first : first + rows].clone(memory_format=torch.contiguous_format)
        world.broadcast(part, 0, "first values")
        whole[first : first + rows] = part


def _broadcast_sparse(world: World, value: torch.Tensor) -> None:
    indices, values = _stored(value)
    count = int(world.texts("stored values", str(len(values)))[0])
    if world.rank != 0:
        indices = indices.new_empty((len(indices), count))
        values = values.new_empty((count, *values.shape[1:]))
    _broadcast(world, indices)
    _broadcast(world, values)
    with torch.no_grad():
        value.copy_(torch.sparse_coo_tensor(indices, values, value.shape, is_coalesced=True))
