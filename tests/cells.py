"""Cells of matrices of cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cells: Iterable[Any], one_in: int) -> list[Any]:
    """Parameters for a test: the usual suite runs one cell in so many, the long checks the rest."""
    return [
        cell
        if number % one_in == 0
        else pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=pytest.mark.long)
        for number, cell in enumerate(cells)
    ]
