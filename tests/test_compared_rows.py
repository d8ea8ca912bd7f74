"""Rows of the batch that a loss compares with each other are those of all workers' batches."""

from __future__ import annotations

import compared_rows
import compared_training
import pytest
import torch
from cells import each_once
from pool import Pool, WorkerFailure
from torch import nn

from parallax.graph.analysis.compared_rows import ComparedRows
from parallax.graph.analysis.factors import products_of
from parallax.graph.analysis.mixed_rows import may_compare_rows
from parallax.graph.analysis.row_places import Places
from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover
from parallax.graph.passes.whole_batch import of_whole_batch
from parallax.ops import marks

DIVISION = [(4, 4, 4), (6, 2, 3), (3, 5, 3)]
SMALL = [(4, 4), (1, 7), (0, 5), (5, 2)]
FEW = [(6, 2), (1, 7), (0, 5), (2, 6)]
SETTINGS = [(2, "HYBRID"), (3, "HYBRID"), (2, "PS"), (3, "AR")]
GATHERED = "rows of all batches"


@pytest.mark.parametrize(("name", "size", "strategy"), each_once(compared_rows.LOSSES, SETTINGS))
def test_the_numbers_of_one_device(pool: Pool, name: str, size: int, strategy: str) -> None:
    division = [counts[:size] for counts in DIVISION]
    for far, moved, sent, said in pool.run(size, compared_training.train, name, division, strategy):
        assert far < 1e-12
        assert moved > 1e-3
        assert sent[GATHERED]
        assert not said


@pytest.mark.parametrize("name", ["CLIP", "chosen by masks", "two views in one pass", "uniformity"])
def test_batches_of_one_row_and_of_none(pool: Pool, name: str) -> None:
    for far, _, _, said in pool.run(2, compared_training.train, name, SMALL, "HYBRID"):
        assert far < 1e-12
        assert not said


@pytest.mark.parametrize("name", ["the largest three", "hard examples"])
def test_a_worker_has_too_few_rows_for_itself(pool: Pool, name: str) -> None:
    for far, _, _, said in pool.run(2, compared_training.train, name, FEW, "HYBRID"):
        assert far < 1e-12
        assert not said


@pytest.mark.parametrize("name", compared_rows.OWN)
def test_what_stays_own_is_told(pool: Pool, name: str) -> None:
    _, why = compared_rows.OWN[name]
    for _, _, sent, said in pool.run(2, compared_training.train, name, SMALL[:1], "HYBRID"):
        assert GATHERED not in sent
        (text,) = [text for text in said if "are compared with each other" in text]
        assert why in text
        assert "compared_rows.py" in text


@pytest.mark.parametrize("name", compared_rows.ALONE)
def test_rows_that_are_not_compared_stay_own(pool: Pool, name: str) -> None:
    for far, _, sent, said in pool.run(2, compared_training.train, name, SMALL, "HYBRID"):
        assert far < 1e-12
        assert GATHERED not in sent
        assert not said


def test_workers_that_do_not_compare_the_same_are_told(pool: Pool) -> None:
    with pytest.raises(WorkerFailure) as caught:
        pool.run(2, compared_training.with_other_layouts)
    assert len(caught.value.errors) == 2
    for kind, text, _ in caught.value.errors.values():
        assert kind == "DisagreementError"
        assert "decides whether rows of the batch are compared with each other" in text
        assert "(t.py:3)" in text
        assert "Nothing was updated." in text
        assert "torch.where" in text


def test_the_loss_is_that_of_the_whole_batch(pool: Pool) -> None:
    for found, whole in pool.run(2, compared_training.losses_of, "CLIP", SMALL):
        assert found == pytest.approx(whole, abs=1e-12)


def test_texts_of_any_length(pool: Pool) -> None:
    """By Adam, whose first step is another one; from the third on, one graph holds for all."""
    sizes = [((rows, words), (6 - rows, words)) for rows, words in [(3, 5), (2, 5), (4, 7)]]
    sizes += [((rows, words), (6 - rows, words)) for rows, words in [(5, 4), (1, 9), (3, 6)]]
    for far, captures, said in pool.run(2, compared_training.train_texts, sizes):
        assert far < 1e-12
        assert captures == 4  # the first one twice
        assert not said


def test_bytes_are_those_of_the_rows(pool: Pool) -> None:
    """Two vectors of five numbers a row, to each other worker, and 16 bytes of counts."""
    rows = [4, 6, 3]
    division = [counts[:2] for counts in DIVISION]
    _, _, sent, _ = pool.run(2, compared_training.train, "CLIP", division, "HYBRID")[0]
    assert sent[GATHERED] == sum(rows) * 2 * 5 * 8
    assert sent["batch rows"] == len(rows) * 16


def test_rows_are_found_in_the_graph() -> None:
    """One gather of each tower, and nothing of it on the way back."""
    _, training = compared_training.towers()
    step = training(compared_rows.clip)
    (batch,) = compared_training.batches([(4,)])[0]
    assert may_compare_rows(capture(step, discover(step), batch, {}))
    graph = capture(step, discover(step), batch, {}, varying={(place, 0): 0 for place in range(3)})
    found = ComparedRows(graph)
    assert found.refused is None
    assert list(found.gathered.values()) == [Places(0, 1, 1)] * 2
    names = [str(node.target) for node in found.whole]
    assert names[0] == "aten.mm.default"
    assert not any(node.target is torch.ops.aten.embedding.default for node in found.whole)


def test_gradients_that_all_workers_compute_have_no_factors() -> None:
    """Of layers that follow; a worker has the rows of all batches there."""
    model = nn.ModuleDict({"before": nn.Linear(8, 300), "after": nn.Linear(300, 6)}).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        rows = model["before"](x)
        model["after"]((rows @ rows.t()).softmax(1) @ rows).square().mean().backward()
        optimizer.step()

    batch = (torch.randn(4, 8, dtype=torch.float64),)
    made, refused = of_whole_batch(capture(step, discover(step), batch, {}, varying={(0, 0): 0}))
    assert made is not None
    assert refused is None
    gradients = made.graph.find_nodes(op="call_function", target=marks.GRADIENT)
    factors = {mark.args[1]: bool(products_of(mark, made.sizes)) for mark in gradients}
    assert factors["before.weight"]
    assert not factors["after.weight"]
