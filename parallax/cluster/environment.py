"""Which worker this process is: the environment variables of torchrun, read and checked.

A launcher (ours in ``launch.py``, torchrun, or a cluster's own script) tells each worker who it is
through environment variables. This module alone reads them, so that one set of rules and one text
answers every contradiction.

==========================  =====================================================================
variable                    meaning
==========================  =====================================================================
RANK, WORLD_SIZE            this worker's number and how many there are; both or neither
LOCAL_RANK                  this worker's number on its machine
LOCAL_WORLD_SIZE            how many workers its machine runs
MASTER_ADDR, MASTER_PORT    where worker 0 can be met; needed with more than one worker
TORCHELASTIC_RESTART_COUNT  how often the workers were started before (the generation), 0 if unset
PARALLAX_LAUNCHED           set by our launcher to its process id
PARALLAX_SEED               base of random numbers that our launcher gives to all workers
PARALLAX_PLAN               set by ``parallax plan``: this is worker 0 and meets no others
==========================  =====================================================================

LOCAL_RANK and LOCAL_WORLD_SIZE may be missing only when all workers are certainly on one machine:
WORLD_SIZE is 1, LOCAL_WORLD_SIZE equals WORLD_SIZE, or MASTER_ADDR is a loopback address. They are
then RANK and WORLD_SIZE. Anywhere else a guess would put two workers on one device.

Where a scheduler starts the workers, ``schedulers.py`` first puts its variables into these words.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from parallax.cluster.schedulers import scheduled
from parallax.errors import LaunchError

__all__ = [
    "LAUNCHED_VARIABLE",
    "LAUNCHER_VARIABLES",
    "PLAN_VARIABLE",
    "SEED_VARIABLE",
    "WorkerEnvironment",
    "launch_seed",
    "refuse_nested_launch",
    "worker_environment",
]

LAUNCHED_VARIABLE = "PARALLAX_LAUNCHED"
SEED_VARIABLE = "PARALLAX_SEED"
PLAN_VARIABLE = "PARALLAX_PLAN"

_HINT = (
    "start the script with `python train.py` and let parallax start the workers, or with torchrun,"
    " which sets all of them; unset what an earlier job left in the shell."
)
# A process in which none of these is set was started by nobody but the user.
LAUNCHER_VARIABLES = (LAUNCHED_VARIABLE, "RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class WorkerEnvironment:
    """Which worker this process is.

    Args:
        rank: this worker's number, from 0.
        world_size: number of workers on all machines.
        local_rank: this worker's number on its machine, from 0.
        local_world_size: number of workers on this machine.
        master_addr: where worker 0 can be met; None only if it was not given to a single worker.
        master_port: the port there; None likewise.
        generation: how often the workers were started before this time.
        launched: whether a launcher started this process (ours, torchrun or another that sets
            RANK); if False, the user did and the process may start workers.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str | None
    master_port: int | None
    generation: int
    launched: bool


def worker_environment(environ: Mapping[str, str] | None = None) -> WorkerEnvironment:
    """Reads and checks the variables that tell this process which worker it is.

    Args:
        environ: the variables; those of this process by default.

    Returns:
        Worker 0 of 1, not launched, when neither RANK nor WORLD_SIZE nor PARALLAX_LAUNCHED is set.

    Raises:
        LaunchError: the variables are incomplete, malformed or contradict each other. All problems
            are named at once.
    """
    given = os.environ if environ is None else environ
    variables = scheduled(given)
    if not any(name in variables for name in LAUNCHER_VARIABLES):
        return WorkerEnvironment(0, 1, 0, 1, None, None, 0, launched=False)
    reader = _Reader(variables)
    worker = reader.read()
    if reader.problems:
        lines = "".join(f"\n  - {problem}" for problem in reader.problems)
        if variables.get("RANK") != given.get("RANK"):
            lines += "\n  (RANK and WORLD_SIZE are what Slurm's or Kubernetes' variables say)"
        raise LaunchError(
            f"The environment does not say which worker this process is:{lines}", hint=_HINT
        )
    return worker


def launch_seed(environ: Mapping[str, str] | None = None) -> int | None:
    """The base of random numbers that our launcher gave to all workers, if it started this one.

    Args:
        environ: the variables; those of this process by default.

    Raises:
        LaunchError: PARALLAX_SEED is no integer from 0.
    """
    reader = _Reader(os.environ if environ is None else environ)
    seed = reader.integer(SEED_VARIABLE, 0)
    if reader.problems:
        raise LaunchError(f"{reader.problems[0]}.", hint=_HINT)
    return seed


def refuse_nested_launch(environ: Mapping[str, str] | None = None) -> None:
    """Checks that this process was not itself started by a launcher.

    Args:
        environ: the variables; those of this process by default.

    Raises:
        LaunchError: it was; every worker would start workers of its own.
    """
    variables = os.environ if environ is None else environ
    variables = scheduled(variables)
    found = [f"{name}={variables[name]}" for name in LAUNCHER_VARIABLES if name in variables]
    if not found:
        return
    launcher = "torchrun or another launcher"
    if LAUNCHED_VARIABLE in variables:
        launcher = "parallax"
    raise LaunchError(
        f"This process is already a worker that {launcher} started ({', '.join(found)}) and is"
        " asked to start workers of its own.",
        hint="start the script either with `python train.py` or with torchrun, not both; a program"
        " that a worker starts must be given an environment without these variables.",
    )


class _Reader:
    """Collects every problem while it reads, so that the user can repair them all at once."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables
        self.problems: list[str] = []

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """The variable's value, or None if it is unset or wrong."""
        text = self.variables.get(name)
        if text is None:
            return None
        # int() would take "1_0" and other scripts' digits, which no launcher writes.
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()):
            self.problems.append(f"{name} is {text!r}, which is no integer")
            return None
        value = int(text)
        if value < low or (high is not None and value > high):
            limits = f"from {low}" + ("" if high is None else f" to {high}")
            self.problems.append(f"{name} is {value}, which must be {limits}")
            return None
        return value

    def needed(self, name: str, low: int, reason: str) -> int | None:
        if name not in self.variables:
            self.problems.append(f"{name} is not set, {reason}")
            return None
        return self.integer(name, low)

    def below(self, name: str, value: int | None, limit_name: str, limit: int | None) -> None:
        if value is not None and limit is not None and value >= limit:
            self.problems.append(
                f"{name} is {value} but {limit_name} is {limit}: {name} must be less"
            )

    def read(self) -> WorkerEnvironment:
        """The worker; meaningless if there are problems afterwards."""
        given = [name for name in LAUNCHER_VARIABLES if name in self.variables]
        reason = "but " + " and ".join(f"{name}={self.variables[name]}" for name in given)
        rank = self.needed("RANK", 0, reason)
        world = self.needed("WORLD_SIZE", 1, reason)
        self.below("RANK", rank, "WORLD_SIZE", world)
        address = self.variables.get("MASTER_ADDR") or None
        port = self.integer("MASTER_PORT", 1, 65535)
        if world is not None and world > 1 and PLAN_VARIABLE not in self.variables:
            if address is None:
                self.problems.append(f"MASTER_ADDR is not set, but WORLD_SIZE={world}")
            if "MASTER_PORT" not in self.variables:
                self.problems.append(f"MASTER_PORT is not set, but WORLD_SIZE={world}")
        local_rank, local_world = self._local(rank, world, address)
        generation = self.integer("TORCHELASTIC_RESTART_COUNT", 0)
        return WorkerEnvironment(
            rank=rank or 0,
            world_size=world or 1,
            local_rank=local_rank or 0,
            local_world_size=local_world or 1,
            master_addr=address,
            master_port=port,
            generation=generation or 0,
            launched=True,
        )

    def _local(
        self, rank: int | None, world: int | None, address: str | None
    ) -> tuple[int | None, int | None]:
        local_rank = self.integer("LOCAL_RANK", 0)
        local_world = self.integer("LOCAL_WORLD_SIZE", 1)
        self.below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world)
        if world is None or rank is None:
            return local_rank, local_world
        if local_world is not None and local_world > world:
            self.problems.append(
                f"LOCAL_WORLD_SIZE is {local_world} but WORLD_SIZE is {world}: one machine cannot"
                " run more workers than there are"
            )
        if local_rank is not None and local_rank > rank:
            self.problems.append(
                f"LOCAL_RANK is {local_rank} but RANK is {rank}: workers are numbered machine by"
                " machine, so LOCAL_RANK cannot be greater"
            )
        one_machine = world == 1 or local_world == world or _is_loopback(address)
        missing = [
            name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in self.variables
        ]
        if missing and not one_machine:
            self.problems.append(
                f"{' and '.join(missing)} not set, but WORLD_SIZE={world} and"
                f" MASTER_ADDR={address} allow several machines"
            )
        if "LOCAL_RANK" in missing:
            local_rank = rank
        if "LOCAL_WORLD_SIZE" in missing:
            local_world = world
        return local_rank, local_world


def _is_loopback(address: str | None) -> bool:
    if address is None:
        return False
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
