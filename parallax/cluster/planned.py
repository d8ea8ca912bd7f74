"""A run as a resource file alone describes it: workers and network of hosts that nobody asks.

The network is what :func:`parallax.runtime.predictions.probe.measure_network` would find there. A
host's link is shared by its workers, what a worker sends goes to all others alike, and the slowest
link is waited for. Each message takes time to be sent, however short it is; with thousands of
workers that is most of an exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallax.cluster.environment import PLAN_VARIABLE
from parallax.cluster.network import Level, Network
from parallax.cluster.spec import ClusterSpec, Host, Link
from parallax.cluster.units import format_bandwidth, format_time

__all__ = ["PlannedCluster", "plan_cluster"]

BANDWIDTH = 10e9 / 8
LATENCY = 50e-6
# Of each worker inside a host: by Gloo, which keeps a core busy; by NCCL over PCI Express.
INSIDE_BANDWIDTH_CPU = 12e9 / 8
INSIDE_BANDWIDTH_CUDA = 160e9 / 8
INSIDE_LATENCY = 50e-6
# To send one message and to receive one, with Gloo on a core of its own.
MESSAGE_SECONDS = 20e-6


@dataclass(frozen=True)
class PlannedCluster:
    """What is planned for.

    Args:
        source: the resource file.
        counts: workers of each host; the chief's host first.
        network: between them.
        on_cpu: whether they compute on the CPU by the file's own word.
        assumed: what the file does not say and was assumed, for people.
    """

    source: str
    counts: tuple[int, ...]
    network: Network
    on_cpu: bool
    assumed: tuple[str, ...]

    @property
    def workers(self) -> int:
        """Number of workers on all hosts."""
        return sum(self.counts)

    @property
    def variables(self) -> dict[str, str]:
        """The environment by which a process is worker 0, as far as reading data goes."""
        return {
            "RANK": "0",
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": str(self.counts[0]),
            PLAN_VARIABLE: "1",
        }


def plan_cluster(spec: ClusterSpec, usual_workers: int) -> PlannedCluster:
    """The run that a resource file describes.

    Args:
        spec: its content.
        usual_workers: workers of a host of which it says neither devices nor cpus.
    """
    hosts = list(spec.hosts)
    if spec.chief is not None:
        hosts.remove(spec.chief)
        hosts.insert(0, spec.chief)
    counts = {host.address: host.workers or usual_workers for host in hosts}
    assumed = []
    silent = [host.address for host in hosts if host.workers is None]
    if silent:
        number = f"{usual_workers} worker" + ("" if usual_workers == 1 else "s")
        assumed.append(f"{number} on {_some(silent, len(hosts))} (as on this machine)")
    network, more = _network(spec, counts)
    return PlannedCluster(
        spec.source,
        tuple(counts.values()),
        network,
        any(host.cpus is not None for host in hosts),
        (*assumed, *more),
    )


def _network(spec: ClusterSpec, counts: Mapping[str, int]) -> tuple[Network, list[str]]:
    """The levels of the network, and what was assumed of it."""
    workers, hosts = sum(counts.values()), len(counts)
    assumed = []
    outside = {host.address: host.bandwidth or BANDWIDTH for host in spec.hosts}
    inside = {
        host.address: host.inside_bandwidth or counts[host.address] * _usual_inside(host)
        for host in spec.hosts
    }
    shared = [host for host in spec.hosts if counts[host.address] > 1]
    inside_latency = max((host.inside_latency or INSIDE_LATENCY for host in shared), default=0.0)
    outside_latency = _outside_latency(spec)
    joined = spec.hosts if hosts > 1 else ()
    usual = [("bandwidth", format_bandwidth(BANDWIDTH), joined)]
    usual += [("latency", format_time(LATENCY), joined)]
    for speed in (INSIDE_BANDWIDTH_CPU, INSIDE_BANDWIDTH_CUDA):
        among = tuple(host for host in shared if _usual_inside(host) == speed)
        usual.append(("inside_bandwidth", f"{format_bandwidth(speed)} a worker", among))
    usual += [("inside_latency", format_time(INSIDE_LATENCY), tuple(shared))]
    for name, shown, among in usual:
        lacking = [host.address for host in among if getattr(host, name) is None]
        if lacking:
            assumed.append(f"{name} {shown} of {_some(lacking, hosts)}")
    if workers == 1:
        return Network(Level(1, float("inf"), 0.0)), assumed
    # Bytes per second of each host's workers together, when each sends a byte to each other worker.
    limits = [
        speed * (workers - 1) / (counts[name] * (counts[name] - 1))
        for name, speed in inside.items()
        if counts[name] > 1
    ]
    latency = inside_latency
    if hosts > 1:
        limits += _outside_limits(spec, outside, counts)
        latency = outside_latency
    whole = Level(workers, min(limits), _exchange(latency, workers))
    each = set(counts.values())
    if hosts == 1 or len(each) > 1 or each == {1}:
        return Network(whole), assumed
    per_host = each.pop()
    rails = dict.fromkeys(counts, 1)
    rail = min(_outside_limits(spec, outside, rails)) / per_host
    return (
        Network(
            whole,
            Level(per_host, min(inside.values()) / per_host, _exchange(inside_latency, per_host)),
            Level(hosts, rail, _exchange(outside_latency, hosts)),
        ),
        assumed,
    )


def _usual_inside(host: Host) -> float:
    """Bytes per second of each worker, on the kind of device that the file gives it."""
    return INSIDE_BANDWIDTH_CPU if host.devices is None else INSIDE_BANDWIDTH_CUDA


def _outside_limits(
    spec: ClusterSpec, outside: Mapping[str, float], counts: Mapping[str, int]
) -> list[float]:
    """Bytes per second of one worker that each host's link, and each known pair's, has room for."""
    workers = sum(counts.values())
    remote = {name: workers - own for name, own in counts.items()}
    limits = []
    for link in spec.links:
        if link.bandwidth is None:
            continue
        one, other = link.between
        limits.append(link.bandwidth * (workers - 1) / (counts[one] * counts[other]))
        if _is_apart(link, outside):
            remote[one] -= counts[other]
            remote[other] -= counts[one]
    return limits + [
        speed * (workers - 1) / (counts[name] * remote[name])
        for name, speed in outside.items()
        if remote[name] > 0
    ]


def _is_apart(link: Link, outside: Mapping[str, float]) -> bool:
    """Whether a pair has a cable of its own: it is faster than the hosts' links."""
    return link.bandwidth is not None and link.bandwidth > min(outside[a] for a in link.between)


def _outside_latency(spec: ClusterSpec) -> float:
    own = [host.latency or LATENCY for host in spec.hosts]
    return max(own + [link.latency for link in spec.links if link.latency is not None])


def _exchange(latency: float, workers: int) -> float:
    """Seconds in which each of some workers sends next to nothing to each other one."""
    return latency + max(workers - 2, 0) * MESSAGE_SECONDS


def _some(names: Sequence[str], hosts: int) -> str:
    if len(names) == hosts:
        return "all hosts" if hosts > 1 else names[0]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other hosts"
