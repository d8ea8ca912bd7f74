"""Addresses and network interfaces of this machine, asked of the kernel.

A route is found by connecting a datagram socket, which sends nothing: its own address is then the
one that packets to the other end would carry.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from pathlib import Path

__all__ = [
    "interface_between_hosts",
    "interface_of",
    "interface_towards",
    "interfaces",
    "is_loopback",
    "is_this_machine",
    "own_address_towards",
    "resolve",
]

_SIOCGIFADDR = 0x8915
_PORT_UNUSED = 9


def resolve(name: str) -> list[str]:
    """The IP addresses of a host name or address, without repetition.

    Raises:
        OSError: the name does not resolve.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(_with_scope(info[4]) for info in found))


def _with_scope(address: tuple[object, ...]) -> str:
    text = str(address[0])
    if len(address) == 4 and address[3] and "%" not in text:
        with contextlib.suppress(OSError):
            return f"{text}%{socket.if_indextoname(int(str(address[3])))}"
    return text


def is_loopback(address: str) -> bool:
    """Whether an address, or the name ``localhost``, is that of the loopback interface."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_this_machine(address: str) -> bool:
    """Whether a host name or address is one of this machine's."""
    if is_loopback(address) or address.lower() in _own_names():
        return True
    try:
        # A name that resolves to a loopback address only says what some hosts file says: that of
        # Debian has such a line for the own name, which was looked at above.
        found = [one for one in resolve(address) if not is_loopback(one)]
    except OSError:
        return False
    return any(_is_bindable(one) for one in found)


def _own_names() -> set[str]:
    return {socket.gethostname().lower(), socket.getfqdn().lower()} - {""}


def _is_bindable(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(socket.getaddrinfo(address, 0, family, socket.SOCK_DGRAM)[0][4])
        except OSError:
            return False
    return True


def own_address_towards(address: str) -> str:
    """The address of this machine from which packets to an address are sent.

    Args:
        address: an IP address; one of this machine's own gives itself.

    Raises:
        OSError: there is no route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    target = socket.getaddrinfo(address, _PORT_UNUSED, family, socket.SOCK_DGRAM)[0][4]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return _with_scope(probe.getsockname())


def interfaces() -> dict[str, list[str]]:
    """The network interfaces of this machine with their addresses."""
    found: dict[str, list[str]] = {}
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return {}
    for name in names:
        found[name] = [address] if (address := _ipv4(name)) is not None else []
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, _, _, name = line.split()
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def _ipv4(name: str) -> str | None:
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """The interface that has an address of this machine; None if none has."""
    plain, _, scope = address.partition("%")
    for name, addresses in interfaces().items():
        if plain in addresses and (not scope or scope == name):
            return name
    return None


def interface_towards(name: str) -> str | None:
    """The interface through which a host is reached; None if that cannot be found out.

    Args:
        name: a host name or IP address; one of this machine's own gives the interface that has it.
    """
    with contextlib.suppress(OSError):
        for address in resolve(name):
            with contextlib.suppress(OSError):
                return interface_of(own_address_towards(address))
    return None


def interface_between_hosts(chief: str) -> str | None:
    """The interface through which workers of several hosts reach each other; None if not known.

    Args:
        chief: where worker 0 is. On its own host the name often stands for a loopback address
            (Debian's 127.0.1.1), by which gloo would be found by nobody else.
    """
    towards = interface_towards(chief)
    if towards is not None and not all(is_loopback(a) for a in interfaces().get(towards, ())):
        return towards
    outside = [
        name
        for name, addresses in interfaces().items()
        if any(not is_loopback(address) for address in addresses)
    ]
    return outside[0] if len(outside) == 1 else None
