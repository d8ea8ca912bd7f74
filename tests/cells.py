"""Cells of matrices of cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest


def sampled(cells: Iterable[Any], one_in: int, long_in: int = 1) -> list[Any]:
    """Parameters for a test: the usual suite runs one cell in so many, the long checks one in
    ``long_in`` of all, the exhaustive ones the rest."""
    return _marked(
        cells,
        lambda number: number % one_in == 0,
        lambda number: number % long_in == 0,
    )


def each_once(names: Iterable[Any], settings: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters for a test of all names with all settings: the usual suite runs each name once,
    with one setting after the other, the long checks with one more, the exhaustive ones the
    rest."""
    cells = [(name, *setting) for name in names for setting in settings]
    count = len(settings)
    return _marked(
        cells,
        lambda number: number % count == number // count % count,
        lambda number: number % count == (number // count + 1) % count,
    )


def _marked(
    cells: Iterable[Any], is_usual: Callable[[int], bool], is_long: Callable[[int], bool]
) -> list[Any]:
    """Cells with the mark of what runs them, by their number."""

    def marks(number: int) -> tuple[pytest.MarkDecorator, ...]:
        if is_usual(number):
            return ()
        return (pytest.mark.long if is_long(number) else pytest.mark.exhaustive,)

    return [
        pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=marks(number))
        for number, cell in enumerate(cells)
    ]


THINNED = {
    "test_ahead.py::test_numbers_are_those_of_one_device": 3,
    "test_alone.py::test_bags_of_every_kind_have_the_numbers_of_the_plain_step": 2,
    "test_assertions.py::test_all_workers_raise_what_one_finds": 2,
    "test_assertions.py::test_nothing_is_left_under_way": 3,
    "test_assertions.py::test_one_worker": 3,
    "test_axes.py::test_any_cut_gives_the_numbers_of_one_device": 2,
    "test_bags.py::test_bags_give_the_numbers_of_one_device": 3,
    "test_bags.py::test_sent_bytes_equal_the_formula": 2,
    "test_batch_norms.py::test_workers_whose_batches_differ": 2,
    "test_branches.py::test_workers_may_decide_on_other_gradients": 3,
    "test_bytes.py::test_sent_bytes_equal_the_formula": 3,
    "test_checkpoint.py::test_a_loaded_state_goes_on": 2,
    "test_compared_rows.py::test_the_numbers_of_one_device": 2,
    "test_compiled.py::test_regions_give_the_same_numbers": 4,
    "test_conversions.py::test_what_python_makes_of_numbers": 2,
    "test_divisors.py::test_batches_without_rows_count_by_what_means_are_over": 4,
    "test_divisors.py::test_however_variables_are_synchronised": 2,
    "test_divisors.py::test_means_over_selections": 2,
    "test_divisors.py::test_means_with_learned_weights": 2,
    "test_divisors.py::test_terms_that_some_workers_leave_out": 2,
    "test_divisors.py::test_the_numbers_of_one_device": 3,
    "test_endings.py::test_all_workers_leave_the_update_out": 3,
    "test_endings.py::test_one_worker": 4,
    "test_endings.py::test_several_hosts": 3,
    "test_equality.py::test_equals_one_device": 3,
    "test_errors_workers.py::test_uneven_and_empty_batches_weigh_as_many_rows_as_they_have": 3,
    "test_errors_workers.py::test_what_is_not_finite_passes_as_in_torch": 2,
    "test_example_equality.py::test_example_equals_one_device": 2,
    "test_guesses.py::test_a_step_that_is_run_again_leaves_nothing_behind": 2,
    "test_host_sums.py::test_gradients_that_are_changed_are_ones_own": 2,
    "test_in_parts.py::test_messages_between_two_are_cut": 2,
    "test_in_parts.py::test_numbers_are_those_of_one_device": 4,
    "test_indexing.py::test_compiled_regions_know_no_places": 2,
    "test_indexing.py::test_one_graph_holds_for_all_places": 2,
    "test_kept_rows.py::test_the_state_of_one_device": 2,
    "test_late.py::test_examples": 2,
    "test_late.py::test_numbers_are_those_of_one_device": 2,
    "test_late.py::test_without_tables_the_last_bucket_is_not_late": 2,
    "test_launch_stops.py::test_a_failing_worker_ends_all": 2,
    "test_leftovers.py::test_what_is_cached_is_computed_anew": 2,
    "test_lent_acts.py::test_what_a_batch_leaves_out_is_that_of_one_device": 2,
    "test_lookups.py::test_lookup_equals_one_device": 2,
    "test_paper_tables.py::test_placement_changes_bytes_and_no_numbers": 2,
    "test_partial_rows.py::test_training_equals_one_device": 2,
    "test_recorded.py::test_recorded_regions_give_the_same_numbers": 3,
    "test_recorded.py::test_shapes_that_come_often_are_recorded": 2,
    "test_reductions.py::test_sums_give_the_numbers_of_one_device": 2,
    "test_updates.py::test_the_numbers_are_those_of_eager_training": 2,
    "test_user_steps.py::test_the_numbers_of_one_device": 3,
    "test_varying_sizes.py::test_one_worker_captures_once_more": 2,
    "test_varying_sizes.py::test_workers_whose_batches_differ_in_size": 3,
    "test_weights.py::test_all_workers_count_in_the_same_way": 2,
    "test_weights.py::test_workers_may_go_backward_in_several_numbers_of_pieces": 2,
    "test_weights.py::test_workers_may_make_gradients_in_another_order": 2,
    "test_whole_losses.py::test_what_cannot_be_put_together": 2,
}
"""By test, of how many of its cells the usual suite runs one; the long checks run the rest. These
took longest when the suite took more than its fifteen minutes."""


def beyond(names: Iterable[str]) -> Iterator[bool]:
    """Whether the long checks run a test, for tests of the usual suite in their order.

    Args:
        names: of files and tests, without cells.
    """
    seen: Counter[str] = Counter()
    for name in names:
        yield seen[name] % THINNED.get(name, 1) != 0
        seen[name] += 1
