"""Exchange of table rows on several hosts: each row crosses to a host once.

Every host has k workers. A worker asks the worker of its own host that has the owner's place there;
that one merges what its host asks for and asks the owner, on its rail: the workers with the same
place on every host. Rows return the same way, and gradients of one row are summed inside the host
before they leave it (Parallax paper, section 5.3.2). Bytes that a host sends to others per step,
with u distinct rows of b bytes asked for by its workers together on H hosts: (H-1)/H (2ub + 4u).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from parallax.ops.specs import RowsSpec
from parallax.runtime.comm.control import INTEGERS, Step, StepControl
from parallax.runtime.comm.id_messages import IdsUnderWay
from parallax.runtime.comm.world import World
from parallax.runtime.exchange.rows import (
    Requested,
    RowExchange,
    Rows,
    Sent,
    Wanted,
    by_table,
    by_worker,
)

Counts = list[list[int]]
"""By worker of a group, rows of each table."""


@dataclass
class _Merged(Requested):
    """One pull of a host's workers; what its base class says is of the rail."""

    inner_asked: Counts = field(default_factory=list)
    """Rows that this worker asks each worker of its host for."""
    inner_served: Counts = field(default_factory=list)
    """Rows that each worker of its host asks this one for."""
    places: list[torch.Tensor] = field(default_factory=list)
    """Per table, where the rows that they ask for are among the merged ones."""
    distinct: list[int] = field(default_factory=list)
    """Per table, how many merged rows there are."""


class HostRowExchange(RowExchange):
    """The runtime of one :class:`RowsSpec` whose tables are sharded over several hosts."""

    def __init__(self, spec: RowsSpec, world: World, control: StepControl) -> None:
        super().__init__(spec, world, control)
        self._members = world.members
        hosts = len(self._members)
        # A request is ordered by the owner's place on its host, then by host.
        places = [0] * world.size
        for number, ranks in enumerate(self._members):
            for place, rank in enumerate(ranks):
                places[rank] = place * hosts + number
        self.places = torch.tensor(places, device=world.device)
        self._hosts, self._width = hosts, len(self._members[0])
        self._merged_rows = [0] * len(spec.tables)

    @property
    def host_rows(self) -> list[float]:
        """Per table, the distinct rows of a step that this host's workers ask for together.

        Estimated from those that this worker asks for on behalf of all: as rows are dealt
        round-robin, each worker of the host does that for an equal share.
        """
        return [self._width * merged / max(self.steps, 1) for merged in self._merged_rows]

    def _ask(self, ids: Sequence[Sequence[torch.Tensor]], step: Step) -> Wanted:
        return self._unique(ids)

    def _hear(self, wanted: Wanted) -> tuple[Requested, bool]:
        rows, asked = wanted.rows, wanted.counts
        hosts, tables = self._hosts, len(self.spec.tables)
        words = self.control.integers(wanted.bad)
        by_place = [asked[p * hosts : (p + 1) * hosts] for p in range(self._width)]
        heads = [[*words, *(n for row in part for n in row)] for part in by_place]
        inner_asked = [[sum(row[t] for row in part) for t in range(tables)] for part in by_place]
        told, ids = self._exchange(rows, heads, inner_asked, "host")
        own_words = [row[:INTEGERS] for row in told]
        inner_served = [_sums(row[INTEGERS:], tables) for row in told]
        asked_here = by_table(ids, inner_served, [1] * tables)
        merged, places, counts = self._merge(asked_here, [row[INTEGERS:] for row in told])
        for t, count in enumerate(counts):
            self._merged_rows[t] += sum(count)
        rail_asked = [[count[host] for count in counts] for host in range(hosts)]
        flat_words = [word for row in own_words for word in row]
        heard, ids = self._exchange(
            merged, [[*flat_words, *row] for row in rail_asked], rail_asked, "rail"
        )
        self._check(heard)
        rail_served = [row[INTEGERS * self._width :] for row in heard]
        request = _Merged(
            rows,
            rail_asked,
            by_table(ids.long(), rail_served, [1] * tables),
            rail_served,
            wanted.padding,
            inner_asked=inner_asked,
            inner_served=inner_served,
            places=places,
            distinct=[sum(count) for count in counts],
            most=self.control.room("rail", len(flat_words) + tables).most,
        )
        return request, False

    def _check(self, heard: Counts) -> None:
        """Let the step's control see the words of all workers, in their order."""
        words: Counts = [[]] * self.world.size
        for ranks, row in zip(self._members, heard, strict=True):
            for place, rank in enumerate(ranks):
                words[rank] = row[place * INTEGERS : (place + 1) * INTEGERS]
        self.control.check_integers(words)

    def _exchange(
        self, rows: list[torch.Tensor], heads: Counts, asked: Counts, group: str
    ) -> tuple[Counts, torch.Tensor]:
        sent = by_worker([part.to(self.id_dtype) for part in rows], asked)
        room = self.control.room(group, len(heads[0]))
        lengths = [sum(row) for row in asked]
        message = IdsUnderWay(self.world, room, heads, sent, lengths, "rows: ids", group)
        return message.finish()

    def _merge(
        self, ids: list[torch.Tensor], told: Counts
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], Counts]:
        """Distinct rows of each table by host, where each asked row is among them, and counts.

        Args:
            ids: per table, rows asked for, by worker of this host and then by owning host.
            told: by worker of this host, for each owning host the rows of each table.
        """
        hosts, tables = self._hosts, len(self.spec.tables)
        device = self.world.device
        merged, places, counts = [], [], []
        host = torch.arange(hosts, device=device).repeat(len(told))
        for t, rows in enumerate(ids):
            stride = self.spec.tables[t].rows // self.world.size + 1
            sizes = torch.tensor([n for row in told for n in row[t::tables]], device=device)
            keys = host.repeat_interleave(sizes) * stride + rows
            distinct, place = torch.unique(keys, return_inverse=True)
            bounds = torch.arange(1, hosts + 1, device=device) * stride
            ends = torch.searchsorted(distinct, bounds).tolist()
            merged.append(distinct % stride)
            places.append(place)
            counts.append([end - start for start, end in zip([0, *ends], ends, strict=False)])
        return merged, places, counts

    # -- Rows and gradients -------------------------------------------------------------------

    def _send_rows(
        self, request: Requested, tables: list[int], shards: Sequence[torch.Tensor]
    ) -> Rows:
        values = [shards[t].detach().index_select(0, request.wanted[t]).view(-1) for t in tables]
        started = self._start(
            values, request.served, request.asked, tables, "pull", group="rail", most=request.most
        )
        return Rows(tables, *started)

    def _arrived_rows(self, request: Requested, rows: Rows) -> list[torch.Tensor]:
        assert isinstance(request, _Merged)
        merged = self._unpack(rows.received, request.asked, rows.tables, "pull")
        values = [
            part.index_select(0, request.places[t]).view(-1)
            for t, part in zip(rows.tables, merged, strict=True)
        ]
        received, pending, keep = self._start(
            values, request.inner_served, request.inner_asked, rows.tables, "pull", group="host"
        )
        for work in pending:
            work.wait()
        del keep
        return self._unpack(received, request.inner_asked, rows.tables, "pull")

    def _send_gradients(
        self, request: Requested, tables: list[int], values: list[torch.Tensor]
    ) -> Sent:
        assert isinstance(request, _Merged)
        inner, pending, keep = self._start(
            values, request.inner_asked, request.inner_served, tables, "push", group="host"
        )
        for work in pending:
            work.wait()
        del keep
        summed = []
        parts = self._unpack(inner, request.inner_served, tables, "push")
        for t, part in zip(tables, parts, strict=True):
            whole = part.new_zeros((request.distinct[t], *part.shape[1:]))
            summed.append(whole.index_add_(0, request.places[t], part).view(-1))
        received, pending, keep = self._start(
            summed, request.asked, request.served, tables, "push", group="rail", most=request.most
        )
        return Sent(request, tables, received, None, pending, keep, request.served)


def _sums(numbers: list[int], tables: int) -> list[int]:
    """Per table, over owning hosts."""
    return [sum(numbers[t::tables]) for t in range(tables)]
