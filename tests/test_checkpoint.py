"""States saved by a run and loaded by another: training goes on as if it had never stopped."""

from __future__ import annotations

import checkpoints
import equality
import pytest
from pool import Pool

KINDS = (
    ("sparse", "adam", "none"),
    ("sparse", "adamw", "average"),
    ("several", "momentum", "clip_norm"),
    ("lazy", "sparse_adam", "none"),
    ("tied", "nadam", "average"),
    ("dense", "asgd", "clip_value"),
)


# Every option with one kind; the long checks have all of either.
RESUMED = [
    pytest.param(kind, option, marks=[] if turn == place else [pytest.mark.long])
    for place, kind in enumerate(KINDS)
    for turn, option in enumerate(("HYBRID", "PS", "AR"))
]


@pytest.mark.parametrize(("kind", "option"), RESUMED, ids=str)
def test_a_loaded_state_goes_on(pool: Pool, kind: tuple[str, str, str], option: str) -> None:
    """Loaded before the first step, after it (slots are new), and into a settled run."""
    for size, before in ((2, 0), (3, 1), (2, 2)):
        for difference in pool.run(size, checkpoints.resumed, option, kind, before):
            assert difference <= 1e-10, (size, before, difference)


@pytest.mark.parametrize("kind", KINDS[:4], ids="-".join)
def test_a_state_moves_between_workers_and_options(pool: Pool, kind: tuple[str, str, str]) -> None:
    """Three parts of one training, on 1, 3 and 2 workers, each in another way."""
    state = None
    for part, (size, option) in enumerate(((1, "HYBRID"), (3, "PS"), (2, "HYBRID"))):
        found = pool.run(size, checkpoints.moved, option, kind, state, part)
        state = found[0]
        assert all(equality.difference(state, other) == 0 for other in found)
    expected = checkpoints.throughout(kind)
    assert equality.difference(expected["models"][0], dict(state["net"])) <= 1e-10
    slots = [value["state"] for name, value in state.items() if name.startswith("optimizers")]
    for one, own in zip(expected["optimizers"], slots, strict=True):
        assert equality.difference(one["state"], own) <= 1e-10


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("fresh", [False, True], ids=["trained", "not yet trained"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_table_without_storage_takes_a_state(
    pool: Pool, size: int, fresh: bool, before: int
) -> None:
    for difference in pool.run(size, checkpoints.deferred_table, before, fresh):
        assert difference <= 1e-5


def test_what_the_optimizer_loads_itself_is_not_lost_in_silence(pool: Pool) -> None:
    for text, difference in pool.run(2, checkpoints.loaded_into_the_optimizer):
        assert "The slot 'optimizers.table.weight.exp_avg' was replaced by one without" in text
        assert "load with runner.load_state_dict()" in text
        assert difference <= 1e-10
