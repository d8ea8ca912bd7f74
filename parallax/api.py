"""What a user calls."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parallax.cluster.begin import begin
from parallax.cluster.environment import PLAN_VARIABLE, launch_seed, worker_environment
from parallax.cluster.worker_start import prepare_worker_process
from parallax.config import DEFAULT_WORKERS, Config
from parallax.data.identity import known_sizes
from parallax.errors import ConfigError
from parallax.graph.objects.discovery import discover
from parallax.logs import configure_logging
from parallax.runtime.comm.meeting import meet
from parallax.runtime.comm.world import World
from parallax.runtime.planning import PlanningRunner, current_planning
from parallax.runtime.runner import Runner
from parallax.runtime.start import agree_on, describe_code
from parallax.strategy.choose import title_of

logger = logging.getLogger("parallax")

Step = Callable[..., Any]


def get_runner(
    step: Step,
    *,
    resource_info: str | os.PathLike[str] | None = None,
    model: Any = None,
    optimizer: Any = None,
    config: Config | Mapping[str, Any] | None = None,
) -> Runner:
    """Distribute a training step that was written for one device.

    Called in ``python train.py`` it starts the workers (one per CUDA device, else
    ``config.workers`` on the CPU), each of which runs the same script from its beginning; it
    returns only in them. Under torchrun, or with RANK and WORLD_SIZE set, the script is a worker.
    Under ``parallax plan`` nothing is started, and the first step is planned instead of run.

    Args:
        step: computes the loss of a batch, calls ``backward()`` and steps its optimizers.
        resource_info: a file that lists machines and devices; None for this machine's.
        model, optimizer: what the step trains, for a step that hides it; else they are found in
            its closure, the globals it names and its bound ``self``. Several are fine, also as
            lists or dicts.
        config: settings of the run.

    Returns:
        This worker's runner.

    Raises:
        ConfigError: an argument or setting is wrong.
        LaunchError: workers cannot be started or cannot meet.
        ModelError: there is nothing to train, or something that cannot be distributed.
        DisagreementError: workers run different code or settings.
    """
    settings = Config.of(config)
    if resource_info is not None and not isinstance(resource_info, str | os.PathLike):
        raise ConfigError(
            f"resource_info names a file, found {type(resource_info).__name__}.",
            hint='write the machines into a file, one a line: resource_info="hosts.txt".',
        )
    configure_logging()
    environment = worker_environment()
    objects = discover(step, model, optimizer)
    if PLAN_VARIABLE in os.environ:
        return PlanningRunner(step, objects, settings, current_planning())
    if environment.world_size == 1 and not environment.launched and "RANK" not in os.environ:
        begin(
            resource_info,
            workers=settings.workers,
            redirect_path=settings.redirect_path,
            seed=_base_seed(settings),
        )
    else:
        prepare_worker_process(environment)
    world = meet(environment)
    if world.size > 1:
        hint = "start every worker with the same script, settings and versions."
        agree_on(world, "versions and settings", _describe(settings), hint)
        agree_on(world, "code", describe_code(step), hint)
    _tell_of_workers(settings.workers, world)
    if settings.seed is None and (seed := launch_seed()) is not None and world.size > 1:
        torch.manual_seed(seed)
    return Runner(step, objects, settings, world, known_sizes)


_first_workers: list[int] = []
"""What the script's first runner has asked for."""


def _tell_of_workers(asked: int, world: World) -> None:
    """Say that a later runner does not start workers."""
    if not _first_workers:
        _first_workers.append(asked)
    if world.rank == 0 and world.size > 1 and asked not in (_first_workers[0], DEFAULT_WORKERS):
        logger.warning(
            "workers=%d says nothing: the run has %d workers since its start, which all runners "
            "of the script share",
            asked,
            world.size,
        )


def _base_seed(settings: Config) -> int:
    """Of all workers' random numbers: torch's, which is the script's if that has set one."""
    return torch.initial_seed() & 0x7FFFFFFF if settings.seed is None else settings.seed


def parallel_run(
    step: Step,
    resource_info: str | os.PathLike[str] | None,
    sync: bool = True,
    parallax_config: Config | Mapping[str, Any] | None = None,
) -> tuple[Runner, int, int, int]:
    """:func:`get_runner` in the form of the Parallax user guide.

    Args:
        step: the training step.
        resource_info: a file that lists machines and devices; None for this machine's.
        sync: synchronous training, the only kind there is.
        parallax_config: settings of the run.

    Returns:
        The runner, ``num_workers``, ``worker_id`` and ``num_replicas_per_worker``.

    Raises:
        ConfigError: ``sync`` is False, or as :func:`get_runner`.
    """
    if not sync:
        raise ConfigError(
            "Asynchronous training (sync=False) is not offered: it gives other numbers than one "
            "device does.",
            hint="use sync=True.",
        )
    runner = get_runner(step, resource_info=resource_info, config=parallax_config)
    return runner, runner.num_workers, runner.worker_id, runner.num_replicas_per_worker


def _describe(settings: Config) -> list[str]:
    from parallax import __version__

    return [
        f"parallax {__version__}",
        f"torch {torch.__version__}",
        "run_option " + settings.run_option
        if settings.run_option
        else f"strategy {title_of(settings.source)}",
        f"average_dense={settings.average_dense} average_sparse={settings.average_sparse}",
        f"seed={settings.seed} search_partitions={settings.search_partitions}",
    ]
