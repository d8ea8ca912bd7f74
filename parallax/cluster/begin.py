"""From a script that nobody launched to its workers: here, or on the hosts of a resource file."""

from __future__ import annotations

import os
import socket

from parallax.cluster.cluster_launch import launch_cluster
from parallax.cluster.launch import launch_local_workers
from parallax.cluster.local_workers import local_host, pin_devices, workers_here
from parallax.cluster.resources import read_resources
from parallax.errors import LaunchError

__all__ = ["begin"]


def begin(
    resource_info: str | os.PathLike[str] | None,
    *,
    workers: int,
    redirect_path: str | None = None,
    seed: int | None = None,
) -> None:
    """Starts the workers, if there is to be more than one; then it does not return.

    Args:
        resource_info: the resource file, or None for this machine's devices.
        workers: on a host whose devices nothing says.
        redirect_path: directory that receives each worker's output as files.
        seed: base of all workers' random numbers.

    Raises:
        ConfigError: the file is wrong.
        LaunchError: this machine is not among its hosts, or workers cannot be started.
    """
    host = None
    if resource_info is not None:
        spec = read_resources(resource_info)
        host = local_host(spec)
        if len(spec.hosts) > 1:
            launch_cluster(
                spec,
                redirect_path=redirect_path,
                seed=seed,
                default_workers=workers,
            )
        if host is None:
            raise LaunchError(
                f"{spec.source} names the machine {spec.hosts[0].address!r}, which is not this "
                f"one ({socket.gethostname()}).",
                hint="start the script there, or add this machine to the file.",
            )
    workers = workers_here(host, workers)
    pinned = host is not None and pin_devices(host)
    if workers > 1 or pinned:
        launch_local_workers(workers, redirect_path=redirect_path, seed=seed)
