"""Process groups that share Gloo's devices: one thread for the sockets of many groups.

Gloo's thread for a device's sockets wakes up a hundred times a second, whether anything arrives or
not, and ``torch.distributed`` makes a device for each group. A process that has a dozen groups, on
processors that it shares, would give them a few hundredths of its time for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed

from parallax.cluster.worker_start import keep_undestroyed
from parallax.runtime.comm.pending import TIMEOUT

dist: Any = torch.distributed

Kind = Literal["exchanges", "sums"]
"""What travels at once has threads of its own: exchanges of rows, and sums of gradients."""

THREADS = 2
"""Of a group, that start its collectives, as ``torch.distributed`` has them."""
_BACKEND = "parallax_gloo"

_devices: dict[Kind, list[Any]] = {}


def process_group(ranks: Sequence[int], kind: Kind, *, alone: bool = False) -> Any:
    """A process group of some workers, which is never taken down before the process ends.

    All workers of the default process group must call this, or with ``alone`` just these, at once.

    Args:
        ranks: of the default process group.
        kind: what it is for.
        alone: whether only these workers call.
    """
    options = {} if _gloo() is None else _shared(kind)
    handle = dist.new_group(
        list(ranks), timeout=TIMEOUT, use_local_synchronization=alone, **options
    )
    keep_undestroyed(handle)
    return handle


def _gloo() -> Any:
    """The default process group's Gloo, if that is all it consists of."""
    if dist.get_backend() != dist.Backend.GLOO:
        return None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL it is wrapped, so that its devices cannot be seen.
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def _shared(kind: Kind) -> dict[str, Any]:
    """What makes ``new_group`` use the devices of a kind."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._threads = THREADS
    options._devices = _devices_of(kind)
    if _BACKEND.upper() not in dist.Backend._plugins:
        devices = list(dist.Backend.backend_capability[dist.Backend.GLOO])
        dist.Backend.register_backend(_BACKEND, _make, extended_api=True, devices=devices)
    return {"backend": _BACKEND, "pg_options": options}


def _devices_of(kind: Kind) -> list[Any]:
    """Of this process: the default group's for exchanges, and as many for sums."""
    if kind not in _devices:
        gloo = _gloo()
        if kind == "sums":
            # Whichever torch.distributed itself chooses, by GLOO_SOCKET_IFNAME or the host's name.
            gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, TIMEOUT)
            keep_undestroyed(gloo)
        _devices[kind] = list(gloo.options._devices)
        keep_undestroyed(_devices[kind])
    return _devices[kind]


def _make(options: Any, gloo: Any) -> Any:
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, gloo)
