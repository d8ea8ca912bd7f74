"""What an owner of tables does for all workers' bags: sums rows, and sums gradients by row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from parallax.runtime.exchange.bag_requests import Family
from parallax.runtime.exchange.grouping import (
    Grouped,
    Memo,
    group,
    numbered,
    spread,
    starts_of,
    sum_rows,
)


@dataclass
class _Rows:
    """Which rows the values of some lookups were made of."""

    grouped: Grouped
    rows: torch.Tensor
    """The distinct ones of each table, table by table."""
    tables: list[int]
    cuts: list[int]
    """By table, where its rows begin; and where the last table's end."""
    value_of: torch.Tensor
    """By id as it was asked for, its value's number."""


@dataclass
class Served:
    """What this worker serves of one step's lookups of a family.

    Ids and values lie lookup by lookup, for each of them worker by worker.
    """

    ids: torch.Tensor
    """As they travelled: of the dtype of ids."""
    sizes: torch.Tensor
    """By value, of how many ids it is the sum."""
    counts: list[list[int]]
    """By served lookup and worker, how many ids."""
    values: list[list[int]]
    """By served lookup and worker, how many values."""
    rows: dict[tuple[int, ...], _Rows] = field(default_factory=dict)
    """By served lookups, what is known of their rows."""


class BagService:
    """An owner's side of a family's exchange."""

    def __init__(self, family: Family, rank: int, device: torch.device) -> None:
        self.family = family
        self.device = device
        self.lookups = [i for i, owners in enumerate(family.owners) if rank in owners]
        """Those whose tables have rows here."""
        self._memo = Memo()
        self._pushed: dict[tuple[int, ...], None] = {}
        """Lookups whose gradients came together."""

    def serve(
        self,
        ids: Sequence[Sequence[torch.Tensor]],
        sizes: Sequence[Sequence[torch.Tensor]],
        shards: Sequence[torch.Tensor],
    ) -> tuple[Served, list[Sequence[torch.Tensor]]]:
        """Sum the rows of bags.

        Args:
            ids: by served lookup and worker, local rows.
            sizes: by the same, how many of them each bag has; none if each is wanted by itself.
            shards: by table, this worker's rows.

        Returns:
            What was served; and by served lookup and worker, the values: [values, width].
        """
        if not self.lookups:
            none = torch.empty(0, dtype=torch.int64, device=self.device)
            return Served(none, none, [], []), []
        counts = [[part.shape[0] for part in row] for row in ids]
        numbers = [[part.shape[0] for part in row] for row in sizes]
        most = max(count for row in counts for count in row)
        one = torch.ones(most, dtype=ids[0][0].dtype, device=self.device)
        lengths = [
            part if number else one[:count]
            for row, given, own in zip(sizes, numbers, counts, strict=True)
            for part, number, count in zip(row, given, own, strict=True)
        ]
        values = [
            [number or count for number, count in zip(given, own, strict=True)]
            for given, own in zip(numbers, counts, strict=True)
        ]
        joined = torch.cat([part for row in ids for part in row])
        served = Served(joined, torch.cat(lengths), counts, values)
        return served, self._sums(served, shards)

    def _sums(self, served: Served, shards: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        result: list[Sequence[torch.Tensor]] = []
        totals = [sum(row) for row in served.counts]
        before = [0, *itertools.accumulate(totals)][:-1]
        values = [sum(row) for row in served.values]
        starts = self._memo.get(
            "starts",
            (before, values, served.ids.dtype),
            lambda: (starts_of(served.sizes) - spread(before, values, self.device)).to(
                served.ids.dtype
            ),
            [served.sizes],
        )
        parts = zip(
            self.lookups, served.ids.split(totals), starts.split(values), served.values, strict=True
        )
        for lookup, ids, begins, numbers in parts:
            shard = shards[self.family.features[lookup].table]
            result.append(sum_rows(shard, ids, begins).split(numbers))
        return result

    def prepare(self, served: Served) -> None:
        """Sort the ids for the gradients that came together before, while values travel."""
        for lookups in self._pushed:
            served.rows[lookups] = self._rows(served, lookups)

    def _rows(self, served: Served, lookups: tuple[int, ...]) -> _Rows:
        family = self.family
        places = [self.lookups.index(lookup) for lookup in lookups]
        totals = [sum(row) for row in served.counts]
        values = [sum(row) for row in served.values]
        ids, sizes = served.ids, served.sizes
        if places != list(range(len(totals))):
            every, lengths = ids.split(totals), sizes.split(values)
            ids = torch.cat([ids[:0], *(every[place] for place in places)])
            sizes = torch.cat([sizes[:0], *(lengths[place] for place in places)])
        spans = {family.features[i].table: family.rows_of_owner(i) for i in lookups}
        tables = list(spans)
        bases = [0, *itertools.accumulate(spans.values())]
        base_of = dict(zip(tables, bases, strict=False))
        first = [base_of[family.features[lookup].table] for lookup in lookups]
        own = [totals[place] for place in places]
        firsts = self._memo.get("keys", (first, own), lambda: spread(first, own, self.device))
        keys = ids + firsts
        grouped = group(keys, bases[-1])
        edges = self._memo.get("edges", bases, lambda: torch.tensor(bases, device=self.device))
        cuts = torch.searchsorted(grouped.keys, edges).tolist()
        rows = ids.index_select(0, grouped.first()).long()
        value_of = self._memo.get("values", lookups, lambda: numbered(sizes, len(ids)), [sizes])
        return _Rows(grouped, rows, tables, cuts, value_of)

    def aggregate(
        self, served: Served, lookups: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """By table, the distinct rows that were read here and the sums of their gradients.

        Args:
            served: what was served.
            lookups: of those served, the ones whose gradients came.
            gradients: of their values, flat, lookup by lookup, for each worker by worker.
        """
        key = tuple(lookups)
        if not key:
            return {}
        self._pushed[key] = None
        rows = served.rows.get(key) or self._rows(served, key)
        values = torch.cat(list(gradients)).view(-1, self.family.width)
        sums = rows.grouped.sums(values, rows.value_of)
        return {
            table: (rows.rows[start:end], sums[start:end])
            for table, (start, end) in zip(rows.tables, itertools.pairwise(rows.cuts), strict=True)
        }
