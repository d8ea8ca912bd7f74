"""What ``parallax probe`` measures, and the resource file that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from parallax.cluster.spec import ClusterSpec, Host, Link

__all__ = ["HostFound", "PairFound", "ProbeFound", "rounded", "with_measured"]

# A pair is told apart where it is slower than its hosts' links are by more than measuring differs.
_LESS_BANDWIDTH = 0.8
_MORE_LATENCY = 2.0
_LEAST_LATENCY = 100e-6


class HostFound(msgspec.Struct, frozen=True):
    """What was measured of a host; fields as in :class:`parallax.cluster.spec.Host`.

    Args:
        workers: how many it ran.
        cuda: name of their devices; None if they compute on the CPU.
    """

    workers: int
    cuda: str | None
    free_memory: int
    memory_bandwidth: float
    device_memory: int | None = None
    inside_bandwidth: float | None = None
    inside_latency: float | None = None


class PairFound(msgspec.Struct, frozen=True):
    """What was measured between two hosts.

    Args:
        hosts: their numbers.
        bandwidth: bytes per second, each way, of all their workers together.
        latency: seconds from a worker of one to a worker of the other.
    """

    hosts: tuple[int, int]
    bandwidth: float
    latency: float


class ProbeFound(msgspec.Struct, frozen=True):
    """All that was measured."""

    hosts: list[HostFound]
    pairs: list[PairFound]


def rounded(value: float) -> float:
    """Three digits: no more are measured."""
    return float(f"{value:.3g}")


def with_measured(spec: ClusterSpec, order: Sequence[int], found: ProbeFound) -> ClusterSpec:
    """The same hosts with what was measured.

    Args:
        spec: the hosts.
        order: numbers of the hosts in the file, in the order of their workers.
        found: what was measured, in that order.

    Returns:
        Each host's bandwidth is that of its fastest pair, its latency that of its quickest; pairs
        that are much slower than their hosts are links.
    """
    hosts = list(spec.hosts)
    for number, measured in enumerate(found.hosts):
        host = hosts[order[number]]
        pairs = [pair for pair in found.pairs if number in pair.hosts]
        devices, cpus = host.devices, host.cpus
        if host.workers is None:
            devices = None if measured.cuda is None else tuple(range(measured.workers))
            cpus = measured.workers if measured.cuda is None else None
        speeds = {
            "bandwidth": max((pair.bandwidth for pair in pairs), default=None),
            "latency": min((pair.latency for pair in pairs), default=None),
            "inside_bandwidth": measured.inside_bandwidth,
            "inside_latency": measured.inside_latency,
            "memory_bandwidth": measured.memory_bandwidth,
        }
        sizes = {"free_memory": measured.free_memory, "device_memory": measured.device_memory}
        values: dict[str, Any] = {n: rounded(v) for n, v in speeds.items() if v is not None}
        values |= {n: int(rounded(v)) for n, v in sizes.items() if v}
        values["devices"], values["cpus"] = devices, cpus
        hosts[order[number]] = dataclasses.replace(host, **values)
    met = {frozenset(hosts[order[at]].address for at in pair.hosts) for pair in found.pairs}
    links = [link for link in spec.links if frozenset(link.between) not in met]
    for pair in found.pairs:
        one, other = (hosts[order[at]] for at in pair.hosts)
        if _is_slower(pair, one, other):
            between = (one.address, other.address)
            links.append(Link(between, rounded(pair.bandwidth), rounded(pair.latency)))
    return dataclasses.replace(spec, hosts=tuple(hosts), links=tuple(links))


def _is_slower(pair: PairFound, one: Host, other: Host) -> bool:
    speeds = [host.bandwidth for host in (one, other) if host.bandwidth is not None]
    times = [host.latency for host in (one, other) if host.latency is not None]
    late = pair.latency > max(max(times) * _MORE_LATENCY, max(times) + _LEAST_LATENCY)
    return late or pair.bandwidth < min(speeds) * _LESS_BANDWIDTH
