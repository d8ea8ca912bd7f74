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
    "test_ahead.py::test_batches_of_other_sizes": 2,
    "test_ahead.py::test_numbers_are_those_of_one_device": 3,
    "test_alone.py::test_bags_of_every_kind_have_the_numbers_of_the_plain_step": 8,
    "test_alone.py::test_numbers_are_those_of_the_plain_step": 2,
    "test_assertions.py::test_all_workers_raise_what_one_finds": 4,
    "test_assertions.py::test_nothing_is_left_under_way": 6,
    "test_assertions.py::test_one_worker": 9,
    "test_assertions.py::test_what_fails_after_the_update_is_too_late": 2,
    "test_axes.py::test_any_cut_gives_the_numbers_of_one_device": 8,
    "test_bags.py::test_bags_give_the_numbers_of_one_device": 18,
    "test_bags.py::test_sent_bytes_equal_the_formula": 8,
    "test_bags.py::test_weights_of_ids_that_are_learned": 2,
    "test_bags.py::test_workers_without_any_bags": 8,
    "test_batch_norms.py::test_compiled_without_running_statistics": 2,
    "test_batch_norms.py::test_the_numbers_of_one_device": 8,
    "test_batch_norms.py::test_workers_whose_batches_differ": 8,
    "test_batch_numbers.py::test_a_number_that_counts_is_an_input": 3,
    "test_batch_statistics.py::test_the_numbers_of_one_device": 16,
    "test_batch_statistics.py::test_what_is_none_sends_nothing": 3,
    "test_branches.py::test_python_may_count_up_to_a_number_of_the_batch": 2,
    "test_branches.py::test_workers_may_decide_on_other_gradients": 36,
    "test_branches.py::test_workers_may_decide_to_read_no_row_of_a_table": 9,
    "test_by_host.py::test_two_levels_give_the_numbers_of_one_device": 2,
    "test_by_host.py::test_what_crosses_equals_the_formula": 6,
    "test_bytes.py::test_sent_bytes_equal_the_formula": 12,
    "test_checkpoint.py::test_a_loaded_state_goes_on": 4,
    "test_checkpoint.py::test_a_state_moves_between_workers_and_options": 6,
    "test_checkpoint.py::test_a_table_without_storage_takes_a_state": 4,
    "test_checkpointed.py::test_the_numbers_of_one_device": 16,
    "test_cluster_checks.py::test_a_host_that_cannot_take_part": 9,
    "test_codebooks.py::test_the_numbers_of_one_device": 4,
    "test_common_parts.py::test_common_parts_stay_as_they_are": 6,
    "test_compared_rows.py::test_a_worker_has_too_few_rows_for_itself": 2,
    "test_compared_rows.py::test_batches_of_one_row_and_of_none": 6,
    "test_compared_rows.py::test_rows_that_are_not_compared_stay_own": 4,
    "test_compared_rows.py::test_the_numbers_of_one_device": 32,
    "test_compared_rows.py::test_what_stays_own_is_told": 8,
    "test_compiled.py::test_regions_give_the_same_numbers": 8,
    "test_conversions.py::test_what_python_makes_of_numbers": 2,
    "test_counted.py::test_delayed_updates": 3,
    "test_default_device.py::test_numbers_are_those_of_one_device": 4,
    "test_divisors.py::test_a_loss_that_is_multiplied_as_a_whole": 4,
    "test_divisors.py::test_backward_passes_that_begin_with_other_numbers": 3,
    "test_divisors.py::test_batches_without_rows_count_by_what_means_are_over": 32,
    "test_divisors.py::test_differing_terms_are_told_once": 2,
    "test_divisors.py::test_however_variables_are_synchronised": 8,
    "test_divisors.py::test_means_over_selections": 24,
    "test_divisors.py::test_means_that_are_those_of_all_batches_have_none": 4,
    "test_divisors.py::test_means_with_learned_weights": 12,
    "test_divisors.py::test_several_backward_passes": 2,
    "test_divisors.py::test_sums_that_are_divided_by_a_number_that_comes_with_the_batch": 3,
    "test_divisors.py::test_terms_that_some_workers_leave_out": 16,
    "test_divisors.py::test_the_numbers_of_one_device": 24,
    "test_divisors.py::test_what_is_no_such_mean": 8,
    "test_encoders.py::test_replicas_stay_equal_and_bytes_are_as_planned": 2,
    "test_endings.py::test_all_workers_leave_the_update_out": 6,
    "test_endings.py::test_one_worker": 8,
    "test_endings.py::test_several_hosts": 6,
    "test_equality.py::test_equals_one_device": 27,
    "test_errors_processes.py::test_workers_that_wait_for_one_that_ended_end_too": 2,
    "test_errors_workers.py::test_a_bad_row_of_one_worker_stops_the_step_on_all": 4,
    "test_errors_workers.py::test_another_structure_later_is_found_and_updates_nothing": 2,
    "test_errors_workers.py::test_no_rows_at_all_is_an_error_and_updates_nothing": 4,
    "test_errors_workers.py::test_uneven_and_empty_batches_weigh_as_many_rows_as_they_have": 12,
    "test_errors_workers.py::test_what_is_not_finite_passes_as_in_torch": 12,
    "test_example_equality.py::test_example_equals_one_device": 4,
    "test_examples_run.py::test_the_language_model_runs": 2,
    "test_factors.py::test_convolutions_have_factors": 4,
    "test_factors.py::test_factors_give_the_numbers_of_one_device": 2,
    "test_faster_layouts.py::test_training_gives_the_same_numbers": 2,
    "test_guesses.py::test_a_step_that_is_run_again_leaves_nothing_behind": 4,
    "test_guesses.py::test_steps_that_are_announced_may_be_run_again": 6,
    "test_host_sums.py::test_gradients_that_are_changed_are_ones_own": 4,
    "test_id_messages.py::test_all_ids_arrive_whatever_their_number": 2,
    "test_in_parts.py::test_bags_travel_in_parts": 2,
    "test_in_parts.py::test_every_synchronizer_that_exchanges_cuts": 3,
    "test_in_parts.py::test_messages_between_two_are_cut": 6,
    "test_in_parts.py::test_numbers_are_those_of_one_device": 12,
    "test_indexing.py::test_compiled_regions_know_no_places": 4,
    "test_indexing.py::test_one_graph_holds_for_all_places": 6,
    "test_indexing.py::test_with_sizes_that_vary": 3,
    "test_item_lists.py::test_the_numbers_of_one_device": 4,
    "test_kept_rows.py::test_batches_of_one_row_and_of_none": 3,
    "test_kept_rows.py::test_the_state_of_one_device": 16,
    "test_kept_rows.py::test_what_is_a_workers_own_is_not_sent": 2,
    "test_label_sums.py::test_sums_for_each_row_stay_own": 3,
    "test_label_sums.py::test_the_numbers_of_one_device": 4,
    "test_late.py::test_a_bad_id_leaves_the_step_before_complete": 3,
    "test_late.py::test_examples": 4,
    "test_late.py::test_numbers_are_those_of_one_device": 8,
    "test_late.py::test_on_several_hosts": 6,
    "test_late.py::test_uneven_batches_of_other_sizes": 2,
    "test_late.py::test_without_tables_the_last_bucket_is_not_late": 8,
    "test_late_order.py::test_any_order_gives_the_numbers_of_one_device": 6,
    "test_launch_stops.py::test_a_failing_worker_ends_all": 4,
    "test_launch_stops.py::test_signals_stop_every_worker": 4,
    "test_launch_stops.py::test_who_left_is_named_although_others_notice_it_first": 2,
    "test_layouts.py::test_layouts_are_those_of_the_kernels": 3,
    "test_leftovers.py::test_what_is_cached_is_computed_anew": 8,
    "test_lent_acts.py::test_what_a_batch_leaves_out_is_that_of_one_device": 18,
    "test_lookups.py::test_lookup_equals_one_device": 8,
    "test_lookups.py::test_slots_of_sparse_gradients_are_sharded": 4,
    "test_memories.py::test_a_run_goes_on_from_a_saved_state": 2,
    "test_one_device.py::test_the_same_on_one_device": 4,
    "test_overlap.py::test_a_large_product_travels_piece_by_piece": 2,
    "test_packed.py::test_lengths_that_cannot_be": 2,
    "test_paper_tables.py::test_each_case_has_its_levels": 8,
    "test_paper_tables.py::test_placement_changes_bytes_and_no_numbers": 2,
    "test_partial_rows.py::test_training_equals_one_device": 4,
    "test_patches.py::test_training_gives_the_same_numbers": 2,
    "test_plan_command.py::test_a_script_that_gives_no_plan": 2,
    "test_recorded.py::test_recorded_regions_give_the_same_numbers": 6,
    "test_recorded.py::test_shapes_that_come_often_are_recorded": 2,
    "test_recurrent.py::test_one_operation_each_layer_and_direction": 2,
    "test_recurrent.py::test_training_is_that_of_one_device": 3,
    "test_reduced_rows.py::test_batches_of_one_row_and_of_none": 2,
    "test_reduced_rows.py::test_it_is_seen_in_the_graph_of_one_batch": 2,
    "test_reduced_rows.py::test_sizes_that_are_equal_by_chance": 4,
    "test_reduced_rows.py::test_the_numbers_of_one_device": 4,
    "test_reductions.py::test_sent_bytes_equal_the_formula": 3,
    "test_reductions.py::test_sums_give_the_numbers_of_one_device": 12,
    "test_rooms.py::test_a_room_imports_what_it_may": 2,
    "test_rows_by_host.py::test_a_row_crosses_to_a_host_once": 2,
    "test_scatter.py::test_batches_may_be_uneven_or_empty": 2,
    "test_scatter.py::test_scattered_variables_give_the_numbers_of_one_device": 2,
    "test_summed_rows.py::test_the_numbers_of_one_device": 2,
    "test_trace.py::test_workers_record_their_steps": 2,
    "test_unread.py::test_texts_are_constants_only_where_they_are_read": 2,
    "test_updates.py::test_parts_of_variables_are_updated_so_too": 4,
    "test_updates.py::test_the_numbers_are_those_of_eager_training": 6,
    "test_user_steps.py::test_a_gradient_is_marked_where_it_is_used": 2,
    "test_user_steps.py::test_the_numbers_of_one_device": 48,
    "test_varying_sizes.py::test_factors_have_as_many_rows_as_the_batch": 2,
    "test_varying_sizes.py::test_one_worker_captures_once_more": 4,
    "test_varying_sizes.py::test_workers_whose_batches_differ_in_size": 6,
    "test_weights.py::test_all_workers_count_in_the_same_way": 4,
    "test_weights.py::test_several_workers_may_have_no_rows": 2,
    "test_weights.py::test_workers_may_go_backward_in_several_numbers_of_pieces": 4,
    "test_weights.py::test_workers_may_make_gradients_in_another_order": 8,
    "test_whole_losses.py::test_the_numbers_of_one_device": 12,
    "test_whole_losses.py::test_what_cannot_be_put_together": 16,
    "test_writes.py::test_a_script_sees_what_it_would_on_one_device": 2,
    "test_written_parts.py::test_the_numbers_of_one_device": 8,
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
