"""Environment variables of a run on several hosts: which travel, and what each host adds.

A host has an environment of its own (paths of libraries, proxies), so the launcher's is not copied
as a whole: what travels is what a user sets for a program, by these beginnings of names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from parallax.cluster.wire import Order

__all__ = ["TRAVELLING", "travelling", "worker_variables"]

TRAVELLING = (
    "PARALLAX_",
    "PYTHON",
    "TORCH",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "CUBLAS_",
    "HF_",
    "WANDB_",
)
# Each host's own, or what makes a process a worker.
_STAY = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "CUDA_PATH",
    "TORCHELASTIC_",
    "PARALLAX_LAUNCHED",
    "PARALLAX_SEED",
    "PYTHONHOME",
    "PYTHONSTARTUP",
)
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def travelling(environ: Mapping[str, str], directory: str) -> dict[str, str]:
    """The launcher's variables that workers on all hosts get.

    Args:
        environ: the launcher's variables.
        directory: the working directory, from which relative entries of PYTHONPATH count.
    """
    found = {
        name: value
        for name, value in environ.items()
        if name.startswith(TRAVELLING) and not name.startswith(_STAY)
    }
    if found.get("PYTHONPATH"):
        entries = found["PYTHONPATH"].split(os.pathsep)
        found["PYTHONPATH"] = os.pathsep.join(os.path.join(directory, entry) for entry in entries)
    return found


def worker_variables(order: Order, interface: str | None) -> dict[str, str]:
    """All variables of the workers of this host.

    Args:
        order: what the launcher asked for.
        interface: the network interface that faces the chief.
    """
    variables = {**os.environ, **order.environment}
    if order.cpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    elif order.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order.devices))
    if interface is not None:
        # Else gloo takes the address that the host's name resolves to, on Debian 127.0.1.1.
        for name in _INTERFACES:
            variables.setdefault(name, interface)
    # Else every connection from an address without a name is worth a warning.
    variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return variables
