"""How many workers this machine runs when it is the only one."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from parallax.cluster.addresses import is_this_machine
from parallax.cluster.host_report import DEVICES_HINT, cuda_devices, lacking_devices
from parallax.cluster.spec import ClusterSpec, Host
from parallax.errors import LaunchError

__all__ = ["local_host", "pin_devices", "workers_here"]


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


def pin_devices(
    host: Host, found: int | None = None, environ: MutableMapping[str, str] | None = None
) -> bool:
    """Lets the workers of this machine see the devices that the resource file gives them.

    On a machine without CUDA devices, where each device number stands for one worker on the CPU,
    nothing is done.

    Args:
        host: this machine in the resource file.
        found: number of its CUDA devices; looked up if None.
        environ: receives CUDA_VISIBLE_DEVICES; the variables of this process by default.

    Returns:
        Whether even a single worker has to be started anew to see what it should.

    Raises:
        LaunchError: the machine has CUDA devices, but not those.
    """
    variables = os.environ if environ is None else environ
    devices = cuda_devices() if found is None else found
    if devices == 0 or (host.devices is None and host.cpus is None):
        return False
    if host.cpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ""
        return True
    asked = host.devices or ()
    if (lacking := lacking_devices(asked, devices)) is not None:
        raise LaunchError(f"{host.address} {lacking}.", hint=DEVICES_HINT)
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, asked))
    return asked != (0,)
