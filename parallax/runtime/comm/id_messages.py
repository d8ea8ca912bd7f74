"""Ids for workers that do not know how many will come, in one message instead of two.

A message has room for as many ids as were sent to its receiver of late, and some more; it begins
with how many there are. Only what does not fit follows in a second message, about which all workers
know from the first. Every receiver tells the others what room it needs one step later, so that all
count on the same: the first two steps, and one after ids became many more, send two messages.
Of those that are sent ahead, each has the room that was known when it started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from parallax.runtime.comm.world import World

STEPS = 16
"""How far back a receiver looks for the most ids that it was sent ..."""
MORE = 1.05
"""... which room is made for, and this much more."""
GRAIN = 16
"""Room is a multiple of this many ids."""

_OWN = 4
"""Numbers that we put before a message's own head."""


class Room:
    """How many ids a message to each worker of a group has room for; equal on all workers."""

    def __init__(self, workers: int) -> None:
        self.sizes = [0] * workers
        self.wish = 0
        """The most ids that this worker was sent by one in the last step."""
        self.load = 0
        """The most bytes that this worker sent or got in one of its last messages of rows."""
        self.most = 0
        """Of all workers that, as the last message told."""
        self._wishes: deque[list[int]] = deque(maxlen=STEPS)

    def update(self, wishes: list[int]) -> None:
        """Make room by what every worker wishes."""
        self._wishes.append(wishes)
        for worker, size in enumerate(self.sizes):
            most = max(wish[worker] for wish in self._wishes)
            wanted = -int(-most * MORE // GRAIN) * GRAIN
            if most > size or wanted < size * 0.75:
                self.sizes[worker] = wanted


class IdsUnderWay:
    """A message of ids to every worker of a group, and those that come from them."""

    def __init__(
        self,
        world: World,
        room: Room,
        heads: Sequence[Sequence[int]],
        ids: torch.Tensor,
        lengths: Sequence[int],
        purpose: str,
        group: str = "rows",
    ) -> None:
        """Start to send. Messages that share a room end in the order in which they started.

        Args:
            world: this worker and the others.
            room: of messages of this kind.
            heads: by worker, numbers to go before its ids; equally many for all.
            ids: of a dtype that all share, worker by worker.
            lengths: by worker, how many.
            purpose: what the bytes are counted as.
            group: among whom.
        """
        self._world, self._room, self._purpose, self._group = world, room, purpose, group
        self._sizes, own = list(room.sizes), room.sizes[world.group(group).place]
        self._lengths = list(lengths)
        overflow = any(n > size for n, size in zip(lengths, self._sizes, strict=True))
        rows = [
            [length, int(overflow), room.wish, room.load, *head]
            for length, head in zip(lengths, heads, strict=True)
        ]
        header = torch.tensor(rows, dtype=torch.int64, device=world.device).view(ids.dtype)
        width = header.shape[1]
        self._parts = ids.split(self._lengths)
        message = ids.new_zeros(sum(self._sizes) + width * len(rows))
        outgoing = message.split([width + size for size in self._sizes])
        for out, words, part, size in zip(outgoing, header, self._parts, self._sizes, strict=True):
            out[:width] = words
            fitting = part[:size]
            out[width : width + len(fitting)] = fitting
        self._message = message  # lives until it is sent
        self._width, self._own = width, own
        self._received = ids.new_empty((len(rows), width + own))
        self._pending = world.all_to_all(
            self._received.view(-1),
            message,
            [width + own] * len(rows),
            [width + size for size in self._sizes],
            purpose,
            group,
            spare=[width + max(size - n, 0) for size, n in zip(self._sizes, lengths, strict=True)],
            most=max(self._sizes) * (len(rows) - 1) * ids.element_size(),
        )

    def finish(self) -> tuple[list[list[int]], torch.Tensor]:
        """Wait for what others sent.

        Returns:
            By worker, the head that it sent; and the ids that were sent here, worker by worker.
        """
        self._pending.wait()
        width, own = self._width, self._own
        told = self._received[:, :width].contiguous().view(torch.int64).tolist()
        counts = [row[0] for row in told]
        arrived = [
            line[width : width + min(count, own)]
            for line, count in zip(self._received, counts, strict=True)
        ]
        if any(row[1] for row in told):
            arrived = self._with_late(arrived, counts)
        self._room.update([row[2] for row in told])
        self._room.wish = max(counts)
        self._room.most = max(row[3] for row in told)
        return [row[_OWN:] for row in told], torch.cat(arrived)

    def _with_late(self, arrived: list[torch.Tensor], counts: list[int]) -> list[torch.Tensor]:
        """With the ids that did not fit, in a second message."""
        rest = torch.cat([part[n:] for part, n in zip(self._parts, self._sizes, strict=True)])
        left = [max(n - size, 0) for size, n in zip(self._sizes, self._lengths, strict=True)]
        missing = [max(count - self._own, 0) for count in counts]
        late = rest.new_empty(sum(missing))
        self._world.all_to_all(late, rest, missing, left, self._purpose, self._group).wait()
        pairs = zip(arrived, late.split(missing), strict=True)
        return [part for pair in pairs for part in pair]
