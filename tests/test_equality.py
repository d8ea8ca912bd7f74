"""Invariant 1: k distributed steps give the numbers of k single-device steps on the whole batch."""

from __future__ import annotations

import random

import equality
import pytest
from pool import Pool

OPTIONS = ("HYBRID", "PS", "AR")
# One optimizer of each family on every world size; all the others are in the long matrix.
SHORT = {"momentum", "adam", "adagrad", "radam", "sparse_adam"}


def _short(model: str, size: int) -> list[tuple[str, str, str]]:
    return [
        (m, optimizer, between)
        for m, optimizer, between in equality.all_cases()
        if m == model and optimizer in SHORT
    ]


# The long matrix has every option at every size.
WORLDS = [("HYBRID", 1), ("HYBRID", 3), ("PS", 4), ("AR", 3)]


@pytest.mark.parametrize(("option", "size"), WORLDS)
@pytest.mark.parametrize("model", equality.MODELS)
def test_equals_one_device(pool: Pool, option: str, model: str, size: int) -> None:
    cases = _short(model, size)
    # Rotating over the matrix keeps the suite short; the long checks take the other cases.
    chosen = cases[(size + OPTIONS.index(option)) % 6 :: 6]
    for found in pool.run(size, equality.compare, option, chosen):
        assert set(found) == {"-".join(case) for case in chosen}
        assert max(found.values()) < 1e-10, found


def _matrix(pool: Pool, option: str, size: int, cases: list[tuple[str, str, str]]) -> None:
    worst: dict[str, float] = {}
    for start in range(0, len(cases), 20):
        part = cases[start : start + 20]
        for found in pool.run(size, equality.compare, option, part):
            for name, value in found.items():
                worst[name] = max(value, worst.get(name, 0.0))
    assert len(worst) == len(cases)
    assert max(worst.values()) < 1e-10, {n: v for n, v in worst.items() if not v < 1e-10}


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_case(pool: Pool, option: str, size: int) -> None:
    """Each case of the matrix with one option at one size, dealt at random."""
    cases = equality.all_cases()
    random.Random(equality.SEED).shuffle(cases)
    _matrix(pool, option, size, cases[4 * OPTIONS.index(option) + size - 1 :: 12])


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("option", OPTIONS)
def test_whole_matrix(pool: Pool, option: str, size: int) -> None:
    _matrix(pool, option, size, equality.all_cases())
