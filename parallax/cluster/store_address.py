"""At which address of the chief's host the other hosts find it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence

from parallax.cluster.addresses import (
    is_loopback,
    is_this_machine,
    own_address_towards,
    resolve,
)
from parallax.cluster.spec import Host
from parallax.errors import LaunchError

__all__ = ["store_address"]

_SECONDS = 10


def store_address(chief: Host, others: Sequence[Host], peers: Sequence[str]) -> str:
    """The address for the store.

    Args:
        chief: this machine, as the resource file names it. If that is an address other machines
            can use, it is what the user wants.
        others: the other hosts; else the route to the first that has one decides.
        peers: this machine's address as the other hosts' sshd see it, for hosts whose names only
            ssh's configuration knows.

    Raises:
        LaunchError: there is none.
    """
    with contextlib.suppress(OSError):
        for address in resolve(chief.address):
            if not is_loopback(address) and is_this_machine(address):
                return address
    if not others:
        return "127.0.0.1"
    for host in others:
        for name in (host.address, _configured_name(host)):
            with contextlib.suppress(OSError):
                for address in resolve(name):
                    with contextlib.suppress(OSError):
                        own = own_address_towards(address)
                        if not is_loopback(own):
                            return own
    for peer in peers:
        if peer and not is_loopback(peer) and is_this_machine(peer):
            return peer
    raise LaunchError(
        "This machine has no address that the other hosts could use to reach worker 0.",
        hint="name it in the resource file by the address of the network that joins the hosts.",
    )


def _configured_name(host: Host) -> str:
    """The name that ssh's configuration gives to a host."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["ssh", "-G", "--", host.address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
        for line in done.stdout.splitlines():
            if line.startswith("hostname "):
                return line.split(maxsplit=1)[1]
    return host.address
