"""Where the workers of a run meet: a store on one address, between hosts that are known before.

torchrun's own rendezvous opens its store on every network interface, and whoever can connect may
read, change and delete all of it. Here the launcher has said who takes part, so nothing is to be
agreed: the first host opens the store on one address (the loopback address if it is the only host)
for as long as its agent lives, and the others connect. Workers find it through MASTER_ADDR and
MASTER_PORT. ``torch.distributed`` puts the generation before each key of theirs, and the agents'
own keys carry the run.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

__all__ = ["BACKEND", "StaticRendezvous", "register"]

BACKEND = "parallax-static"
_ADDRESS = "127.0.0.1"
_CONNECT_TIMEOUT = timedelta(minutes=5)
# What one host opened lives as long as its process: hosts that still run need it to the end.
_kept: list[Any] = []


def register() -> None:
    """Makes the rendezvous known to torchrun's launcher under the name ``BACKEND``."""
    with contextlib.suppress(ValueError):
        rendezvous_handler_registry.register(BACKEND, StaticRendezvous)


class StaticRendezvous(RendezvousHandler):
    """The rendezvous of hosts that are known.

    Args:
        parameters: its ``config`` may have ``node`` and ``nodes``, ``address`` and ``port`` of the
            store, and ``listener``, the descriptor of a socket that listens there already.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._node = int(parameters.config.get("node", 0))
        self._nodes = int(parameters.config.get("nodes", 1))
        self._address = str(parameters.config.get("address", _ADDRESS))
        self._port = int(parameters.config.get("port", 0))
        self._listener = parameters.config.get("listener")
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
            self._store = self._open() if self._node == 0 else self._connect()
            _kept.append(self._store)
        store = PrefixStore(f"parallax/{self._run_id}", self._store)
        address = RendezvousStoreInfo(self._address, self._store.port)
        return RendezvousInfo(store, self._node, self._nodes, address)

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
        return True

    def _open(self) -> TCPStore:
        if self._listener is None:
            listener = socket.create_server((self._address, self._port), backlog=1024)
        else:
            listener = socket.socket(fileno=int(self._listener))
        port = listener.getsockname()[1]
        # The store takes over the socket, the only way to have it listen on one address.
        return TCPStore(
            self._address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def _connect(self) -> TCPStore:
        try:
            return TCPStore(
                self._address,
                self._port,
                is_master=False,
                wait_for_workers=False,
                timeout=_CONNECT_TIMEOUT,
            )
        except RuntimeError as error:
            raise RendezvousConnectionError(
                f"the store at {self._address} port {self._port} does not answer: {error}"
            ) from error
