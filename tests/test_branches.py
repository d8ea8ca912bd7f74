"""What the step's Python decides by the values of a batch is decided for every batch."""

from __future__ import annotations

import functools
from typing import Any

import branches
import pytest
import torch
from pool import Pool
from torch import nn

from parallax.config import Config
from parallax.errors import CaptureError, DataDependentError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import single
from parallax.runtime.runner import Runner

CPU = torch.device("cpu")
RANGES = [(3, 5), (0, 3), (3, 5), (0, 3), (0, 5)]


@pytest.mark.parametrize(
    ("name", "captures"),
    [("either", 2), ("checked", 1), ("changed", 2), ("pairs", 1), ("in shapes", 1)],
)
def test_both_ways_are_captured_once(name: str, captures: int) -> None:
    found = branches.train(single(CPU), name, [[y] for y in branches.labels(*RANGES)])
    assert not isinstance(found, str), found
    assert found[0] < 1e-12
    assert found[1] == captures


@pytest.mark.parametrize(("size", "captures"), [(1, 3), (2, 3)])
def test_python_may_count_up_to_a_number_of_the_batch(pool: Pool, size: int, captures: int) -> None:
    """There is a graph for each."""
    ranges = [(3, 4), (2, 3), (3, 4), (1, 2), (2, 3)]
    given = [[y, y.flip(0).clamp(max=step)] for step, y in enumerate(branches.labels(*ranges), 1)]
    for found in pool.run(size, branches.train, "by levels", [one[:size] for one in given]):
        assert not isinstance(found, str), found
        assert found[0] < 1e-12
        assert found[1] <= captures


def test_two_selections_by_one_mask_have_one_size() -> None:
    ranges = [(1, 3), (0, 5), (0, 2), (0, 5)]
    found = branches.train(single(CPU), "selected", [[y] for y in branches.labels(*ranges)])
    assert not isinstance(found, str), found
    assert found == (pytest.approx(0, abs=1e-12), 1)


@pytest.mark.parametrize("strategy", ["HYBRID", "PS"])
def test_workers_may_decide_otherwise(pool: Pool, strategy: str) -> None:
    low, high = branches.labels((0, 3), (3, 5))
    given = [[low, high], [high, high], [high, low], [low, low]]
    for found in pool.run(2, branches.train, "either", given, strategy):
        assert not isinstance(found, str), found
        assert found[0] < 1e-12
        assert found[1] == 2


DECIDED = [(1, 2), (3, 5), (0, 1), (1, 2), (1, 2), (0, 5), (1, 3), (3, 5), (0, 2), (1, 2), (1, 2)]
"""Ranges of labels: in some batches nothing is for the first head, or for the second, or both."""
STRATEGIES = ["HYBRID", "PS", "ZeRO", "Poseidon", "ProjectAdam", "Horovod", "RandomAxis", "auto"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["one way", "heads"])
@pytest.mark.parametrize("size", [2, 3])
def test_workers_may_decide_on_other_gradients(
    pool: Pool, name: str, strategy: str, size: int
) -> None:
    """A part of the model that one has no gradients of has those of the others."""
    made = branches.labels(*DECIDED, *reversed(DECIDED))
    given = [made[step : step + size] for step in range(0, len(made) - size, 2)]
    kind = functools.partial(torch.optim.AdamW, weight_decay=0.2)
    found = pool.run(size, branches.train, name, given, strategy, kind, 0.05)
    for one in found:
        assert not isinstance(one, str), one
        assert one[0] < 1e-12


def test_each_of_several_backward_passes_may_be_left_out_in_part(pool: Pool) -> None:
    given = [branches.labels(*ranges) for ranges in zip(DECIDED, DECIDED[3:], strict=False)]
    for found in pool.run(2, branches.train, "passes", given):
        assert not isinstance(found, str), found
        assert found[0] < 1e-12


@pytest.mark.parametrize("strategy", ["HYBRID", "PS", "AR", "Horovod"])
@pytest.mark.parametrize("size", [2, 3])
def test_workers_may_decide_to_read_no_row_of_a_table(pool: Pool, strategy: str, size: int) -> None:
    high, low, none = branches.labels((3, 5), (0, 3), (1, 3))
    low[0] = 0
    both = torch.cat([high[:3], low[:3]])
    found = [high, high, none, both, none, none, high, low, both, both, none, high, none, none]
    given = [found[step : step + size] for step in range(0, len(found) - size, 2)]
    given = [parts for parts in given if not {id(high), id(low)} <= {*map(id, parts)}]
    for one in pool.run(size, branches.train, "tables", given, strategy):
        assert not isinstance(one, str), one
        assert one[0] < 1e-12


@pytest.mark.parametrize("strategy", ["HYBRID", "PS"])
def test_what_workers_decide_must_have_the_same_bags(pool: Pool, strategy: str) -> None:
    low, high = branches.labels((0, 3), (3, 5))
    given = [[high, high], [low, high]]
    for worker, found in enumerate(pool.run(2, branches.train, "bags", given, strategy)):
        assert isinstance(found, str)
        assert found.startswith(f"DisagreementError: Worker {worker} and worker {1 - worker} are")
        assert "Python decides by values of the batch" in found
        assert "Nothing was updated" in found


def test_what_workers_count_only_on_some_batches_is_told_once(pool: Pool) -> None:
    low, high = branches.labels((0, 3), (3, 5))
    told = pool.run(2, branches.told_of_counters, [[high, high], [low, high], [low, high]])
    assert list(map(len, told)) == [1, 0]
    assert "whether it sets uses: " in told[0][0]


def _runner(loss: Any) -> Runner:
    torch.manual_seed(0)
    net = branches.Net().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = loss(net, x, y)
        value.backward()
        optimizer.step()
        return value

    return Runner(step, discover(step), Config(workers=1), single(CPU))


def test_a_check_that_fails_raises_and_leaves_all_as_it_was() -> None:
    x = torch.randn(branches.ROWS, branches.WIDTH).double()
    good, bad = branches.labels((0, 5), (5, 6))
    runner = _runner(branches.LOSSES["checked"])
    runner.run(x, good)
    before = {name: value.clone() for name, value in runner.state_dict()["net"].items()}
    with pytest.raises(CaptureError, match=r"ValueError: no such label(.|\n)*branches\.py"):
        runner.run(x, bad)
    after = runner.state_dict()["net"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    runner.run(x, good)
    assert runner._preparation.captures.count == 1


REFUSED = {
    "as many times": lambda net, x, y: sum(y.sum() for _ in range(int(net(x).sum()))),
    "of parameters": lambda net, x, y: net(x).mean() if (net(x) > 0).any() else net(x).sum(),
    "by chance": lambda net, x, y: net(x).mean() if torch.rand(()) < 0.5 else net(x).sum(),
    "of both": lambda net, x, y: net(x).mean() if net(x).sum() > y.sum() else net(x).sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    with pytest.raises(DataDependentError, match="depends on the values of tensors"):
        _runner(REFUSED[name]).run(
            torch.randn(branches.ROWS, branches.WIDTH).double(), branches.labels((1, 5))[0]
        )


def test_constants_of_a_buffer_may_decide_with_the_batch() -> None:
    """Targets are chosen by anchors, and how many crops there are by their sizes."""

    class Anchored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("anchors", torch.tensor([1.0, 2.0, 4.0]))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            sizes = torch.unique_consecutive(torch.tensor([3, 3, 5]), return_counts=True)[1]
            found = sum(self.layer(x).square().mean() * count for count in sizes.cumsum(0))
            chosen = y[y > self.anchors[1]]
            if chosen.shape[0]:
                found = found + (self.layer.weight.sum() - chosen.sum()).square()
            return found

    def trained(through: bool) -> tuple[Anchored, int]:
        torch.manual_seed(0)
        model = Anchored().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        runner = Runner(step, discover(step), Config(workers=1), single(CPU))
        x = torch.ones(2, 3).double()
        for labels in ([3.0, 1.0], [0.5, 1.5], [5.0, 3.0]):
            (runner.run if through else step)(x, torch.tensor(labels).double())
        return model, runner._preparation.captures.count

    (model, captures), (plain, _) = trained(True), trained(False)
    assert torch.allclose(model.layer.weight, plain.layer.weight, rtol=1e-12)
    assert captures == 2
