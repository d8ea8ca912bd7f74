"""What is known of the network between a run's workers: bandwidth and latency of its two levels."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Level", "Network", "number_of_parts"]

MOST_PARTS = 64
"""In which an exchange travels."""


def number_of_parts(size: float, piece: int) -> int:
    """Into how many parts to cut an exchange.

    Args:
        size: bytes that a worker sends to the others, the most of all workers.
        piece: bytes of a part; 0 where exchanges are not cut.
    """
    if piece == 0:
        return 1
    return max(1, min(MOST_PARTS, round(size / piece)))


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
        piece: bytes of a large exchange that one of them sends at once, where that was found to be
            faster; 0 where it is not.
        at_once: bytes per second in an exchange that is too small for parts; None for
            ``bandwidth``.
    """

    workers: int
    bandwidth: float
    latency: float
    processing: float = 0.0
    summing: float | None = None
    piece: int = 0
    at_once: float | None = None

    @property
    def sums(self) -> float:
        """Bytes per second that one worker sends in an AllReduce."""
        return self.bandwidth if self.summing is None else self.summing

    def rate(self, sent: float) -> float:
        """Bytes per second of an exchange in which every worker sends ``sent`` bytes."""
        in_parts = number_of_parts(sent, self.piece) > 1
        return self.bandwidth if in_parts or self.at_once is None else self.at_once

    def exchange(self, sent: float) -> float:
        """Seconds for an exchange in which every worker sends ``sent`` bytes."""
        return 0.0 if self.workers == 1 else self.latency + sent / self.rate(sent)

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
