"""How workers come together: from the environment of each process to the world of all.

The only other module that knows ``torch.distributed``: it makes the groups through which
:mod:`parallax.runtime.comm.world` talks.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from parallax.cluster.environment import WorkerEnvironment
from parallax.errors import LaunchError
from parallax.runtime.comm.host_exchange import HostExchange
from parallax.runtime.comm.host_links import connect_host
from parallax.runtime.comm.host_sums import HostSums
from parallax.runtime.comm.pending import TIMEOUT
from parallax.runtime.comm.process_groups import Kind, process_group
from parallax.runtime.comm.world import GROUPS, Group, World, single


def meet(environment: WorkerEnvironment) -> World:
    """The world of this process, which computes on a CUDA device where each worker has one.

    Raises:
        LaunchError: the workers could not meet.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available() and environment.local_world_size <= torch.cuda.device_count():
        device = torch.device("cuda", environment.local_rank)
        torch.cuda.set_device(device)
    if environment.world_size == 1:
        return single(device)
    return connect(environment.rank, environment.world_size, device, environment.generation)


def connect(rank: int, size: int, device: torch.device, generation: int = 0) -> World:
    """Meet the other workers.

    Uses the default process group when the script has made one, else makes it from the
    environment (MASTER_ADDR and MASTER_PORT). Rows and dense gradients travel in groups of their
    own, so that they overlap; keys carry the generation, so that a restart meets no old ones.

    Raises:
        LaunchError: the workers could not meet.
    """
    if size == 1:
        return single(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        if not dist.is_initialized():
            dist.init_process_group(backend, rank=rank, world_size=size, timeout=TIMEOUT)
    except (RuntimeError, ValueError, dist.DistError) as error:
        raise LaunchError(
            f"Worker {rank} of {size} could not meet the others: {str(error).splitlines()[0]}",
            hint="see that MASTER_ADDR and MASTER_PORT are reachable and that all workers were "
            "started with the same WORLD_SIZE.",
        ) from error
    if dist.get_world_size() != size or dist.get_rank() != rank:
        raise LaunchError(
            f"torch.distributed was initialised as worker {dist.get_rank()} of "
            f"{dist.get_world_size()}, the environment says {rank} of {size}.",
            hint="let parallax initialise it, or initialise it from the environment.",
        )
    world = world_of(list(range(size)), device, generation)
    names = world.texts("host", _host_name())
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return on_hosts(world, [numbers[name] for name in names])


def _host_name() -> str:
    """The same text in all processes of a host: of its kernel and of its network."""
    parts = [socket.gethostname()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        with contextlib.suppress(OSError):
            parts.append(
                os.readlink(source) if "/ns/" in source else Path(source).read_text().strip()
            )
    return "\n".join(parts)


def world_of(
    ranks: list[int],
    device: torch.device,
    generation: int = 0,
    *,
    alone: bool = False,
    groups: Sequence[str] = GROUPS,
) -> World:
    """The world of some workers of the default process group.

    All workers of the default group must call this, or with ``alone`` just these, at once.
    """
    rank, size = dist.get_rank(), len(ranks)
    handles = {name: process_group(ranks, _kind(name), alone=alone) for name in groups}
    if size == 1 or rank not in ranks:
        return single(device)
    name = "-".join(map(str, ranks))
    base = dist.distributed_c10d._get_default_store()
    prefix = f"parallax/{generation}/{_instance(name)}/{name}"
    store = dist.distributed_c10d.PrefixStore(prefix, base)
    place = ranks.index(rank)
    made = {name: Group(handle, tuple(range(size)), place) for name, handle in handles.items()}
    return World(place, size, device, store, made)


def on_hosts(world: World, hosts: Sequence[int]) -> World:
    """The same world when it is known which host each worker is on; all workers must call this.

    With hosts of equally many workers, more than one each, those of a host have links, if they can;
    and with several such hosts there are groups for the workers of this host and for those with
    the same place on every host.
    """
    world.hosts = tuple(hosts)
    members = world.members
    sizes = {len(ranks) for ranks in members}
    if sizes == {1} or len(sizes) > 1:
        return world
    if world.device.type == "cpu":
        own = members[world.hosts[world.rank]]
        links = connect_host(world.texts, own, world.rank, TIMEOUT.total_seconds())
        if links is not None:
            cross = partial(world.all_reduce, group="rail sums")
            world.host_sums = HostSums(links, world.traffic, cross)
            world.host_exchange = HostExchange(world, links)
    if len(members) == 1:
        return world
    among = dist.get_process_group_ranks(world.group("rows").handle)
    wanted = {
        "host": members,
        "rail": [list(ranks) for ranks in zip(*members, strict=True)],
    }
    for name, parts in wanted.items():
        for kind in ("rows", "dense", "sums"):
            if kind == "sums" and (name == "host" or world.host_sums is None):
                continue  # what is summed in memory crosses from a thread, in its own order
            for ranks in parts:
                handle = process_group([among[rank] for rank in ranks], _kind(kind))
                if world.rank in ranks:
                    key = name if kind == "rows" else f"{name} {kind}"
                    place = ranks.index(world.rank)
                    world._groups[key] = Group(handle, tuple(ranks), place)
    return world


def _kind(name: str) -> Kind:
    return "exchanges" if name == "rows" else "sums"


_instances: Counter[str] = Counter()


def _instance(name: str) -> int:
    """How many worlds of the same workers this process made before: keys are never reused."""
    _instances[name] += 1
    return _instances[name]
