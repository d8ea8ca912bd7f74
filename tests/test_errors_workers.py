"""Bad input to one of several workers: found by all, by name, and nothing is lost."""

from __future__ import annotations

import math
from typing import Any

import bad_steps
import pytest
from errors_help import marked_line
from pool import Pool, WorkerFailure

OPTIONS = ("HYBRID", "PS", "AR")


def all_raise(pool: Pool, size: int, kind: str, fragments: tuple[str, ...], *call: Any) -> None:
    """Every worker raises the same class, with all fragments in its message."""
    with pytest.raises(WorkerFailure) as caught:
        pool.run(size, *call)
    errors = caught.value.errors
    assert sorted(errors) == list(range(size)), errors
    for name, text, trace in errors.values():
        assert name == kind, trace
        for fragment in fragments:
            assert fragment in text, f"{fragment!r} not in:\n{text}"


DIFFERENT: dict[str, tuple[str, tuple[str, ...]]] = {
    "shape": (
        "DisagreementError",
        (
            "Workers differ in models: worker 1 has parameter 0.weight of shape (4, 3)",
            "worker 0 has parameter 0.weight of shape (2, 3)",
            "build the same model",
        ),
    ),
    "layer": ("DisagreementError", ("worker 1 has parameter 2.weight of shape (1, 2)",)),
    "dtype": ("DisagreementError", ("worker 1 has parameter 0.weight", "float64", "float32")),
    "order": (
        "DisagreementError",
        ("worker 1 has parameter b.weight", "worker 0 has parameter a.weight"),
    ),
    "frozen": ("DisagreementError", ("worker 1 has frozen parameter 1.bias",)),
    "rate": ("DisagreementError", ("optimizer.group0.lr = 0.2", "optimizer.group0.lr = 0.1")),
    "optimizer": ("DisagreementError", ("Workers differ in models: worker 1 has",)),
    "loaded": (
        "DisagreementError",
        (
            "worker 1 has slot optimizer.0.weight.step of shape () and float32, worker 0 has no",
            "load a state on all of them, or on none",
        ),
    ),
    "average": (
        "DisagreementError",
        (
            "differ in settings: worker 1 has average_dense=False, worker 0 has average_dense=True",
            "the same Config",
        ),
    ),
    "sizes": (
        "DisagreementError",
        ("differ in data sizes: worker 1 has a list of 10 items", "the same dataset"),
    ),
    "held": (
        "DisagreementError",
        (
            "differ in tensors that the step uses: worker 1 has tensor held.scales of shape (3, 1)",
            "pass what is each worker's own with the batch",
        ),
    ),
    "dims": (
        "BatchError",
        ("differ in structure", "worker 1 passes float32 tensor of 3 dimensions, worker 0"),
    ),
    "batch dtype": ("BatchError", ("worker 1 passes float64 tensor of 2 dimensions, worker 0",)),
    "nesting": (
        "BatchError",
        ("worker 1 passes [float32 tensor of 2 dimensions], worker 0 passes float32 tensor",),
    ),
    "keyword": ("BatchError", ("worker 1 passes x=float32 tensor of 2 dimensions, worker 0",)),
    "micro-batches": (
        "BatchError",
        (
            "worker 1 passes [float32 tensor of 2 dimensions, float32 tensor of 2 dimensions]",
            "the same nesting",
            "lists of several lengths (of micro-batches), pass them as one tensor, and split that",
        ),
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_workers_that_differ_are_found_before_the_first_step(pool: Pool, what: str) -> None:
    kind, fragments = DIFFERENT[what]
    all_raise(pool, 3, kind, fragments, bad_steps.differing, what)


@pytest.mark.parametrize("ahead", [False, True])
def test_learning_rates_that_drift_apart_are_noticed(pool: Pool, ahead: bool) -> None:
    assert pool.run(2, bad_steps.rates, ahead, False) == [("", 12)] * 2
    for text, ran in pool.run(2, bad_steps.rates, ahead, True):
        assert "other learning rates" in text
        assert "step schedulers with values that are the same on all" in text
        assert 3 <= ran <= 6


def test_a_second_runner_that_lacks_rows_says_who_has_them(pool: Pool) -> None:
    said = ("Another runner has dealt 'words.weight' to the workers", "one runner whose step does")
    all_raise(pool, 2, "UnsupportedError", said, bad_steps.two_runners)


def test_all_workers_start_from_the_values_of_worker_0(pool: Pool) -> None:
    for found, expected in pool.run(3, bad_steps.different_values):
        assert (found - expected).abs().max() < 1e-6


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("table", "bad"), [("words", 9), ("words", -1), ("tied", 6), ("tied", -2)])
def test_a_bad_row_of_one_worker_stops_the_step_on_all(
    pool: Pool, option: str, table: str, bad: int
) -> None:
    size = 3 if option == "HYBRID" else 2
    last = {"words": 8, "tied": 5}[table]
    for kind, text, unchanged, goes_on in pool.run(size, bad_steps.bad_row, option, table, bad):
        assert kind == "RowIdError", text
        assert (
            f"Worker {size - 1} looks up row {bad} of table '{table}.weight', which has rows 0 to "
            f"{last}. Nothing was updated in this step." in text
        )
        assert "check the vocabulary" in text
        assert unchanged
        assert goes_on


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("model", ["dense", "sparse", "lazy", "tied"])
def test_uneven_and_empty_batches_weigh_as_many_rows_as_they_have(
    pool: Pool, option: str, model: str
) -> None:
    shares = [[3, 3], [1, 3], [3, 1], [3, 0], [0, 2], [3, 3]]
    for worker, (equal, losses) in enumerate(
        pool.run(2, bad_steps.uneven, option, model, "clip_norm", shares)
    ):
        assert equal
        empty = [share[worker] == 0 for share in shares]
        assert [math.isnan(loss) for loss in losses] == empty


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("model", ["dense", "sparse"])
def test_no_rows_at_all_is_an_error_and_updates_nothing(
    pool: Pool, option: str, model: str
) -> None:
    for kind, text, unchanged in pool.run(2, bad_steps.all_empty, option, model):
        assert kind == "BatchError", text
        assert "Every worker's batch is empty in this step." in text
        assert "data is not exhausted" in text
        assert unchanged


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("sparse", [False, True])
def test_another_structure_later_is_found_and_updates_nothing(
    pool: Pool, option: str, sparse: bool
) -> None:
    found = pool.run(3, bad_steps.other_structure, option, sparse)
    for worker, (kind, text, unchanged, goes_on) in enumerate(found):
        assert kind == "DisagreementError", text
        assert f"Worker {worker} and " in text
        assert "are not running the same step: batches of different structure" in text
        assert "Nothing was updated." in text
        assert unchanged
        assert goes_on


@pytest.mark.parametrize("option", ["HYBRID", "PS"])
def test_a_state_that_one_worker_loaded_is_found(pool: Pool, option: str) -> None:
    for (kind, text, _), (later, _, still) in pool.run(2, bad_steps.loaded_alone, option):
        assert kind == "DisagreementError", text
        assert "another number of loaded states" in text
        assert "load_state_dict() on all of them" in text
        # When all have loaded it, training goes on from it.
        assert later == ""
        assert not still


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("norm", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_passes_as_in_torch(
    pool: Pool, option: str, norm: float, value: float
) -> None:
    for model in ("dense", "sparse"):
        assert all(pool.run(2, bad_steps.not_finite, option, model, value, norm))


DRIFTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "drifts": ("VariableError", ("changes the parameter 'weight'", "workers would drift apart")),
    "drifts_by_chance": ("VariableError", ("changes the parameter 'bias'", "random numbers")),
    "drifts_by_view": ("VariableError", ("changes the parameter 'weight'",)),
    "drifts_by_data": ("VariableError", ("changes the parameter 'weight'", "by an optimizer")),
    "slot_drifts": ("VariableError", ("the optimizer state", "momentum_buffer'")),
    "scheduler_drifts": (
        "UnsupportedError",
        ("steps a scheduler with a value of this worker's batch", "a validation loss"),
    ),
    "rate_drifts": (
        "UnsupportedError",
        ("sets optimizer.group0.lr to a value of this worker's batch", "lr_scheduler"),
    ),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_state_that_one_worker_would_change_for_itself_is_refused(pool: Pool, name: str) -> None:
    kind, fragments = DRIFTS[name]
    if kind == "VariableError":
        fragments = (*fragments, f"at {marked_line(getattr(bad_steps, name))}: ")
    all_raise(pool, 2, kind, fragments, bad_steps.changing, name)


@pytest.mark.parametrize("name", ["clamps", "by_gradients"])
def test_changes_that_all_workers_make_alike_are_accepted(pool: Pool, name: str) -> None:
    assert max(pool.run(2, bad_steps.changing, name)) < 1e-12


def test_a_table_that_is_frozen_later_is_named(pool: Pool) -> None:
    fragments = ("'0.weight' was frozen after the first step", "learning rate of its group to zero")
    all_raise(pool, 2, "UnsupportedError", fragments, bad_steps.freezes)


@pytest.mark.parametrize(("asked", "count"), [([2, 3], 1), ([2, 2], 0), ([4, 2, 4], 0)])
def test_a_later_runner_starts_no_other_workers(pool: Pool, asked: list[int], count: int) -> None:
    told, others = pool.run(2, bad_steps.workers_warning, asked)
    assert [f"workers={asked[-1]} says nothing: the run has 2" in one for one in told] == [
        True
    ] * count
    assert others == []


def test_batch_norm_is_warned_of_once(pool: Pool) -> None:
    for seen in pool.run(2, bad_steps.batch_norm_warning):
        found = [text for text in seen if "BatchNorm" in text]
        assert len(found) == 1
        assert "depend on the number of workers (model.1)" in found[0]
        assert "GroupNorm" in found[0]
