"""How large messages are: what computation, and how many bytes, are worth one of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallax.cluster.network import Network
from parallax.strategy.timeline import Speed

__all__ = ["MessageSizes"]

MEGA = 1 << 20


@dataclass(frozen=True)
class MessageSizes:
    """From when on something travels in a message of its own.

    Args:
        operations: multiplications and additions that take as long as one more message costs; what
            has as many between, or after it, travels apart. As it stands, a millisecond of a CPU
            core.
        overlapped: bytes of dense gradients that are worth a message while the model computes.
        most: bytes of dense gradients that are sent in any case, so that adding up what came
            overlaps with what still travels.
        least: bytes of dense gradients that travel as long as one more message costs.
        per_byte: operations that take as long as such a byte travels while the model computes. As
            it stands, on a link of 1 Gbit/s.
    """

    operations: int = 50_000_000
    overlapped: int = MEGA
    most: int = 8 * MEGA
    least: int = MEGA // 4
    per_byte: int = 800

    @classmethod
    def measured(cls, network: Network, speed: Speed, dense: float) -> MessageSizes:
        """Sizes for these links and devices.

        ``n`` buckets of ``dense / n`` bytes cost ``n`` times a message's latency, and what is left
        of the last one when nothing is computed any more: ``latency * n + link * dense / n``, which
        is least for buckets of ``sqrt(dense * latency / link)`` bytes. All sizes are the
        nearest of a few, four times apart, since a strategy that differs with each measurement
        would be compiled anew in each run.

        Args:
            network: measured links.
            speed: of a worker's device.
            dense: bytes of all dense gradients.
        """
        latency = network.whole.all_reduce(0.0)
        link = network.whole.all_reduce(1.0) - latency
        usual = cls()
        if latency <= 0.0 or link <= 0.0:
            return usual
        overlapped = math.sqrt(max(dense, 1.0) * latency / link)
        bucket = _steps(overlapped / usual.overlapped, -2, 3)
        waiting = network.whole.exchange(0.0) * speed.operations / speed.crowding
        work = _steps(waiting / usual.operations, -2, 8)
        least = _steps(latency / link / usual.least, -4, 4)
        travelling = link / speed.progress * speed.operations / speed.crowding
        per_byte = _steps(travelling / usual.per_byte, -4, 8)
        return cls(
            max(int(usual.operations * work), 1),
            int(usual.overlapped * bucket),
            int(usual.most * bucket),
            int(usual.least * least),
            max(int(usual.per_byte * per_byte), 1),
        )

    def cuts(self, sent: Sequence[int], between: Sequence[int]) -> list[int]:
        """Cut the last bucket, of which nothing is hidden, where a part of it can be.

        What travels before the last gradient is known costs no more than one message. As much as
        can is in the first part; the rest is cut in the same way.

        Args:
            sent: bytes of its gradients, in the order in which they are known.
            between: operations that are computed from each of them to the next.

        Returns:
            By gradient, the number of its part, from 0.
        """
        result: list[int] = []
        for part in range(len(sent)):
            first = len(result)
            end = next(
                (
                    end
                    for end in range(len(sent) - 1, first, -1)
                    if self._is_hidden(sum(sent[first:end]), sum(between[end - 1 :]))
                ),
                len(sent),
            )
            result += [part] * (end - first)
        return result

    def _is_hidden(self, size: int, left: int) -> bool:
        """Whether so many bytes are worth a message and travel behind so many operations."""
        return size >= self.least and left >= self.operations + size * self.per_byte


def _steps(ratio: float, least: int, most: int) -> float:
    """The power of four that is nearest, from ``4 ** least`` to ``4 ** most``."""
    return 4.0 ** min(max(round(math.log(max(ratio, 1e-12), 4)), least), most)
