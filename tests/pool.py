"""Several real workers for tests: processes that stay alive and run one function after another.

Starting a process that imports torch takes seconds, so one pool of four serves the whole session;
worlds of two or three workers are groups within it.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from equality import moved
from on_device import CPU, live_on

from parallax.runtime.comm.meeting import on_hosts, world_of
from parallax.runtime.comm.world import GROUPS, World
from parallax.runtime.encoded.bucket import LATER
from parallax.runtime.exchange.checks import GROUP as CHECKS
from parallax.runtime.exchange.statistics import GROUP as STATISTICS
from parallax.runtime.exchange.totals import GROUP as TOTALS
from parallax.runtime.exchange.whole_batch import GROUP as WHOLE

SIZE = 4
HOSTS = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1))
"""By worker its host, for worlds that take the four workers to be on several."""
DEADLINE = 240.0


class WorkerFailure(Exception):
    """Some workers raised; ``errors`` has (class name, text, traceback) by worker."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"worker {w}: {e[2]}" for w, e in sorted(errors.items())))


def _serve(
    rank: int,
    size: int,
    layouts: tuple[tuple[int, ...], ...],
    port: int,
    pipe: Connection,
    device: torch.device,
    by_default: bool,
) -> None:
    torch.set_num_threads(1)
    os.environ["PARALLAX_LOG_LEVEL"] = "ERROR"
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    # Groups that a run would open when it needs them: here not all workers are in all worlds.
    groups = (*GROUPS, LATER, TOTALS, STATISTICS, CHECKS, WHOLE)
    worlds: dict[Any, World] = {}
    for n in range(1, size + 1):
        world = world_of(list(range(n)), device, groups=groups)
        # Two are on a host each and send everything; more are on one and share memory for sums.
        worlds[n] = on_hosts(world, range(world.size) if n == 2 else [0] * world.size)
    for hosts in layouts:
        worlds[hosts] = on_hosts(world_of(list(range(size)), device, groups=groups), hosts)
    if by_default:
        live_on(device)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            os._exit(0)
        wanted, module, name, args = order
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send(("ok", function(worlds[wanted], *moved(args, device))))
        except BaseException as error:
            text = traceback.format_exc()
            pipe.send(("error", (type(error).__name__, str(error), text)))


class Pool:
    """Worker processes; a failed run replaces them, since a collective may hang.

    Args:
        size: how many there are.
        layouts: by worker its host, each for a world of all of them.
        device: what all of them compute on; they talk through Gloo, which lets workers share one.
        by_default: what they make without saying where is there, too.
    """

    def __init__(
        self,
        size: int = SIZE,
        layouts: tuple[tuple[int, ...], ...] = HOSTS,
        device: torch.device = CPU,
        by_default: bool = False,
    ) -> None:
        self._size, self._layouts, self._device = size, layouts, device
        self._by_default = by_default
        self._start()

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(self._size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    rank,
                    self._size,
                    self._layouts,
                    self._store.port,
                    there,
                    self._device,
                    self._by_default,
                ),
                daemon=True,
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(
        self, size: int | tuple[int, ...], function: Callable[..., Any], *args: Any
    ) -> list[Any]:
        """Call ``function(world, *args)`` on ``size`` workers; their results in worker order.

        Instead of a number, ``size`` may be one of the layouts.

        Raises:
            WorkerFailure: any of them raised.
        """
        number = size if isinstance(size, int) else len(size)
        for pipe in self._pipes[:number]:
            pipe.send((size, function.__module__, function.__name__, args))
        results: dict[int, Any] = {}
        errors: dict[int, tuple[str, str, str]] = {}
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes[:number])}
        limit = DEADLINE
        while open_pipes:
            ready = wait(list(open_pipes), timeout=limit)
            if not ready:
                break
            for pipe in ready:
                rank = open_pipes.pop(pipe)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    kind, value = "error", ("EOFError", "the process ended", "ended")
                (results if kind == "ok" else errors)[rank] = value
            if errors:
                limit = 20.0
        if errors or open_pipes:
            missing = dict.fromkeys(open_pipes.values(), ("Hang", "no answer", "no answer"))
            if open_pipes:
                self.close()
                self._start()
            raise WorkerFailure({**missing, **errors})
        return [results[rank] for rank in range(number)]

    def close(self) -> None:
        """Stop all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
