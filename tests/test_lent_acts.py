"""Passes and updates that a worker's batch leaves out are those of one device all the same."""

from __future__ import annotations

import lent_acts
import pytest
from pool import Pool

NONE, FEW, ALL = (1, 3), (0, 3), (0, 5)
"""Ranges of labels: nothing is for either task, something for the second, for both."""
ONLY_FIRST = (3, 5)
RANGES = [
    (ALL, ALL, ALL),
    (NONE, ALL, FEW),
    (ALL, NONE, ONLY_FIRST),
    (FEW, ONLY_FIRST, NONE),
    (ONLY_FIRST, FEW, NONE),
    (NONE, ALL, ALL),
    (NONE, NONE, NONE),
    (ALL, FEW, NONE),
]
AT_FIRST = [RANGES[3], *RANGES]


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (2, "HYBRID"),
        (3, "HYBRID"),
        *(pytest.param(*others, marks=pytest.mark.long) for others in [(3, "AR"), (2, "PS")]),
        pytest.param(2, "Poseidon", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", lent_acts.STEPS)
def test_what_a_batch_leaves_out_is_that_of_one_device(
    pool: Pool, name: str, size: int, strategy: str
) -> None:
    if strategy in ("PS", "Poseidon") and name in lent_acts.SEVERAL_UPDATES:
        pytest.skip("servers update each variable once")
    ranges = RANGES if (size == 2) == (strategy == "HYBRID") else AT_FIRST
    given = lent_acts.batches([each[:size] for each in ranges])
    for far in pool.run(size, lent_acts.train, name, given, strategy):
        assert far < 1e-12


def test_batches_of_other_sizes_leave_the_same_out(pool: Pool) -> None:
    turns = [(ONLY_FIRST, NONE), (NONE, ONLY_FIRST)] * 3
    given = lent_acts.batches(turns, more=1)
    for far in pool.run(2, lent_acts.train, "heads", given, "HYBRID"):
        assert far < 1e-12


REFUSED = {
    "clips": "updates first.bias, first.weight",
    "decays": "updates first.weight otherwise",
    "forgets": "has gradients of first.bias, or has none",
    "schedules": "steps of optimizers or schedulers (schedule by values ",
}


@pytest.mark.parametrize("at_first", [True, False])
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_for_a_worker_is_refused(pool: Pool, what: str, at_first: bool) -> None:
    """Else their copies would not stay the same."""
    given = lent_acts.batches(
        [(NONE, ONLY_FIRST)] if at_first else [(ALL, ALL), (NONE, ONLY_FIRST)]
    )
    for worker, found in enumerate(pool.run(2, lent_acts.refused, given, what)):
        assert found.startswith(f"DisagreementError: Worker {worker} and worker {1 - worker} are")
        assert REFUSED[what] in found
        assert "Nothing was updated" in found


def test_a_first_batch_without_gradients_on_any_worker_is_refused(pool: Pool) -> None:
    for found, _ in pool.run(2, lent_acts.told_of_none, lent_acts.batches([(NONE, NONE)])):
        assert found.startswith("ModelError: ")
