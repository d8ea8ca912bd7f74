"""Exchange of bags: owners sum the rows of a bag, and its gradient returns once.

A bag of n rows of b bytes travels as b bytes instead of nb. A table lives on one worker, or row i
on worker i mod N, each of which then sends its part of every bag. Where a batch looks up fewer
distinct rows than that, these travel and are summed where they are wanted: each lookup, in each
step, on each worker, takes what is less. A step costs one message of ids and bag sizes,
and per dtype one of values in each direction. Bytes sent per worker and step, for n ids in B
bags, of u distinct rows: (N-1)/N (4n + 4B) for ids and sizes, (N-1)/N bB for bags served to others
and as much for gradients, of tables with one owner each; N times the latter two and the sizes where
rows are dealt out; (N-1)/N (4u + 2bu) where distinct rows travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallax.ops.resources import BagFeature, BagsSpec, TableSpec
from parallax.runtime.comm import Pending, World
from parallax.runtime.control import StepControl
from parallax.runtime.row_ids import id_dtype, within
from parallax.runtime.rows import Places, aggregate, places_of
from parallax.strategy.layout import cyclic_rows

MANY_MORE = 1.5
"""Where a batch has so many more distinct rows than bags ..."""
PATIENCE = 15
"""... they are not counted for so many steps."""

Part = tuple[torch.Tensor, torch.Tensor | None]
"""Local rows of one owner, and how many each bag has of them."""


@dataclass
class _Query:
    """One lookup of this worker."""

    sizes: torch.Tensor
    """Rows in each bag."""
    parts: list[Part]
    """By worker, the local rows to ask it for, and how many each bag has; without, each row of
    them is wanted by itself."""
    distinct: torch.Tensor | None
    """By id, its place among the distinct rows, if these travel."""
    single: bool
    """Whether every bag has one row."""
    values: list[int] = field(init=False)
    """By worker, how many rows of values travel between this one and it."""
    numbers: list[tuple[int, int]] = field(init=False)
    """By worker, how many ids it is sent, and how many bag sizes."""

    def __post_init__(self) -> None:
        self.numbers = [
            (ids.shape[0], 0 if sizes is None else sizes.shape[0]) for ids, sizes in self.parts
        ]
        self.values = [
            ids if part[1] is None else sizes
            for part, (ids, sizes) in zip(self.parts, self.numbers, strict=True)
        ]


@dataclass
class _Served:
    """What this worker sums for one lookup of all workers."""

    ids: torch.Tensor
    """Local rows, worker by worker."""
    sizes: torch.Tensor
    """Rows in each bag, worker by worker."""
    bags: list[int]
    """Number of bags of each worker; a row that is wanted by itself is one."""
    single: bool
    """Whether only rows are wanted."""
    places: Places | None = None
    """Of a table with one lookup, the distinct rows, and where each of ``ids`` is among them."""


@dataclass
class _Message:
    """Values of one dtype under way."""

    received: torch.Tensor
    pending: Pending
    keep: torch.Tensor


@dataclass
class BagRequest:
    """One step's bags: what this worker asked for and what it serves."""

    queries: list[_Query]
    """Per lookup."""
    served: dict[int, _Served]
    """By lookup, for those whose table this worker owns rows of."""
    messages: dict[torch.dtype, _Message] = field(default_factory=dict)


@dataclass
class SentBags:
    """Gradients under way."""

    request: BagRequest
    features: list[int]
    messages: dict[torch.dtype, _Message]


class BagExchange:
    """The runtime of one :class:`BagsSpec`."""

    def __init__(self, spec: BagsSpec, world: World, control: StepControl) -> None:
        self.spec = spec
        self.world = world
        self.control = control
        self.ids = [0] * len(spec.features)
        self.bags = [0] * len(spec.features)
        self.numbers = [0] * len(spec.features)
        """Ids and bag sizes sent, by lookup."""
        self.values = [0] * len(spec.features)
        """Rows or sums of rows received, by lookup."""
        self.steps = 0
        everyone = range(len(spec.features))
        self._to = [
            [f for f in everyone if self._table(f).owner in (None, worker)]
            for worker in range(world.size)
        ]
        """By worker, the lookups that it serves."""
        self._kind = id_dtype(spec.tables)
        self._lookups = Counter(feature.table for feature in spec.features)
        self._patience = [0] * len(spec.features)
        """By lookup, for how many steps to ask for bags without a look at distinct rows."""

    def _table(self, feature: int) -> TableSpec:
        return self.spec.tables[self.spec.features[feature].table]

    def _mine(self) -> list[int]:
        return self._to[self.world.rank]

    # -- Pull -----------------------------------------------------------------------------

    def pull(
        self,
        inputs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        shards: Sequence[torch.Tensor],
    ) -> BagRequest:
        """See :func:`parallax.ops.resources.pull_bags`."""
        queries, bad = self._read(inputs)
        request = BagRequest(queries, self._exchange_ids(queries, bad))
        sums = {
            f: _serve(shards[self.spec.features[f].table].detach(), served)
            for f, served in request.served.items()
        }
        for dtype, own in self._by_dtype(range(len(self.spec.features))):
            parts = {f: sums[f].split(request.served[f].bags) for f in own if f in sums}
            sent = [
                [parts[f][worker].reshape(-1) for f in own if f in parts]
                for worker in range(self.world.size)
            ]
            counts = [self._elements(own, worker, request) for worker in self._workers()]
            request.messages[dtype] = self._start(sent, counts, dtype, "bags: pull")
        # While the sums are under way.
        for f, served in request.served.items():
            if self._lookups[self.spec.features[f].table] == 1:
                served.places = places_of(self._table(f), served.ids.long())
        return request

    def _workers(self) -> range:
        return range(self.world.size)

    def _by_dtype(self, features: Iterable[int]) -> list[tuple[torch.dtype, list[int]]]:
        chosen = list(features)
        dtypes = dict.fromkeys(self._table(f).dtype for f in chosen)
        return [(dtype, [f for f in chosen if self._table(f).dtype is dtype]) for dtype in dtypes]

    def _elements(self, features: list[int], worker: int, request: BagRequest) -> int:
        """Elements of this worker's values that travel between it and ``worker``."""
        served = self._to[worker]
        return sum(
            request.queries[f].values[worker] * self._table(f).width
            for f in features
            if f in served
        )

    def _read(
        self, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[list[_Query], str]:
        """What to ask the owners for, and what is wrong with it."""
        queries, bad = [], ""
        for f, (ids, offsets) in enumerate(inputs):
            table, feature = self._table(f), self.spec.features[f]
            flat = ids.reshape(-1)
            sizes = _bag_sizes(feature, offsets, flat.numel())
            flat, problem = within(table, flat, self.world.rank)
            bad = bad or problem
            query = self._query(f, flat, sizes)
            queries.append(query)
            self.ids[f] += flat.numel()
            self.bags[f] += len(sizes)
            self.values[f] += sum(query.values)
            self.numbers[f] += sum(ids + sizes for ids, sizes in query.numbers)
        self.steps += 1
        return queries, bad

    def _query(self, feature: int, ids: torch.Tensor, sizes: torch.Tensor) -> _Query:
        """Ask for bags, or for the distinct rows if these are fewer."""
        number, table = self.world.size, self._table(feature)
        dealt = table.owner is None
        bags = (number if dealt else 1) * len(sizes)
        if self._patience[feature] and len(ids) > bags:
            self._patience[feature] -= 1
        else:
            stride = table.rows // number + 1
            keys = (ids % number) * stride + ids // number if dealt else ids
            distinct, places = torch.unique(keys, return_inverse=True)
            # Without sizes to send besides.
            if len(distinct) <= bags:
                single = len(ids) == len(sizes) and bool((sizes == 1).all())
                rows = self._by_owner(table, distinct, stride)
                return _Query(sizes, [(part, None) for part in rows], places, single)
            if len(distinct) > MANY_MORE * bags:
                self._patience[feature] = PATIENCE
        nobody: Part = (ids[:0], None)
        parts: list[Part]
        if table.owner is not None:
            parts = [nobody] * number
            parts[table.owner] = (ids, sizes)
            return _Query(sizes, parts, None, False)
        bag = torch.arange(len(sizes), device=ids.device).repeat_interleave(sizes)
        owners = ids % number
        parts = []
        for worker in self._workers():
            own = owners == worker
            lengths = torch.bincount(bag[own], minlength=len(sizes))
            parts.append((ids[own] // number, lengths))
        return _Query(sizes, parts, None, False)

    def _by_owner(self, table: TableSpec, keys: torch.Tensor, stride: int) -> list[torch.Tensor]:
        """Distinct rows by the worker that owns them, by their numbers there."""
        if table.owner is not None:
            return [keys if worker == table.owner else keys[:0] for worker in self._workers()]
        bounds = torch.arange(1, self.world.size, device=keys.device) * stride
        ends = torch.searchsorted(keys, bounds)
        return list((keys % stride).tensor_split(ends.cpu()))

    def _exchange_ids(self, queries: list[_Query], bad: str) -> dict[int, _Served]:
        features = len(queries)
        parts: list[list[torch.Tensor]] = [[] for _ in self._workers()]
        counts = [[0] * (2 * features) for _ in self._workers()]
        for worker in self._workers():
            for f in self._to[worker]:
                ids, sizes = queries[f].parts[worker]
                parts[worker].append(ids)
                if sizes is not None:
                    parts[worker].append(sizes)
                counts[worker][2 * f : 2 * f + 2] = queries[f].numbers[worker]
        mine = self._mine()
        flat = [part for row in parts for part in row]
        sent = torch.cat(flat).to(self._kind) if flat else torch.empty(0, dtype=self._kind)
        received_counts, received = self.control.exchange_ids(
            counts, sent, [sum(row) for row in counts], bad, "bags: ids"
        )
        pieces_by_worker = [
            [n for f in mine for n in row[2 * f : 2 * f + 2]] for row in received_counts
        ]
        pieces = received.split([n for row in pieces_by_worker for n in row])
        step = 2 * len(mine)
        served = {}
        for place, f in enumerate(mine):
            rows, given = pieces[2 * place :: step], pieces[2 * place + 1 :: step]
            each = [
                own if own.shape[0] else torch.ones_like(part)
                for part, own in zip(rows, given, strict=True)
            ]
            bags = [part.shape[0] for part in each]
            single = not any(own.shape[0] for own in given)
            served[f] = _Served(torch.cat(rows), torch.cat(each), bags, single)
        return served

    def _start(
        self, sent: list[list[torch.Tensor]], counts: list[int], dtype: torch.dtype, purpose: str
    ) -> _Message:
        flat = [part for row in sent for part in row]
        message = torch.cat(flat) if flat else torch.empty(0, dtype=dtype)
        received = torch.empty(sum(counts), dtype=dtype, device=self.world.device)
        totals = [sum(part.numel() for part in row) for row in sent]
        pending = self.world.all_to_all(received, message, counts, totals, purpose)
        return _Message(received, pending, message)

    def pulled(self, request: BagRequest) -> list[torch.Tensor]:
        """See :func:`parallax.ops.resources.pulled_bags`."""
        arrived: dict[int, list[torch.Tensor]] = {}
        for dtype, own in self._by_dtype(range(len(self.spec.features))):
            message = request.messages.pop(dtype)
            message.pending.wait()
            order = [(w, f) for w in self._workers() for f in own if f in self._to[w]]
            sizes = [request.queries[f].values[w] * self._table(f).width for w, f in order]
            for (_, f), part in zip(order, message.received.split(sizes), strict=True):
                arrived.setdefault(f, []).append(part.view(-1, *self._table(f).row_shape))
        return [self._bags(f, request.queries[f], parts) for f, parts in sorted(arrived.items())]

    def _bags(self, feature: int, query: _Query, parts: list[torch.Tensor]) -> torch.Tensor:
        """One lookup's bags from what owners sent: distinct rows, or their parts of each bag."""
        if query.distinct is None:
            value = parts[0] if self._table(feature).owner is not None else _sum(parts)
        else:
            rows = parts[0] if len(parts) == 1 else torch.cat(parts)
            if query.single:
                value = rows.index_select(0, query.distinct)
            else:
                value = _sum_bags(rows, query.distinct, query.sizes)
        return self._scaled(feature, query, value)

    def _scaled(self, feature: int, query: _Query, value: torch.Tensor) -> torch.Tensor:
        """Means of bags from their sums, and gradients of the sums from those of the means."""
        if not self.spec.features[feature].mean:
            return value
        sizes = query.sizes.clamp(min=1)
        return value / sizes.view(-1, *[1] * (value.dim() - 1))

    # -- Push -----------------------------------------------------------------------------

    def push(
        self, request: BagRequest, features: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> SentBags:
        """See :func:`parallax.ops.resources.push_bags`."""
        given = dict(zip(features, gradients, strict=True))
        messages = {}
        for dtype, own in self._by_dtype(features):
            values = {f: self._weighted(f, request.queries[f], given[f]) for f in own}
            sent = [
                [values[f][worker] for f in own if f in self._to[worker]]
                for worker in self._workers()
            ]
            mine = [f for f in own if f in request.served]
            counts = [
                sum(request.served[f].bags[worker] * self._table(f).width for f in mine)
                for worker in self._workers()
            ]
            messages[dtype] = self._start(sent, counts, dtype, "bags: push")
        return SentBags(request, list(features), messages)

    def _weighted(self, feature: int, query: _Query, gradient: torch.Tensor) -> list[torch.Tensor]:
        """By worker, the flat gradient of what it sent: of bags' sums, or of distinct rows."""
        table = self._table(feature)
        counts = query.values
        if self.control.is_empty:
            zeros = torch.zeros(sum(counts) * table.width, dtype=table.dtype)
            return list(zeros.to(self.world.device).split([n * table.width for n in counts]))
        gradient = self._scaled(feature, query, gradient)
        if table.average:
            gradient = gradient * (self.control.weight / self.control.total)
        if query.distinct is None:
            return [gradient.reshape(-1)] * self.world.size
        if not query.single:
            total = len(query.distinct)
            gradient = gradient.repeat_interleave(query.sizes, 0, output_size=total)
        rows = gradient.new_zeros((sum(counts), *table.row_shape))
        rows.index_add_(0, query.distinct, gradient)
        return [part.reshape(-1) for part in rows.split(counts)]

    def receive(self, sent: SentBags, tables: Sequence[int]) -> list[Any]:
        """See :func:`parallax.ops.resources.receive_bags`."""
        found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {t: [] for t in tables}
        for dtype, own in self._by_dtype(sent.features):
            message = sent.messages[dtype]
            message.pending.wait()
            mine = [f for f in own if f in sent.request.served]
            sizes = [
                sent.request.served[f].bags[worker] * self._table(f).width
                for worker in self._workers()
                for f in mine
            ]
            parts = message.received.split(sizes)
            for place, f in enumerate(mine):
                table, served = self._table(f), sent.request.served[f]
                bags = torch.cat(parts[place :: len(mine)]).view(-1, *table.row_shape)
                rows = bags
                if not served.single:
                    rows = bags.repeat_interleave(
                        served.sizes.long(), 0, output_size=len(served.ids)
                    )
                found[self.spec.features[f].table].append((served.ids.long(), rows))
        known = sent.request.served
        places = {self.spec.features[f].table: known[f].places for f in sent.features if f in known}
        return [self._aggregated(t, parts, places.get(t)) for t, parts in found.items()]

    def _aggregated(
        self,
        table: int,
        parts: list[tuple[torch.Tensor, torch.Tensor]],
        places: Places | None,
    ) -> Any:
        spec = self.spec.tables[table]
        rank, size, device = self.world.rank, self.world.size, self.world.device
        if not parts:
            none = torch.empty((0, *spec.row_shape), dtype=spec.dtype, device=device)
            parts = [(torch.empty(0, dtype=torch.int64, device=device), none)]
        if spec.owner is None:
            count = cyclic_rows(spec.rows, rank, size)
        else:
            count = spec.rows if spec.owner == rank else 0
        if len(parts) == 1:
            return aggregate(spec, count, *parts[0], places)
        ids = torch.cat([ids for ids, _ in parts])
        return aggregate(spec, count, ids, torch.cat([rows for _, rows in parts]))


def _bag_sizes(feature: BagFeature, offsets: torch.Tensor, ids: int) -> torch.Tensor:
    if not feature.last_offset:
        offsets = torch.cat([offsets, offsets.new_tensor([ids])])
    return offsets.diff()


def _serve(shard: torch.Tensor, served: _Served) -> torch.Tensor:
    if served.single:
        return shard.index_select(0, served.ids)
    return _sum_bags(shard, served.ids, served.sizes)


def _sum_bags(rows: torch.Tensor, ids: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Sums of bags of rows; an empty one is zero."""
    if not len(ids):
        return rows.new_zeros((len(sizes), *rows.shape[1:]))
    sizes = sizes.long()
    sums: torch.Tensor = torch.nn.functional.embedding_bag(
        ids.long(), rows, sizes.cumsum(0) - sizes, mode="sum"
    )
    return sums


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    result = parts[0]
    for part in parts[1:]:
        result.add_(part)
    return result
