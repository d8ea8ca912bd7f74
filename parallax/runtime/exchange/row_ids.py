"""Find ids of rows that a table does not have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallax.ops.specs import RowIdsSpec, TableSpec
from parallax.runtime.comm.control import StepControl, row_id_error


class RowIdCheck:
    """The runtime of one :class:`RowIdsSpec`."""

    def __init__(self, spec: RowIdsSpec, control: StepControl) -> None:
        self._spec = spec
        self._control = control

    def check(self, ids: torch.Tensor, tables: tuple[int, ...]) -> torch.Tensor:
        """See :func:`parallax.ops.resources.checked_ids`."""
        if not ids.numel():
            return ids
        low, high = bounds(ids)
        for table in tables:
            name, rows, wraps = self._spec.tables[table]
            if (-rows if wraps else 0) <= low and high < rows:
                continue
            problem = bad_row(self._control.world.rank, name, rows, high if high >= rows else low)
            if not self._spec.shared:
                raise row_id_error(problem)
            # All workers hear of it with the control words; until then compute with valid rows.
            step = self._control.step
            step.failure = step.failure or problem
            ids = ids.clamp(0, max(rows - 1, 0))
        return ids


def bounds(ids: torch.Tensor) -> tuple[int, int]:
    """The lowest and the highest of some ids; a device is waited for once."""
    low, high = torch.stack(torch.aminmax(ids)).tolist()
    return low, high


def within(table: TableSpec, ids: torch.Tensor, worker: int) -> tuple[torch.Tensor, str]:
    """Ids that can be computed with, and what was wrong with them, if anything."""
    if not ids.numel():
        return ids, ""
    low, high = bounds(ids)
    if low >= 0 and high < table.rows:
        return ids, ""
    problem = bad_row(worker, table.name, table.rows, low if low < 0 else high)
    return ids.clamp(0, max(table.rows - 1, 0)), problem


def id_dtype(tables: Sequence[TableSpec]) -> torch.dtype:
    """What ids of these tables travel as."""
    return torch.int32 if max(table.rows for table in tables) < 2**31 else torch.int64


def bad_row(worker: int, name: str, rows: int, identifier: int) -> str:
    """What is wrong with an id."""
    return (
        f"Worker {worker} looks up row {identifier} of table {name!r}, which has rows 0 to "
        f"{rows - 1}. Nothing was updated in this step."
    )
