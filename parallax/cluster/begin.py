"""From a script that nobody launched to its workers: here, or on the hosts of a resource file."""

from __future__ import annotations

import os
import socket

from parallax.cluster.launch import launch_local_workers
from parallax.cluster.local_workers import local_host, workers_here
from parallax.cluster.resources import read_resources
from parallax.config import Config
from parallax.errors import LaunchError

__all__ = ["begin"]


def begin(resource_info: str | os.PathLike[str] | None, settings: Config) -> None:
    """Starts the workers, if there is to be more than one; then it does not return.

    Args:
        resource_info: the resource file, or None for this machine's devices.
        settings: of the run.

    Raises:
        ConfigError: the file is wrong.
        LaunchError: this machine is not among its hosts, or workers cannot be started.
    """
    host = None
    if resource_info is not None:
        spec = read_resources(resource_info)
        host = local_host(spec)
        if host is None or len(spec.hosts) > 1:
            other = next(h for h in spec.hosts if h is not host)
            raise LaunchError(
                f"{spec.source} names the machine {other.address!r}, which is not this one "
                f"({socket.gethostname()}).",
                hint="start the script on every machine with torchrun --nnodes N --nproc-per-node "
                "K, which parallax runs under; a resource file describes this machine only.",
            )
    workers = workers_here(host, settings.workers)
    if workers > 1:
        launch_local_workers(workers, redirect_path=settings.redirect_path, seed=settings.seed)
