"""Columns of a data set as ids of embedding tables: coded, cut into ranges, crossed, hashed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NONE = 0
"""The id of a missing value, in every column that has some."""

# Odd 64-bit numbers of Steele and Vigna's SplitMix: they spread close ids over all rows.
_MULTIPLY, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True)
class Column:
    """A feature of all samples, as ids of one table's rows."""

    name: str
    ids: np.ndarray  # [samples, values of a sample] int64
    rows: int


def coded(name: str, values: np.ndarray) -> Column:
    """One id for each different value; 0 stays free for ``NONE``."""
    different, ids = np.unique(values, return_inverse=True)
    return Column(name, ids.reshape(len(values), 1) + 1, len(different) + 1)


def listed(name: str, values: Sequence[Sequence[str]], most: int) -> Column:
    """Ids of up to ``most`` values of each sample, filled with ``NONE``."""
    number = {value: i for i, value in enumerate(sorted({v for vs in values for v in vs}), 1)}
    ids = np.full((len(values), most), NONE, np.int64)
    for row, found in zip(ids, values, strict=True):
        known = [number[value] for value in found[:most]]
        row[: len(known)] = known
    return Column(name, ids, len(number) + 1)


def ranges(name: str, values: np.ndarray, count: int) -> Column:
    """Which of ``count`` ranges with about as many samples each a number lies in."""
    edges = np.quantile(values, np.linspace(0, 1, count + 1)[1:-1])
    return coded(name, np.searchsorted(edges, values, side="right"))


def cross(left: Column, right: Column, rows: int) -> Column:
    """Each value of one column with each of another, hashed to ``rows`` rows.

    Pairs with a missing value share row ``NONE``, which nothing else has.
    """
    a = left.ids[:, :, None].astype(np.uint64)
    b = right.ids[:, None, :].astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = (a * _MULTIPLY) ^ ((b + np.uint64(1)) * _MIX)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * _MULTIPLY
    hashed = (mixed >> np.uint64(32)) % np.uint64(rows - 1) + np.uint64(1)
    missing = (a == NONE) | (b == NONE)
    ids = np.where(missing, np.uint64(NONE), hashed).astype(np.int64)
    return Column(f"{left.name} x {right.name}", ids.reshape(len(ids), -1), rows)
