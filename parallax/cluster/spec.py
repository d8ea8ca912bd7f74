"""The machines of a run as frozen values: hosts, how to reach them, and the links between them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

__all__ = ["ClusterSpec", "Host", "Link", "Ssh", "address_problem", "device_problem"]

MAX_WORKERS = 1024
MAX_DEVICE = 1023
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\.?")
_SCOPE = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Ssh:
    """How a host is reached and what runs there.

    Args:
        user: the account; that of the ssh configuration if None.
        port: the port; that of the ssh configuration if None.
        key: file of the private key, on the launching host.
        options: further options of ``ssh -o``, each ``Name=value``.
        python: the interpreter there; the launching host's path if None.
        directory: the working directory there; the launching host's if None.
        environment: variables that workers get besides the launching host's.
    """

    user: str | None = None
    port: int | None = None
    key: str | None = None
    options: tuple[str, ...] = ()
    python: str | None = None
    directory: str | None = None
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Host:
    """One machine.

    Args:
        address: host name, ssh alias, IPv4 or IPv6 address (without brackets).
        devices: CUDA device numbers, one worker each; None for all that the host has.
        cpus: number of workers that compute on the CPU; None if the host uses devices.
        ssh: how it is reached.
        bandwidth: of its link to the network in bytes per second, each way; None if not known.
        latency: of its link in seconds, one way to another host; None if not known.
        memory_bandwidth: of its main memory in bytes per second; None if not known.
        inside_bandwidth: bytes per second that its workers together send each other; None if not
            known.
        inside_latency: in seconds, from one of its workers to another; None if not known.
        free_memory: bytes of main memory that were free; None if not known.
        device_memory: bytes that were free on each of its CUDA devices; None if not known.
        chief: whether worker 0 is to run here.
        line: where the resource file names it; 0 without a file.
    """

    address: str
    devices: tuple[int, ...] | None = None
    cpus: int | None = None
    ssh: Ssh = field(default_factory=Ssh)
    bandwidth: float | None = None
    latency: float | None = None
    memory_bandwidth: float | None = None
    inside_bandwidth: float | None = None
    inside_latency: float | None = None
    free_memory: int | None = None
    device_memory: int | None = None
    chief: bool = False
    line: int = field(default=0, compare=False)

    @property
    def workers(self) -> int | None:
        """Number of workers, if the file says it; else it is the number of devices found."""
        if self.cpus is not None:
            return self.cpus
        return None if self.devices is None else len(self.devices)


@dataclass(frozen=True)
class Link:
    """What is known of the way between two hosts, where it differs from their own links.

    Args:
        between: addresses of the two hosts.
        bandwidth: bytes per second, each way; None if not known.
        latency: seconds, one way; None if not known.
    """

    between: tuple[str, str]
    bandwidth: float | None = None
    latency: float | None = None


@dataclass(frozen=True)
class ClusterSpec:
    """The machines of a run.

    Args:
        hosts: at least one; workers are numbered in this order, the chief's host first.
        links: pairs of hosts whose link is known better than from the hosts alone.
        source: the file that said so.
    """

    hosts: tuple[Host, ...]
    links: tuple[Link, ...] = ()
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("a cluster has at least one host")

    @property
    def chief(self) -> Host | None:
        """The host that is marked as the chief's, if any."""
        return next((host for host in self.hosts if host.chief), None)

    @property
    def uneven(self) -> bool:
        """Whether hosts are known to run different numbers of workers."""
        return len({host.workers for host in self.hosts}) > 1

    def host(self, address: str) -> Host:
        """The host of an address.

        Raises:
            KeyError: there is none.
        """
        for host in self.hosts:
            if host.address == address:
                return host
        raise KeyError(address)

    def bandwidth(self, one: str, other: str) -> float | None:
        """Bytes per second between two hosts: of their link, or the slower of their own."""
        link = self._link(one, other)
        if link is not None and link.bandwidth is not None:
            return link.bandwidth
        known = [b for a in (one, other) if (b := self.host(a).bandwidth) is not None]
        return min(known, default=None)

    def latency(self, one: str, other: str) -> float | None:
        """Seconds one way between two hosts: of their link, or the greater of their own."""
        link = self._link(one, other)
        if link is not None and link.latency is not None:
            return link.latency
        known = [t for a in (one, other) if (t := self.host(a).latency) is not None]
        return max(known, default=None)

    def _link(self, one: str, other: str) -> Link | None:
        return next((link for link in self.links if set(link.between) == {one, other}), None)


def address_problem(text: str) -> str | None:
    """What is wrong with a host's address, or None.

    The address goes into command lines, so only what cannot be an option, a second word or
    something that a shell reads is a host.
    """
    if not text:
        return "a host's address is empty"
    if ":" in text:
        return None if _is_ipv6(text) else f"{text!r} is no host name and no IPv6 address"
    if text.startswith("-"):
        return f"the host {text!r} begins with '-', which ssh would take for an option"
    if "@" in text:
        return f"the host {text!r} contains '@'; the user's name belongs under 'ssh: user'"
    if len(text) > 253 or not _NAME.fullmatch(text):
        shown = text if len(text) <= 60 else text[:57] + "..."
        return f"{shown!r} is no host name: letters, digits, '.', '-' and '_' are allowed"
    if re.fullmatch(r"[0-9.]+", text):
        try:
            ipaddress.IPv4Address(text)
        except ValueError:
            return f"{text!r} is no IPv4 address"
    return None


def _is_ipv6(text: str) -> bool:
    address, percent, scope = text.partition("%")
    if percent and not _SCOPE.fullmatch(scope):
        return False
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def device_problem(ids: tuple[int, ...]) -> str | None:
    """What is wrong with a host's device numbers, or None."""
    if not ids:
        return "the list of devices is empty; leave it out for all devices of the host"
    for number in ids:
        if not 0 <= number <= MAX_DEVICE:
            return f"the device {number} must be a number from 0 to {MAX_DEVICE}"
    twice = [number for at, number in enumerate(ids) if number in ids[:at]]
    return f"the device {twice[0]} is named twice" if twice else None
