"""Batches of other sizes: one more capture, in which the sizes that differ are symbols."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import synchronizers
import torch
import varying_sizes
from errors_help import alone
from pool import Pool
from torch import nn
from varying_sizes import BATCH, LENGTHS, STEPS

from parallax.graph.common.sizes import LEAST, varying
from parallax.runtime.comm.meeting import single

pytestmark = pytest.mark.usefixtures("one_thread")
FIRST = {"momentum": 2, "adam": 2}
"""Captures of a shape: another one follows when the optimizer has its slots."""


def test_what_varies_and_what_is_equal() -> None:
    seen = [
        ((4, 5), (4, 5), None, (7,)),
        ((4, 8), (4, 8), None, (7,)),
        ((4, 6), (4, 6), None, (9,)),
    ]
    assert varying(seen[:1]) == {}
    assert varying(seen[:2]) == {(0, 1): 0, (1, 1): 0}
    assert varying(seen) == {(0, 1): 0, (1, 1): 0, (3, 0): 1}
    assert varying([*seen, ((4, 1), (4, 3), None, (9,))]) == {(1, 1): 0, (3, 0): 1}
    assert LEAST == 2


@pytest.mark.parametrize(
    ("kind", "optimizer", "captures"),
    [
        ("tagger", "momentum", 3),
        ("tagger", "adam", 3),
        ("gru", "momentum", 3),
        ("rnn", "momentum", 3),
        ("bags", "adam", 3),
        ("images", "momentum", 3),
        ("attending", "momentum", 3),
        ("branching", "momentum", 4),
        ("counted", "momentum", 3),
        ("counting", "momentum", 1 + len(set(LENGTHS))),
        ("plain", "adam", 1 + len(set(LENGTHS))),
    ],
)
def test_one_worker_captures_once_more(kind: str, optimizer: str, captures: int) -> None:
    found = varying_sizes.compare(single(torch.device("cpu")), kind, optimizer, {})
    assert found["difference"] < 1e-12
    assert found["captures"] == captures


def test_rows_of_a_last_batch_vary_too() -> None:
    """A batch of one row is captured for itself: a size of one is broadcast."""
    rows = [BATCH] * 5 + [BATCH - 1, 3, 2, 1, 6, 5, BATCH]
    found = varying_sizes.compare(single(torch.device("cpu")), "tagger", "momentum", {}, rows)
    assert found["difference"] < 1e-12
    assert found["captures"] <= 5


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    ("kind", "optimizer", "option"),
    [
        ("tagger", "adam", "HYBRID"),
        ("tagger", "momentum", "PS"),
        pytest.param("gru", "adam", "HYBRID", marks=pytest.mark.long),
        pytest.param("tagger", "adam", "AR", marks=pytest.mark.long),
        ("bags", "adam", "HYBRID"),
        ("bags", "momentum", "AR"),
        ("images", "momentum", "HYBRID"),
        ("branching", "adam", "HYBRID"),
        pytest.param("counting", "adam", "HYBRID", marks=pytest.mark.long),
    ],
)
def test_workers_whose_batches_differ_in_size(
    pool: Pool, kind: str, optimizer: str, option: str, size: int
) -> None:
    few = kind not in ("counting", "branching")
    for found in pool.run(size, varying_sizes.compare, kind, optimizer, {"run_option": option}):
        assert found["difference"] < 1e-10
        assert found["captures"] <= (3 if few else 1 + STEPS)


@pytest.mark.parametrize("way", ["factors", "factor_push"])
def test_factors_have_as_many_rows_as_the_batch(pool: Pool, way: str) -> None:
    wanted = {"synchronizer": way, "owners": "one" if way == "factor_push" else None}
    wanted = {name: value for name, value in wanted.items() if value}
    settings = {"strategy": synchronizers.Wherever(wanted)}
    for found in pool.run(3, varying_sizes.compare, "sequences", "momentum", settings):
        assert found["difference"] < 1e-10
        assert found["captures"] <= 3


@pytest.mark.long
def test_compiled_regions_give_the_numbers_of_one_device(pool: Pool) -> None:
    settings = {"compile": "inductor"}
    for found in pool.run(2, varying_sizes.compare, "tagger", "adam", settings):
        assert found["difference"] < 1e-10
        assert found["captures"] <= 3


def test_wrong_relations_between_sizes_are_errors_as_on_one_device() -> None:
    """Sizes that were equal share a symbol; where they are not, the step is looked at anew."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    runner = alone(step)
    for rows in (4, 6, 5):
        runner.run(torch.ones(rows, 3), torch.ones(rows, 2))
    assert runner._preparation.captures.count == 2
    runner.run(torch.ones(5, 3), torch.ones(1, 2))
    assert runner._preparation.captures.count == 3
    with pytest.raises(Exception, match=r"broadcast .*\[7, 2\].*\[5, 2\]"):
        runner.run(torch.ones(5, 3), torch.ones(7, 2))


def test_batches_may_be_parts_of_wider_ones() -> None:
    """As when sentences are cut to the longest of a batch."""
    model = nn.Embedding(10, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(ids.view(-1)).sum() if ids.is_contiguous() else model(ids.flatten()).sum()
        loss.backward()
        optimizer.step()
        return loss

    runner = alone(step)
    wide = torch.randint(10, (4, 9))
    for length in (3, 5, 9, 7, 4):
        before = float(model(wide[:, :length]).detach().sum())
        assert float(runner.run(wide[:, :length])) == pytest.approx(before, rel=1e-5)
    assert runner._preparation.captures.count == 2


def test_returned_sizes_are_those_of_the_batch() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "rows": x.shape[0], "twice": 2 * len(x)}

    runner = alone(step)
    for rows in (4, 6, 5, 9):
        found = runner.run(torch.ones(rows, 3))
        assert (found["rows"], found["twice"]) == (rows, 2 * rows)


def test_whole_numbers_of_sizes_stay_symbols() -> None:
    torch.manual_seed(2)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        kept = max(1, int(0.7 * len(x)))
        each = model(x).square().sum(1).sort()[0]
        loss = each[:kept].sum() / int(x.shape[0])
        loss.backward()
        optimizer.step()
        return loss, kept

    batches = [torch.randn(rows, 3, dtype=torch.float64) for rows in (4, 6, 5, 9, 8)]
    before = copy.deepcopy(model.state_dict())
    expected = [step(x) for x in batches]
    model.load_state_dict(before)
    runner = alone(step)
    for x, (loss, kept) in zip(batches, expected, strict=True):
        found = runner.run(x)
        assert found[1] == kept
        assert found[0].item() == pytest.approx(loss.item(), rel=1e-12)
    assert runner._preparation.captures.count == 2


def test_the_programs_used_last_are_kept() -> None:
    """The graph of many lengths stays while lengths come and go; forgotten ones are found by it."""
    model = nn.Embedding(10, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(ids).sum()
        loss.backward()
        optimizer.step()
        return loss

    runner = alone(step)
    for length in [*range(2, 80), *range(2, 80)]:
        runner.run(torch.zeros(length, dtype=torch.int64))
    assert runner._preparation.captures.count == 2


@pytest.mark.parametrize("mask", ["causal", "padding", "added"])
def test_attention_with_masks_and_weights_is_captured_once_more(mask: str) -> None:
    """The mask is added to scores that have other sizes in every batch."""
    torch.manual_seed(4)
    table = nn.Embedding(50, 8).double()
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
    models = nn.ModuleList([table, attention])
    optimizer = torch.optim.SGD(models.parameters(), 0.1)

    def step(words: torch.Tensor) -> torch.Tensor:
        x, length = table(words), words.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        added = torch.zeros(length, length, dtype=torch.float64).masked_fill(future, -torch.inf)
        masks = {
            "causal": {"attn_mask": future},
            "padding": {"key_padding_mask": words == 0},
            "added": {"attn_mask": added},
        }
        optimizer.zero_grad()
        loss: torch.Tensor = attention(x, x, x, **masks[mask])[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batches = [torch.randint(1, 50, (4, length)) for length in (6, 9, 7, 12, 5)]
    before = copy.deepcopy(models.state_dict())
    expected = [step(words) for words in batches]
    models.load_state_dict(before)
    runner = alone(step)
    found = [runner.run(words) for words in batches]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert runner._preparation.captures.count == 2
