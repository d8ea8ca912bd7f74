"""Bags: owners sum rows before they travel; the numbers are those of one device."""

from __future__ import annotations

import bag_steps
import pytest
import torch
from pool import Pool

OPTIMIZERS = [*bag_steps.OPTIMIZERS, "lazy"]
# Three workers and every second of the pairs; the long checks have the other pairs and numbers.
CELLS = [
    pytest.param(
        kind,
        optimizer,
        size,
        marks=[] if size == 3 and (place + turn) % 2 == 0 else [pytest.mark.long],
    )
    for place, kind in enumerate(["whole", "dealt", "some", "rows", "mixed", "hybrid"])
    for turn, optimizer in enumerate(OPTIMIZERS)
    for size in (2, 3, 4)
]


@pytest.mark.parametrize(("kind", "optimizer", "size"), CELLS)
def test_bags_give_the_numbers_of_one_device(
    pool: Pool, kind: str, optimizer: str, size: int
) -> None:
    clip = optimizer in ("adam", "sgd") and size > 2
    for found in pool.run(size, bag_steps.train, kind, optimizer, clip):
        assert found["difference"] <= 1e-10, found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["whole", "dealt", "some"])
def test_sent_bytes_equal_the_formula(pool: Pool, kind: str, size: int) -> None:
    found = pool.run(size, bag_steps.train, kind, "sgd", False)
    assert all(item["tables"] == 3 for item in found)
    sent = sum(item["sent"] for item in found) / size
    formula = sum(item["formula"] for item in found) / size
    assert sent == pytest.approx(formula, rel=0.05)


def test_an_id_out_of_range_is_named_before_anything_is_updated(pool: Pool) -> None:
    for text in pool.run(2, bag_steps.bad_id):
        assert text.startswith("RowIdError: Worker 1 looks up row 13 of table 'a.weight'")
        assert "which has rows 0 to 12. Nothing was updated in this step." in text


@pytest.mark.parametrize("kind", ["whole", "dealt", "some"])
def test_bags_of_several_kinds_that_get_two_gradients(pool: Pool, kind: str) -> None:
    for difference in pool.run(2, bag_steps.several, kind):
        assert difference <= 1e-10


def test_offsets_that_leave_out_ids_are_named_before_anything_is_updated(pool: Pool) -> None:
    for text in pool.run(2, bag_steps.bad_offsets):
        assert text.startswith("RowIdError: Worker 1 looks up bags of table 'a.weight' by offsets")
        assert "do not begin with 0" in text


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["whole", "dealt", "some", "rows"])
def test_workers_without_any_bags(pool: Pool, kind: str, last: bool) -> None:
    assert max(pool.run(2, bag_steps.no_bags, kind, last)) <= 1e-10


def test_hybrid_places_tables_by_what_they_send(pool: Pool) -> None:
    found = pool.run(4, bag_steps.placement)
    assert all(other == found[0] for other in found)
    chosen = found[0]
    assert chosen["huge"] == ("bags", (0, 1, 2))  # larger than two workers' shares
    owners = [chosen[name] for name in ("one", "two", "three")]
    assert {kind for kind, _ in owners} == {"bags"}
    assert len({owner for _, owner in owners}) == 3  # balanced
    assert all(len(owner) == 1 for _, owner in owners)
    assert chosen["flat"][0] in ("rows", "bags")


def test_a_table_that_is_nearly_all_touched_is_summed_whole(pool: Pool) -> None:
    for chosen, difference in pool.run(3, bag_steps.hot_table):
        assert chosen == {"hot.weight": "allreduce", "cold.weight": "rows"}
        assert difference <= 1e-10


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_weights_of_ids_that_are_learned(
    pool: Pool, sparse: bool, dtype: torch.dtype, close: float
) -> None:
    """Their gradients read the table again, by the same ids; of float32, torch describes sparse
    gradients of weighted bags as empty."""
    for chosen, difference in pool.run(2, bag_steps.weighted, sparse, dtype):
        assert chosen == dict.fromkeys(["own.weight", "given.weight", "weights.weight"], "rows")
        assert difference <= close
