"""Exchange of bags: owners sum the rows of a bag, and its gradient returns once.

A bag of n rows of b bytes travels as b bytes instead of nb. A table lives on one worker, or row i
on worker i mod N, each of which then sends its part of every bag. A step costs one message of
counts, one of ids and bag sizes, and per dtype one of bags in each direction. Bytes sent per worker
and step, for n ids in B bags of tables with one owner each: (N-1)/N (4n + 4B) for ids and sizes,
(N-1)/N bB for bags served to others, and the same for gradients; N times the latter two and the
sizes where rows are dealt out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallax.ops.resources import BagFeature, BagsSpec, TableSpec
from parallax.runtime.comm import Pending, World
from parallax.runtime.control import INTEGERS, StepControl
from parallax.runtime.row_ids import bad_row
from parallax.runtime.rows import aggregate
from parallax.strategy.layout import cyclic_rows


@dataclass
class _Served:
    """What this worker sums for one lookup of all workers."""

    ids: torch.Tensor
    """Local rows, worker by worker."""
    sizes: torch.Tensor
    """Rows in each bag, worker by worker."""
    bags: list[int]
    """Number of bags of each worker."""


@dataclass
class _Message:
    """Values of one dtype under way."""

    received: torch.Tensor
    pending: Pending
    keep: torch.Tensor


@dataclass
class BagRequest:
    """One step's bags: what this worker asked for and what it serves."""

    bags: list[int]
    """Per lookup, how many bags this worker's batch has."""
    sizes: list[torch.Tensor]
    """Per lookup, the rows in each of them."""
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
        self.steps = 0
        everyone = range(len(spec.features))
        self._to = [
            [f for f in everyone if self._table(f).owner in (None, worker)]
            for worker in range(world.size)
        ]
        """By worker, the lookups that it serves."""
        self._kind = torch.int32 if max(t.rows for t in spec.tables) < 2**31 else torch.int64

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
        flats, sizes, bad = self._read(inputs)
        request = self._exchange_ids(flats, sizes, bad)
        sums = {
            f: _sum_bags(shards[self.spec.features[f].table].detach(), served)
            for f, served in request.served.items()
        }
        for dtype, own in self._by_dtype(range(len(self.spec.features))):
            parts = {f: sums[f].split(request.served[f].bags) for f in own if f in sums}
            sent = [
                [parts[f][worker].reshape(-1) for f in own if f in parts]
                for worker in range(self.world.size)
            ]
            counts = [self._elements(own, worker, request.bags) for worker in self._workers()]
            request.messages[dtype] = self._start(sent, counts, dtype, "bags: pull")
        return request

    def _workers(self) -> range:
        return range(self.world.size)

    def _by_dtype(self, features: Iterable[int]) -> list[tuple[torch.dtype, list[int]]]:
        chosen = list(features)
        dtypes = dict.fromkeys(self._table(f).dtype for f in chosen)
        return [(dtype, [f for f in chosen if self._table(f).dtype is dtype]) for dtype in dtypes]

    def _elements(self, features: list[int], worker: int, bags: list[int]) -> int:
        """Elements of this worker's bags that travel between it and ``worker``."""
        served = self._to[worker]
        return sum(bags[f] * self._table(f).width for f in features if f in served)

    def _read(
        self, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
        """Flat ids and bag sizes per lookup, and what is wrong with them."""
        flats, sizes, bad = [], [], ""
        for f, (ids, offsets) in enumerate(inputs):
            table, feature = self._table(f), self.spec.features[f]
            flat = ids.reshape(-1)
            if flat.numel():
                low, high = (int(bound) for bound in torch.aminmax(flat))
                if low < 0 or high >= table.rows:
                    identifier = low if low < 0 else high
                    bad = bad or bad_row(self.world.rank, table.name, table.rows, identifier)
                    flat = flat.clamp(0, max(table.rows - 1, 0))
            flats.append(flat)
            sizes.append(_bag_sizes(feature, offsets, flat.numel()))
            self.ids[f] += flat.numel()
            self.bags[f] += len(sizes[-1])
        self.steps += 1
        return flats, sizes, bad

    def _exchange_ids(
        self, flats: list[torch.Tensor], sizes: list[torch.Tensor], bad: str
    ) -> BagRequest:
        features = len(flats)
        parts: list[list[torch.Tensor]] = [[] for _ in self._workers()]
        counts = [[0] * features for _ in self._workers()]
        bags = [len(s) for s in sizes]
        for f, (flat, own) in enumerate(zip(flats, sizes, strict=True)):
            for worker, (ids, lengths) in self._deal(self._table(f), flat, own):
                parts[worker] += [ids.to(self._kind), lengths.to(self._kind)]
                counts[worker][f] = len(ids)
        received_counts = self._exchange_counts(counts, bags, bad)
        mine = self._mine()
        pieces_by_worker = [
            [n for f in mine for n in (row[f], row[features + f])] for row in received_counts
        ]
        sent = torch.cat([part for row in parts for part in row] or [torch.empty(0)]).to(self._kind)
        totals = [sum(row) for row in pieces_by_worker]
        received = torch.empty(sum(totals), dtype=self._kind, device=self.world.device)
        sent_totals = [sum(len(part) for part in row) for row in parts]
        self.world.all_to_all(received, sent, totals, sent_totals, "bags: ids").wait()
        pieces = received.split([n for row in pieces_by_worker for n in row])
        served = {}
        step = 2 * len(mine)
        for place, f in enumerate(mine):
            served[f] = _Served(
                torch.cat(pieces[2 * place :: step]),
                torch.cat(pieces[2 * place + 1 :: step]),
                [row[features + f] for row in received_counts],
            )
        return BagRequest(bags, sizes, served)

    def _deal(
        self, table: TableSpec, ids: torch.Tensor, sizes: torch.Tensor
    ) -> Iterable[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """For each owner, the local rows of its ids and how many each bag has."""
        if table.owner is not None:
            yield table.owner, (ids, sizes)
            return
        number = self.world.size
        bag = torch.arange(len(sizes), device=ids.device).repeat_interleave(sizes)
        owners = ids % number
        for worker in self._workers():
            own = owners == worker
            yield worker, (ids[own] // number, torch.bincount(bag[own], minlength=len(sizes)))

    def _exchange_counts(
        self, counts: list[list[int]], bags: list[int], bad: str
    ) -> list[list[int]]:
        """By worker, how many ids and bags of each lookup it sends here; with control words."""
        size, width = self.world.size, INTEGERS + 2 * len(bags)
        words = self.control.integers(bad)
        sent = torch.tensor([[*words, *row, *bags] for row in counts], device=self.world.device)
        received = torch.empty_like(sent)
        self.world.all_to_all(
            received.view(-1), sent.view(-1), [width] * size, [width] * size, "bags: counts"
        ).wait()
        table = received.tolist()
        self.control.check_integers([row[:INTEGERS] for row in table])
        return [row[INTEGERS:] for row in table]

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
        result: dict[int, torch.Tensor] = {}
        for dtype, own in self._by_dtype(range(len(self.spec.features))):
            message = request.messages.pop(dtype)
            message.pending.wait()
            order = [f for worker in self._workers() for f in own if f in self._to[worker]]
            sizes = [request.bags[f] * self._table(f).width for f in order]
            for f, part in zip(order, message.received.split(sizes), strict=True):
                known = result.get(f)
                result[f] = part if known is None else known.add_(part)
        return [
            self._scaled(f, request, value.view(-1, *self._table(f).row_shape))
            for f, value in sorted(result.items())
        ]

    def _scaled(self, feature: int, request: BagRequest, value: torch.Tensor) -> torch.Tensor:
        """Means of bags from their sums, and gradients of the sums from those of the means."""
        if not self.spec.features[feature].mean:
            return value
        sizes = request.sizes[feature].clamp(min=1)
        return value / sizes.view(-1, *[1] * (value.dim() - 1))

    # -- Push -----------------------------------------------------------------------------

    def push(
        self, request: BagRequest, features: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> SentBags:
        """See :func:`parallax.ops.resources.push_bags`."""
        given = dict(zip(features, gradients, strict=True))
        messages = {}
        for dtype, own in self._by_dtype(features):
            values = {f: self._weighted(f, request, given[f]) for f in own}
            sent = [[values[f] for f in own if f in self._to[worker]] for worker in self._workers()]
            mine = [f for f in own if f in request.served]
            counts = [
                sum(request.served[f].bags[worker] * self._table(f).width for f in mine)
                for worker in self._workers()
            ]
            messages[dtype] = self._start(sent, counts, dtype, "bags: push")
        return SentBags(request, list(features), messages)

    def _weighted(self, feature: int, request: BagRequest, gradient: torch.Tensor) -> torch.Tensor:
        """A flat gradient of the bags' sums, in a buffer of our own."""
        table = self._table(feature)
        if self.control.is_empty:
            count = request.bags[feature] * table.width
            return torch.zeros(count, dtype=table.dtype, device=self.world.device)
        gradient = self._scaled(feature, request, gradient)
        if table.average:
            gradient = gradient * (self.control.weight / self.control.total)
        return gradient.reshape(-1)

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
                rows = bags.repeat_interleave(served.sizes.long(), 0, output_size=len(served.ids))
                found[self.spec.features[f].table].append((served.ids.long(), rows))
        return [self._aggregated(t, parts) for t, parts in found.items()]

    def _aggregated(self, table: int, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        spec = self.spec.tables[table]
        rank, size, device = self.world.rank, self.world.size, self.world.device
        if not parts:
            none = torch.empty((0, *spec.row_shape), dtype=spec.dtype, device=device)
            parts = [(torch.empty(0, dtype=torch.int64, device=device), none)]
        if spec.owner is None:
            count = cyclic_rows(spec.rows, rank, size)
        else:
            count = spec.rows if spec.owner == rank else 0
        ids = torch.cat([ids for ids, _ in parts])
        return aggregate(spec, count, ids, torch.cat([rows for _, rows in parts]))


def _bag_sizes(feature: BagFeature, offsets: torch.Tensor, ids: int) -> torch.Tensor:
    if not feature.last_offset:
        offsets = torch.cat([offsets, offsets.new_tensor([ids])])
    return offsets.diff()


def _sum_bags(shard: torch.Tensor, served: _Served) -> torch.Tensor:
    """Sums of the served bags; a bag without rows here is zero."""
    sizes = served.sizes.long()
    if not len(served.ids):
        return shard.new_zeros((len(sizes), *shard.shape[1:]))
    offsets = sizes.cumsum(0) - sizes
    sums: torch.Tensor = torch.nn.functional.embedding_bag(
        served.ids.long(), shard, offsets, mode="sum"
    )
    return sums
