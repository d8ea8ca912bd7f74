"""Where the workers of one machine meet: a store that other machines cannot reach.

torchrun's own rendezvous opens its store on every network interface, also for workers of one
machine, and whoever can connect may read, change and delete all of it. A rendezvous of one agent
needs no agreement with others, so this one only opens the store, on the loopback address, for as
long as the agent lives. Workers find it through MASTER_ADDR and MASTER_PORT, and
``torch.distributed`` puts the generation before each key.
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

__all__ = ["BACKEND", "LocalRendezvous", "register"]

BACKEND = "parallax-local"
_ADDRESS = "127.0.0.1"


def register() -> None:
    """Makes the rendezvous known to torchrun's launcher under the name ``BACKEND``."""
    rendezvous_handler_registry.register(BACKEND, LocalRendezvous)


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of a single agent."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store: TCPStore | None = None
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        # Workers share the agent's store: its port is bound from the start, so that no other
        # program can take it before worker 0 would open one.
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = _open_store()
        address = RendezvousStoreInfo(_ADDRESS, self._store.port)
        return RendezvousInfo(self._store, 0, 1, address)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        self._store = None
        return True


def _open_store() -> TCPStore:
    listener = socket.create_server((_ADDRESS, 0), backlog=1024)
    port = listener.getsockname()[1]
    # The store takes over the socket, the only way to have it listen on one address.
    return TCPStore(
        _ADDRESS,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
