"""Means over some of the batch are those of one device, whatever workers' batches leave out."""

from __future__ import annotations

import itertools
from typing import Any

import divisor_losses
import divisors
import pytest
import torch
from cells import sampled
from pool import Pool

DIVISION = [(4, 4, 4, 4), (6, 2, 3, 5), (3, -2, 1, -1), (5, 0, 0, 2), (2, 2, 7, 1)]
"""By step and worker, rows; fewer than none where every label is left out."""
ROUNDING = 1e-12
ROUNDING_OF_HALVES = 5e-3
TOTALS = 1552
"""Bytes of a message of totals."""


@pytest.mark.parametrize("name", divisor_losses.ALIKE)
def test_the_numbers_of_one_device(pool: Pool, name: str) -> None:
    division = [counts[:2] for counts in DIVISION]
    for far, sent in pool.run(2, divisors.train, name, division, {}):
        assert far < ROUNDING
        assert sent == (0 if name == "all labels" else TOTALS * len(division))


@pytest.mark.parametrize("name", divisor_losses.SELECTED)
def test_means_over_selections(pool: Pool, name: str) -> None:
    division = [counts[:2] for counts in DIVISION]
    for far, sent in pool.run(2, divisors.train, name, division, {}):
        assert far < (ROUNDING_OF_HALVES if name == "halves" else ROUNDING)
        assert sent == TOTALS * len(division)


SPARSE = [(1, 1, 1), (2, -1, 1), (-2, 1, 3), (-1, -1, 2), (1, 0, 1), (4, 4, 4), (1, -3, 1)]
"""By step and worker, rows; few, so that some workers have no label of a kind."""


@pytest.mark.parametrize("name", divisor_losses.LEFT_OUT)
@pytest.mark.parametrize(("size", "first"), [(2, 0), (3, 3)])
def test_terms_that_some_workers_leave_out(pool: Pool, name: str, size: int, first: int) -> None:
    division = [counts[:size] for counts in SPARSE[first:] + SPARSE[:first]]
    for far, sent in pool.run(size, divisors.train, name, division, {}):
        assert far < ROUNDING
        assert sent == TOTALS * len(division) * (size - 1)


@pytest.mark.parametrize("name", divisor_losses.WEIGHTED)
def test_means_with_learned_weights(pool: Pool, name: str) -> None:
    """Their gradients are of means, too, so these have to be those of all batches."""
    division = [counts[:2] for counts in DIVISION]
    # One over an integer is float32.
    rounding = 1e-6 if name == "one over" else ROUNDING
    for far, sent in pool.run(2, divisors.train_weighted, name, division):
        assert far < rounding
        assert sent == TOTALS * len(division)


LEFT_ALONE = (
    "another division",
    "no sum above",
    "a mean of other things",
    "classes that are there",
)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_means_that_a_loss_is_no_sum_of_have_a_line(name: str) -> None:
    loss = divisor_losses.OTHERS[name]
    assert "divisor_losses.py" in divisors.line_left_alone(lambda net, x, y: loss(net(x), y))


@pytest.mark.parametrize(("counted", "is_told"), [(False, True), (True, False)])
def test_a_number_of_the_batch_that_divides_more_than_a_sum_over_it_is_told(
    counted: bool, is_told: bool
) -> None:
    assert ("divisors.py" in divisors.line_of_sums_by_inputs(counted)) is is_told


def test_tasks_that_are_weighted_at_once_have_a_line() -> None:
    assert "divisor_losses.py" in divisors.line_left_alone(divisors.of_tasks_at_once)


@pytest.mark.parametrize("name", [*divisor_losses.ALIKE, *divisor_losses.SELECTED])
def test_means_that_are_those_of_all_batches_have_none(name: str) -> None:
    loss = {**divisor_losses.ALIKE, **divisor_losses.SELECTED}[name]
    assert not divisors.line_left_alone(lambda net, x, y: loss(net(x), y))


@pytest.mark.parametrize("name", divisor_losses.WEIGHTED)
def test_nor_have_they_with_learned_weights(name: str) -> None:
    assert not divisors.line_left_alone(divisor_losses.WEIGHTED[name])


@pytest.mark.parametrize("last", [1, 4])
def test_sums_over_the_boxes_of_images(last: int) -> None:
    """The box of an image that has one is not an addition that keeps a number from being zero."""
    assert divisors.of_boxes(last) == 1


@pytest.mark.parametrize("kind", ["float", "tensor", "object", "state"])
def test_a_loss_that_is_multiplied_as_a_whole(pool: Pool, kind: str) -> None:
    division = [counts[:2] for counts in DIVISION]
    for far, sent in pool.run(2, divisors.train_scaled, kind, division):
        assert far < ROUNDING
        assert sent == TOTALS * len(division)


@pytest.mark.parametrize("division", [[(4, 4), (6, 2), (3, 5), (3, 3)], [(4, 4), (2, 6)]], ids=str)
def test_several_backward_passes(pool: Pool, division: list[tuple[int, int]]) -> None:
    """All their divisors are known before the first, where sizes are symbols as well."""
    for far, sent in pool.run(2, divisors.train_in_passes, division):
        assert far < ROUNDING
        assert sent == TOTALS * len(division)


@pytest.mark.parametrize("name", divisors.BEGUN)
def test_backward_passes_that_begin_with_other_numbers(pool: Pool, name: str) -> None:
    division = [counts[:2] for counts in DIVISION]
    for far, sent in pool.run(2, divisors.train_begun, name, division):
        assert far < ROUNDING
        assert sent == TOTALS * len(division)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_sets_of_equal_numbers_are_told_apart(rows: int) -> None:
    """Also if they have as many elements as there are micro-batches."""
    assert divisors.uses_of_micro_batches(rows) == [1] * 6


KINDS = (int, float, torch.Tensor)


@pytest.mark.parametrize(
    ("name", "kind"), sampled(itertools.product(divisor_losses.GIVEN, KINDS), 8), ids=str
)
def test_sums_that_are_divided_by_a_number_that_comes_with_the_batch(
    pool: Pool, name: str, kind: type
) -> None:
    division = [counts[:2] for counts in ((4, 4), (6, 2), (1, 3), (5, 1), (2, 2), (7, 1))]
    for far, sent in pool.run(2, divisors.train_given, name, kind, division, {}):
        assert far < ROUNDING
        assert sent == TOTALS * len(division)


LENGTHS = [
    [[3, 4], [5, 2], [1, 4]],
    [[6], [2, 3, 3], [4]],
    [[1, 1, 1], [9, 2], [3, 3]],
    [[2, 5], [], [7]],
    [[8, 8], [3], [1, 2, 3]],
    [[1], [2, 1], [4]],
    [[3], [1], [1, 1]],
]
"""By step and worker, lengths of sequences."""


@pytest.mark.parametrize("name", divisor_losses.PACKED)
@pytest.mark.parametrize(("size", "strategy"), [(2, "HYBRID"), (3, "PS")])
def test_batches_without_rows_count_by_what_means_are_over(
    pool: Pool, name: str, size: int, strategy: str
) -> None:
    division = [parts[:size] for parts in LENGTHS]
    given = {"strategy": strategy}
    for far, sent in pool.run(size, divisors.train_packed, name, division, given):
        assert far < ROUNDING
        assert sent == TOTALS * len(division) * (size - 1)


@pytest.mark.parametrize(("sizes", "count"), [((3, 2), 1), ((3, 3), 0)])
def test_differing_terms_are_told_once(pool: Pool, sizes: tuple[int, int], count: int) -> None:
    told = pool.run(2, divisors.told_of_pieces, sizes)
    assert list(map(len, told)) == [count, 0]


STRATEGIES = ["PS", "ZeRO", "Poseidon", "ProjectAdam", "Horovod", "RandomAxis", "auto"]
NAMES = ["labels left out", "mask", "with a mean over rows", "pieces"]


@pytest.mark.parametrize(
    ("name", "strategy", "size"),
    sampled(itertools.product(NAMES, STRATEGIES, (3, (0, 0, 1, 1))), 8),
    ids=str,
)
def test_however_variables_are_synchronised(
    pool: Pool, name: str, strategy: str, size: int | tuple[int, ...]
) -> None:
    workers = size if isinstance(size, int) else len(size)
    division = [counts[:workers] for counts in DIVISION]
    for far, _ in pool.run(size, divisors.train, name, division, {"strategy": strategy}):
        assert far < ROUNDING


@pytest.mark.parametrize("name", divisor_losses.OTHERS)
def test_what_is_no_such_mean(pool: Pool, name: str) -> None:
    division = [counts[:2] for counts in DIVISION[:2]]
    for far, sent in pool.run(2, divisors.train, name, division, {}):
        # How many rows are chosen is no multiple of those that there are.
        assert far < ROUNDING or name == "another division"
        assert sent == 0


@pytest.mark.parametrize(
    "settings",
    [{"weigh_batches": False}, {"average_dense": False, "average_sparse": False}],
    ids=str,
)
def test_not_where_batches_are_not_weighed(pool: Pool, settings: dict[str, Any]) -> None:
    division = [counts[:2] for counts in DIVISION[:2]]
    for far, sent in pool.run(2, divisors.train, "labels left out", division, settings):
        assert sent == 0
        assert far > 1e-4
