"""Exchange of table rows: all tables of a point of the step together, every row once.

Row i of a table lives on worker i mod N. A step costs one message of ids, and per dtype
that rows travel as one of rows in each direction; duplicates are removed before anything is sent.
Bytes sent per worker and step: with u unique rows, of which a share (N-1)/N lives elsewhere, 4u for
ids, and ub for gradients of b bytes a row; the same for rows served to others (Parallax paper,
table 3: 2αb).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallax.ops.specs import RowsSpec, TableSpec, Way
from parallax.runtime.comm.control import AskedIds, Step, StepControl
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World
from parallax.runtime.exchange.ahead import IdsAhead
from parallax.runtime.exchange.grouping import Grouped, group
from parallax.runtime.exchange.row_ids import id_dtype, within


@dataclass
class Wanted:
    """What this worker looks up in a step."""

    result: list[list[Any]]
    """Per table, the count of unique rows, and the positions of each lookup's ids among them."""
    rows: list[torch.Tensor]
    """Per table, the local rows of the unique ids, ordered by owner (sharded) or id."""
    counts: list[list[int]]
    """counts[w][t]: how many of them live on worker w."""
    padding: list[int | None]
    """Per table, where its padding row is among them, if it is there."""
    bad: str
    """What is wrong with the ids, if anything."""
    asked: AskedIds | None = None
    """The message that asks for them."""


@dataclass
class Requested:
    """One pull: who asks whom for how many rows of each table."""

    rows: list[torch.Tensor]
    """Per table, the local rows of the unique ids, ordered by owner (sharded) or id."""
    asked: list[list[int]]
    """asked[w][t]: rows of table t that this worker needs from worker w."""
    wanted: list[torch.Tensor]
    """Per table, the local rows that others want from this worker, in worker order."""
    served: list[list[int]]
    """served[w][t]: rows of table t that worker w needs from this worker."""
    padding: list[int | None]
    """Per table, where its padding row is among the unique rows, if it is there."""
    grouped: list[Grouped] = field(default_factory=list)
    """Per table, ``wanted`` by row."""
    pulls: dict[int, Rows] = field(default_factory=dict)
    """Per table, the message that brings its rows."""
    later: list[list[int]] = field(default_factory=list)
    """Tables of the messages of rows that are not under way yet."""
    shards: Sequence[torch.Tensor] = ()
    """What these will be read from."""
    most: int = 0
    """Bytes of the largest message of rows of late, of all workers."""


@dataclass
class Rows:
    """Rows of some tables under way."""

    tables: list[int]
    received: dict[torch.dtype, torch.Tensor]
    pending: list[Pending]
    keep: list[torch.Tensor]
    """Messages that must live until they are sent."""
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Sent:
    """A push under way."""

    request: Requested
    tables: list[int]
    received: dict[torch.dtype, torch.Tensor]
    ids: torch.Tensor | None
    """Of gathered rows, their ids in worker order; None for pushed ones, which were asked for."""
    pending: list[Pending]
    keep: list[torch.Tensor]
    """Messages that must live until they are sent."""
    counts: list[list[int]]


class RowExchange:
    """The runtime of one :class:`RowsSpec`."""

    def __init__(self, spec: RowsSpec, world: World, control: StepControl) -> None:
        self.spec = spec
        self.world = world
        self.control = control
        self.touched = [0.0] * len(spec.tables)
        self.steps = 0
        self.places: torch.Tensor | None = None
        """By owner, where its rows are in the order of a request; None for the owners' order."""
        self.id_dtype = id_dtype(spec.tables)
        self._ahead: IdsAhead[Wanted] = IdsAhead(self)
        self._dealt: dict[tuple[int, ...], torch.Tensor] = {}
        """Owners of tables that are dealt to some workers."""

    # -- Pull -----------------------------------------------------------------------------

    def pull(
        self,
        ids: Sequence[Sequence[torch.Tensor]],
        shards: Sequence[torch.Tensor],
        messages: Sequence[Sequence[int]],
    ) -> list[Any]:
        """See :func:`parallax.ops.resources.pull_rows`."""
        step = self.control.step
        wanted = self._ahead.take(step) or self._ask(ids, step)
        request, goes_on = self._hear(wanted)
        request.later = [list(tables) for tables in messages]
        request.shards = shards
        self._send_next(request)
        # While the rows are under way.
        request.grouped = [
            group(ids, table.rows)
            for table, ids in zip(self.spec.tables, request.wanted, strict=True)
        ]
        self._ahead.send(step, goes_on, self._ask)
        return [item for table in wanted.result for item in table] + [request]

    def _send_next(self, request: Requested) -> None:
        """Start the next message of rows: one at a time, as the first is wanted first."""
        if request.later:
            tables = request.later.pop(0)
            rows = self._send_rows(request, tables, request.shards)
            request.pulls.update(dict.fromkeys(tables, rows))

    def _send_rows(
        self, request: Requested, tables: list[int], shards: Sequence[torch.Tensor]
    ) -> Rows:
        """Start to send others the rows that they asked for."""
        values = [shards[t].detach().index_select(0, request.wanted[t]).view(-1) for t in tables]
        started = self._start(
            values, request.served, request.asked, tables, "pull", most=request.most
        )
        return Rows(tables, *started)

    def pulled(self, request: Requested, table: int) -> torch.Tensor:
        """See :func:`parallax.ops.resources.pulled_rows`."""
        while table not in request.pulls:
            self._send_next(request)
        rows = request.pulls.pop(table)
        if not rows.arrived:
            for work in rows.pending:
                work.wait()
            self._send_next(request)
            values = self._arrived_rows(request, rows)
            rows.arrived = dict(zip(rows.tables, values, strict=True))
        return rows.arrived[table]

    def _arrived_rows(self, request: Requested, rows: Rows) -> list[torch.Tensor]:
        """Per table, the unique rows in the order of the request."""
        return self._unpack(rows.received, request.asked, rows.tables, "pull")

    def unique(self, ids: Sequence[Sequence[torch.Tensor]]) -> list[Any]:
        """See :func:`parallax.ops.resources.unique_rows`."""
        wanted = self._unique(ids)
        sizes = [[len(rows) for rows in wanted.rows]] * self.world.size
        served = self.control.exchange_counts(sizes, wanted.bad, "rows: counts")
        request = Requested(wanted.rows, sizes, [], served, wanted.padding)
        return [item for table in wanted.result for item in table] + [request]

    def _unique(self, ids: Sequence[Sequence[torch.Tensor]]) -> Wanted:
        result: list[list[Any]] = []
        locals_: list[torch.Tensor] = []
        counts: list[list[int]] = []
        padding: list[int | None] = []
        bad = ""
        for index, (table, parts) in enumerate(zip(self.spec.tables, ids, strict=True)):
            flat = torch.cat([part.reshape(-1) for part in parts]).long()
            if table.wraps:
                flat = torch.where(flat < 0, flat + table.rows, flat)
            flat, problem = within(table, flat, self.world.rank)
            bad = bad or problem
            rows, positions, owned, hidden = self._by_owner(flat, table)
            padding.append(hidden)
            split = positions.split([part.numel() for part in parts])
            # As the ids were: lookups in bags want what says where bags begin to be of one kind.
            pairs = zip(split, parts, strict=True)
            shaped = [p.view(part.shape).to(part.dtype) for p, part in pairs]
            result.append([len(rows), *shaped])
            locals_.append(rows)
            counts.append(owned)
            self.touched[index] += len(rows) / max(table.rows, 1)
        self.steps += 1
        by_worker = [list(row) for row in zip(*counts, strict=True)]
        return Wanted(result, locals_, by_worker, padding, bad)

    def _by_owner(
        self, ids: torch.Tensor, table: TableSpec
    ) -> tuple[torch.Tensor, torch.Tensor, list[int], int | None]:
        """Unique rows ordered by owner, every id's position among them, rows per owner."""
        size = self.world.size if self.spec.sharded else 1
        dealt = len(table.owners) or size
        places = self._places(table)
        stride = table.rows // dealt + 1
        owners = ids % dealt if places is None else places[ids % dealt]
        grouped = group(owners * stride + ids // dealt, size * stride)
        keys, positions = grouped.keys, grouped.positions()
        bounds = [owner * stride for owner in range(1, size)]
        padding = table.padding
        if padding is not None:
            owner = padding % dealt
            place = owner if places is None else int(places[owner])
            bounds.append(place * stride + padding // dealt)
        found = torch.searchsorted(keys, torch.tensor(bounds, device=ids.device)).tolist()
        hidden = None
        if padding is not None:
            place = found.pop()
            if place < len(keys) and int(keys[place]) == bounds[-1]:
                hidden = place
        ends = [*found, len(keys)]
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        if not self.spec.sharded:
            counts = counts * self.world.size
        return keys % stride, positions, counts, hidden

    def _places(self, table: TableSpec) -> torch.Tensor | None:
        """By place among a table's owners, where its rows are in a request; None for the same."""
        if not table.owners:
            return self.places
        if table.owners not in self._dealt:
            self._dealt[table.owners] = torch.tensor(table.owners, device=self.world.device)
        return self._dealt[table.owners]

    def _ask(self, ids: Sequence[Sequence[torch.Tensor]], step: Step) -> Wanted:
        """What a step looks up, and a message that asks its owners for it."""
        wanted = self._unique(ids)
        sent = by_worker([rows.to(self.id_dtype) for rows in wanted.rows], wanted.counts)
        lengths = [sum(row) for row in wanted.counts]
        wanted.asked = self.control.ask(step, wanted.counts, sent, lengths, wanted.bad, "rows: ids")
        return wanted

    def _hear(self, wanted: Wanted) -> tuple[Requested, bool]:
        """With what others ask this worker for, and whether all can go on to the next step."""
        assert wanted.asked is not None
        heard = self.control.hear(wanted.asked)
        rows = by_table(heard.ids.long(), heard.counts, [1] * len(wanted.rows))
        request = Requested(wanted.rows, wanted.counts, rows, heard.counts, wanted.padding)
        request.most = heard.most
        return request, heard.goes_on

    # -- Push -----------------------------------------------------------------------------

    def push(
        self, request: Requested, tables: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> Sent:
        """See :func:`parallax.ops.resources.push_rows`."""
        chosen = list(tables)
        values = [
            self._prepared(gradient, self.spec.tables[t], request.padding[t])
            for t, gradient in zip(chosen, gradients, strict=True)
        ]
        if self.spec.sharded:
            return self._send_gradients(request, chosen, values)
        return self._gather(request, chosen, values)

    def _send_gradients(
        self, request: Requested, tables: list[int], values: list[torch.Tensor]
    ) -> Sent:
        """Start to send gradients of the unique rows to their owners."""
        received, pending, keep = self._start(
            values, request.asked, request.served, tables, "push", most=request.most
        )
        return Sent(request, tables, received, None, pending, keep, request.served)

    def _prepared(
        self, gradient: torch.Tensor, table: TableSpec, padding: int | None
    ) -> torch.Tensor:
        """A flat, dense, weighted gradient of the unique rows, in a buffer of our own."""
        if gradient.layout is torch.sparse_coo:
            gradient = gradient.to_dense()
        if self.control.is_empty:
            return torch.zeros(gradient.numel(), dtype=table.dtype, device=gradient.device)
        if table.average:
            own = gradient * (self.control.weight / self.control.total)
        else:
            own = gradient.clone(memory_format=torch.contiguous_format)
        if padding is not None:
            own[padding] = 0
        return own.reshape(-1)

    def _gather(self, request: Requested, chosen: list[int], values: list[torch.Tensor]) -> Sent:
        """Every worker sends its rows to every other: (N-1)αb."""
        size = self.world.size
        ids = torch.cat([request.rows[t] for t in chosen])
        totals = [sum(request.served[w][t] for t in chosen) for w in range(size)]
        received_ids = torch.empty(sum(totals), dtype=ids.dtype, device=ids.device)
        sent_ids = ids.repeat(size)
        pending = self.world.all_to_all(
            received_ids, sent_ids, totals, [len(ids)] * size, "rows: ids"
        )
        repeated = [value.repeat(size) for value in values]
        # Every worker knows all others' counts here.
        largest = max(
            sum(row[t] * self.spec.tables[t].sent_width for t in chosen) for row in request.served
        )
        most = largest * (size - 1) * max((value.element_size() for value in values), default=0)
        received, more, keep = self._start(
            repeated, request.asked, request.served, chosen, "push", "rows: gather", most=most
        )
        return Sent(
            request,
            chosen,
            received,
            received_ids,
            [pending, *more],
            [sent_ids, *keep],
            request.served,
        )

    def receive(self, sent: Sent) -> list[Any]:
        """See :func:`parallax.ops.resources.receive_rows`."""
        for work in sent.pending:
            work.wait()
        values = self._unpack(sent.received, sent.counts, sent.tables, "push")
        if sent.ids is not None:
            counts = [[row[t] for t in sent.tables] for row in sent.counts]
            wanted = by_table(sent.ids, counts, [1] * len(sent.tables))
            result = []
            for t, ids, rows in zip(sent.tables, wanted, values, strict=True):
                table = self.spec.tables[t]
                grouped = group(ids, table.rows)
                result.append(hand_on(table, table.rows, grouped.keys, grouped.sums(rows)))
            return result
        request, rank, size = sent.request, self.world.rank, self.world.size
        result = []
        for t, rows in zip(sent.tables, values, strict=True):
            table = self.spec.tables[t]
            count, grouped = table.dealt(rank, size), request.grouped[t]
            result.append(hand_on(table, count, grouped.keys, grouped.sums(rows)))
        return result

    # -- Messages of rows -------------------------------------------------------------------

    def _start(
        self,
        values: list[torch.Tensor],
        sent_counts: list[list[int]],
        received_counts: list[list[int]],
        tables: Sequence[int],
        way: Way,
        purpose: str = "",
        group: str = "rows",
        most: float = 0.0,
    ) -> tuple[dict[torch.dtype, torch.Tensor], list[Pending], list[torch.Tensor]]:
        """One message per dtype with the rows of all tables that travel as that dtype.

        ``most``: see :meth:`World.all_to_all`.
        """
        purpose = purpose or f"rows: {way}"
        specs = self.spec.tables
        received: dict[torch.dtype, torch.Tensor] = {}
        pending: list[Pending] = []
        keep: list[torch.Tensor] = []
        for dtype in dict.fromkeys(specs[t].sent_dtype(way) for t in tables):
            own = [i for i, t in enumerate(tables) if specs[t].sent_dtype(way) is dtype]
            widths = [specs[tables[i]].sent_width for i in own]
            out = [
                [row[tables[i]] * w for i, w in zip(own, widths, strict=True)]
                for row in sent_counts
            ]
            back = [
                [row[tables[i]] * w for i, w in zip(own, widths, strict=True)]
                for row in received_counts
            ]
            message = by_worker([_sent(values[i], specs[tables[i]]).to(dtype) for i in own], out)
            totals, sent = ([sum(row) for row in rows] for rows in (back, out))
            buffer = torch.empty(sum(totals), dtype=dtype, device=self.world.device)
            self.control.note_load(sent, totals, dtype, group)
            pending.append(
                self.world.all_to_all(buffer, message, totals, sent, purpose, group, most=most)
            )
            received[dtype] = buffer
            keep.append(message)
        return received, pending, keep

    def _unpack(
        self,
        received: dict[torch.dtype, torch.Tensor],
        counts: list[list[int]],
        tables: Sequence[int],
        way: Way,
    ) -> list[torch.Tensor]:
        """In the order of ``tables``, of which one may come more than once."""
        specs = [self.spec.tables[t] for t in tables]
        result: dict[int, torch.Tensor] = {}
        for dtype, buffer in received.items():
            own = [i for i, table in enumerate(specs) if table.sent_dtype(way) is dtype]
            selected = [[row[tables[i]] for i in own] for row in counts]
            flat = by_table(buffer, selected, [specs[i].sent_width for i in own])
            for i, part in zip(own, flat, strict=True):
                result[i] = _whole(part, specs[i])
        return [result[i] for i in range(len(tables))]


def _sent(rows: torch.Tensor, table: TableSpec) -> torch.Tensor:
    """What travels of flat rows, or of their gradients."""
    if table.columns is None:
        return rows
    start, end = table.columns
    return rows.view(-1, table.width)[:, start:end].reshape(-1)


def _whole(sent: torch.Tensor, table: TableSpec) -> torch.Tensor:
    """Rows, or their gradients, of what travelled of them; the rest is 0, which nobody reads."""
    if table.columns is None:
        return sent.view(-1, *table.row_shape).to(table.dtype)
    start, end = table.columns
    part = sent.view(-1, end - start)
    whole = torch.zeros((len(part), table.width), dtype=table.dtype, device=sent.device)
    whole[:, start:end] = part
    return whole.view(-1, *table.row_shape)


def hand_on(table: TableSpec, count: int, ids: torch.Tensor, rows: torch.Tensor) -> Any:
    """A gradient of ``count`` rows of a table, in the form that its update takes.

    Args:
        table: what is known of it.
        count: rows that this worker holds.
        ids: which of them ``rows`` belong to, ascending, each once.
        rows: their gradients.
    """
    shape = (count, *table.row_shape)
    if table.lazy:
        return torch.sparse_coo_tensor(
            ids.view(1, -1), rows, shape, check_invariants=False, is_coalesced=True
        )
    if table.touched:
        return ids, rows
    whole = torch.zeros(shape, dtype=table.dtype, device=rows.device)
    return whole.index_copy_(0, ids, rows)


def by_worker(values: Sequence[torch.Tensor], counts: list[list[int]]) -> torch.Tensor:
    """From one tensor per table to one message: for each worker, its part of every table."""
    if len(values) == 1:
        return values[0].contiguous()
    parts = [value.split([row[t] for row in counts]) for t, value in enumerate(values)]
    return torch.cat([part[w] for w in range(len(counts)) for part in parts])


def by_table(
    message: torch.Tensor, counts: list[list[int]], widths: list[int]
) -> list[torch.Tensor]:
    """The inverse: from one message in worker order to one flat tensor per table."""
    if len(widths) == 1:
        return [message]
    sizes = [count * width for row in counts for count, width in zip(row, widths, strict=True)]
    parts = message.split(sizes)
    tables = len(widths)
    return [torch.cat(parts[t::tables]) for t in range(tables)]
