"""One worker updates the rows that it touched, with the numbers of the plain step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallax
from parallax.errors import RowIdError
from parallax.ops.resources import checked_ids, pull_bags, unique_rows
from tests import bag_steps

ROWS, WIDTH, STEPS = 200, 6, 6

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.05),
}


class Net(nn.Module):
    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, padding_idx=3)
        self.bags = nn.EmbeddingBag(rows, WIDTH, mode="sum")
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids).mean(1) + self.table(ids[:, 0]) + self.bags(ids))


def _training(
    optimizer: str, clip: bool, rows: int = ROWS
) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(7)
    model = Net(rows).double()
    chosen = OPTIMIZERS[optimizer](model.parameters())

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chosen.zero_grad()
        loss = F.cross_entropy(model(ids), labels)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        chosen.step()
        return loss

    return model, chosen, step


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(8)
    return [(torch.randint(ROWS, (4, 5)), torch.randint(5, (4,))) for _ in range(STEPS)]


def _calls(runner: parallax.Runner) -> list[object]:
    assert runner._last is not None
    return [node.target for node in runner._last.step.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_numbers_are_those_of_the_plain_step(optimizer: str, clip: bool) -> None:
    expected, slots, plain = _training(optimizer, clip)
    model, own, step = _training(optimizer, clip)
    runner = parallax.get_runner(step, config=parallax.Config(workers=1, seed=0))
    for batch in _batches():
        assert abs(plain(*batch).item() - runner.run(*batch).item()) < 1e-12
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-12
    for one_slots, other_slots in zip(slots.state.values(), own.state.values(), strict=True):
        for name, value in one_slots.items():
            assert (value - other_slots[name]).abs().max() < 1e-12, name
    # Adam moves every row that has a momentum; the others move touched rows only.
    narrow = optimizer != "adam"
    assert (unique_rows in _calls(runner)) is narrow
    assert (pull_bags in _calls(runner)) is narrow
    assert runner._last is not None
    gradients = [
        node
        for node in runner._last.step.graph.nodes
        if "dense_backward" in str(node.target) and node.args[2] == ROWS
    ]
    assert bool(gradients) is not narrow


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", bag_steps.OPTIMIZERS)
def test_bags_of_every_kind_have_the_numbers_of_the_plain_step(optimizer: str, clip: bool) -> None:
    """Means, offsets, bags of nothing, and a table that is read twice; Adam moves all rows."""
    expected, plain = bag_steps.build(optimizer, clip)
    model, step = bag_steps.build(optimizer, clip)
    runner = parallax.get_runner(step, config=parallax.Config(workers=1, seed=0))
    for (batch,) in bag_steps.batches(1):
        assert abs(plain(batch).item() - runner.run(batch).item()) < 1e-12
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-12
    assert (pull_bags in _calls(runner)) is (optimizer != "adam")


def test_a_small_table_is_updated_whole() -> None:
    _, _, step = _training("sgd", False, rows=30)
    runner = parallax.get_runner(step, config=parallax.Config(workers=1, seed=0))
    runner.run(torch.randint(30, (4, 5)), torch.randint(5, (4,)))
    assert unique_rows not in _calls(runner)
    assert checked_ids in _calls(runner)


def test_a_row_that_does_not_exist_is_named_and_nothing_is_updated() -> None:
    model, _, step = _training("sgd", False)
    runner = parallax.get_runner(step, config=parallax.Config(workers=1, seed=0))
    batches = _batches()
    runner.run(*batches[0])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ids, labels = batches[1]
    ids[1, 2] = ROWS
    with pytest.raises(RowIdError, match=f"looks up row {ROWS} of table 'table.weight'"):
        runner.run(ids, labels)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    runner.run(*batches[2])
