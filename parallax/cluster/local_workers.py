"""How many workers this machine runs when it is the only one."""

from __future__ import annotations

from parallax.cluster.addresses import is_this_machine
from parallax.cluster.spec import ClusterSpec, Host
from parallax.errors import LaunchError

__all__ = ["local_host", "workers_here"]


def local_host(spec: ClusterSpec) -> Host | None:
    """The host of a resource file that is this machine, if one is.

    Raises:
        LaunchError: two are.
    """
    here = [host for host in spec.hosts if is_this_machine(host.address)]
    if len(here) > 1:
        raise LaunchError(
            f"{spec.source}:{here[1].line}: {here[1].address!r} and {here[0].address!r} (line "
            f"{here[0].line}) are both this machine.",
            hint="write all workers of a host on one line.",
        )
    return here[0] if here else None


def workers_here(host: Host | None, default: int) -> int:
    """Number of workers to start on this machine.

    Args:
        host: what the resource file says of it; None without a file.
        default: number without a file and without a CUDA device.
    """
    if host is not None and host.workers is not None:
        return host.workers
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else default
