"""What is known of the network between a run's workers: bandwidth and latency of its two levels."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Level", "Network"]


@dataclass(frozen=True)
class Level:
    """Exchanges among some workers, by the latency-bandwidth model.

    Args:
        workers: how many take part in one exchange.
        bandwidth: bytes per second that one of them sends while all send to all others.
        latency: seconds that an exchange of next to nothing takes.
        processing: seconds that a processor works for each byte that one of them sends, here and
            on the way in.
        summing: bytes per second that one of them sends in an AllReduce; None where that was not
            measured apart, for ``bandwidth``. A ring has one message on each link, and several
            senders to one receiver get less out of the same link.
    """

    workers: int
    bandwidth: float
    latency: float
    processing: float = 0.0
    summing: float | None = None

    @property
    def sums(self) -> float:
        """Bytes per second that one worker sends in an AllReduce."""
        return self.bandwidth if self.summing is None else self.summing

    def exchange(self, sent: float) -> float:
        """Seconds for an exchange in which every worker sends ``sent`` bytes."""
        return 0.0 if self.workers == 1 else self.latency + sent / self.bandwidth

    def all_reduce(self, size: float) -> float:
        """Seconds for a ring AllReduce of ``size`` bytes: two exchanges of all parts but one."""
        if self.workers == 1:
            return 0.0
        return 2 * (self.latency + (self.workers - 1) / self.workers * size / self.sums)


@dataclass(frozen=True)
class Network:
    """Measured links.

    Args:
        whole: all workers.
        host: the workers of one host; None unless all hosts have equally many, more than one.
        rail: workers with the same place on every host, while all such groups exchange.
        memory: sums by the workers of a host in memory that they share, as if each sent what others
            read of its memory; None where they share none, or not all hosts have equally many.
    """

    whole: Level
    host: Level | None = None
    rail: Level | None = None
    memory: Level | None = None

    @property
    def hosts(self) -> int:
        """How many hosts there are, of several workers each; 1 where there is one level only."""
        return 1 if self.rail is None else self.rail.workers
