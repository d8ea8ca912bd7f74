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
    "test_assertions.py::test_nothing_is_left_under_way": 6,
    "test_assertions.py::test_one_worker": 3,
    "test_axes.py::test_any_cut_gives_the_numbers_of_one_device": 2,
    "test_bags.py::test_bags_give_the_numbers_of_one_device": 6,
    "test_bags.py::test_sent_bytes_equal_the_formula": 2,
    "test_bags.py::test_workers_without_any_bags": 2,
    "test_batch_norms.py::test_compiled_without_running_statistics": 2,
    "test_batch_norms.py::test_the_numbers_of_one_device": 2,
    "test_batch_norms.py::test_workers_whose_batches_differ": 4,
    "test_batch_statistics.py::test_the_numbers_of_one_device": 4,
    "test_branches.py::test_workers_may_decide_on_other_gradients": 12,
    "test_branches.py::test_workers_may_decide_to_read_no_row_of_a_table": 3,
    "test_by_host.py::test_two_levels_give_the_numbers_of_one_device": 2,
    "test_by_host.py::test_what_crosses_equals_the_formula": 3,
    "test_bytes.py::test_sent_bytes_equal_the_formula": 6,
    "test_checkpoint.py::test_a_loaded_state_goes_on": 4,
    "test_checkpoint.py::test_a_state_moves_between_workers_and_options": 3,
    "test_checkpoint.py::test_a_table_without_storage_takes_a_state": 2,
    "test_checkpointed.py::test_the_numbers_of_one_device": 4,
    "test_cluster_checks.py::test_a_host_that_cannot_take_part": 3,
    "test_codebooks.py::test_the_numbers_of_one_device": 2,
    "test_common_parts.py::test_common_parts_stay_as_they_are": 2,
    "test_compared_rows.py::test_batches_of_one_row_and_of_none": 3,
    "test_compared_rows.py::test_the_numbers_of_one_device": 8,
    "test_compared_rows.py::test_what_stays_own_is_told": 2,
    "test_compiled.py::test_regions_give_the_same_numbers": 4,
    "test_conversions.py::test_what_python_makes_of_numbers": 2,
    "test_divisors.py::test_batches_without_rows_count_by_what_means_are_over": 16,
    "test_divisors.py::test_however_variables_are_synchronised": 4,
    "test_divisors.py::test_means_over_selections": 6,
    "test_divisors.py::test_means_with_learned_weights": 4,
    "test_divisors.py::test_terms_that_some_workers_leave_out": 8,
    "test_divisors.py::test_the_numbers_of_one_device": 6,
    "test_divisors.py::test_what_is_no_such_mean": 2,
    "test_endings.py::test_all_workers_leave_the_update_out": 6,
    "test_endings.py::test_one_worker": 8,
    "test_endings.py::test_several_hosts": 6,
    "test_equality.py::test_equals_one_device": 9,
    "test_errors_processes.py::test_workers_that_wait_for_one_that_ended_end_too": 2,
    "test_errors_workers.py::test_a_bad_row_of_one_worker_stops_the_step_on_all": 2,
    "test_errors_workers.py::test_uneven_and_empty_batches_weigh_as_many_rows_as_they_have": 3,
    "test_errors_workers.py::test_what_is_not_finite_passes_as_in_torch": 4,
    "test_example_equality.py::test_example_equals_one_device": 4,
    "test_examples_run.py::test_the_language_model_runs": 2,
    "test_factors.py::test_convolutions_have_factors": 2,
    "test_guesses.py::test_a_step_that_is_run_again_leaves_nothing_behind": 2,
    "test_guesses.py::test_steps_that_are_announced_may_be_run_again": 2,
    "test_host_sums.py::test_gradients_that_are_changed_are_ones_own": 2,
    "test_id_messages.py::test_all_ids_arrive_whatever_their_number": 2,
    "test_in_parts.py::test_messages_between_two_are_cut": 2,
    "test_in_parts.py::test_numbers_are_those_of_one_device": 12,
    "test_indexing.py::test_compiled_regions_know_no_places": 2,
    "test_indexing.py::test_one_graph_holds_for_all_places": 2,
    "test_kept_rows.py::test_the_state_of_one_device": 8,
    "test_late.py::test_examples": 4,
    "test_late.py::test_numbers_are_those_of_one_device": 2,
    "test_late.py::test_on_several_hosts": 2,
    "test_late.py::test_without_tables_the_last_bucket_is_not_late": 4,
    "test_late_order.py::test_any_order_gives_the_numbers_of_one_device": 2,
    "test_launch_stops.py::test_a_failing_worker_ends_all": 4,
    "test_launch_stops.py::test_signals_stop_every_worker": 2,
    "test_leftovers.py::test_what_is_cached_is_computed_anew": 2,
    "test_lent_acts.py::test_what_a_batch_leaves_out_is_that_of_one_device": 6,
    "test_lookups.py::test_lookup_equals_one_device": 2,
    "test_paper_tables.py::test_each_case_has_its_levels": 4,
    "test_paper_tables.py::test_placement_changes_bytes_and_no_numbers": 2,
    "test_partial_rows.py::test_training_equals_one_device": 4,
    "test_recorded.py::test_recorded_regions_give_the_same_numbers": 3,
    "test_recorded.py::test_shapes_that_come_often_are_recorded": 2,
    "test_reductions.py::test_sums_give_the_numbers_of_one_device": 4,
    "test_summed_rows.py::test_the_numbers_of_one_device": 2,
    "test_updates.py::test_the_numbers_are_those_of_eager_training": 2,
    "test_user_steps.py::test_the_numbers_of_one_device": 12,
    "test_varying_sizes.py::test_one_worker_captures_once_more": 4,
    "test_varying_sizes.py::test_workers_whose_batches_differ_in_size": 6,
    "test_weights.py::test_all_workers_count_in_the_same_way": 2,
    "test_weights.py::test_several_workers_may_have_no_rows": 2,
    "test_weights.py::test_workers_may_go_backward_in_several_numbers_of_pieces": 4,
    "test_weights.py::test_workers_may_make_gradients_in_another_order": 4,
    "test_whole_losses.py::test_the_numbers_of_one_device": 4,
    "test_whole_losses.py::test_what_cannot_be_put_together": 8,
    "test_written_parts.py::test_the_numbers_of_one_device": 4,
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
