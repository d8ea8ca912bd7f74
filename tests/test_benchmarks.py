"""The benchmarks' own parts: workloads that run, and timing that pairs."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import collectives
import pytest
import torch
from pool import Pool

from benchmarks import encoders, in_batch, models, planning
from benchmarks.copies import Copied
from benchmarks.exchanges import COLLECTIVES
from benchmarks.pairing import Paired, run_paired
from benchmarks.public_code import Case, try_out

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

ROOT = Path(__file__).parent.parent
SMALL: dict[str, Callable[[], models.Workload]] = {
    "lm": lambda: models.lm(300, embedding=8, hidden=12, projection=8, sampled=16),
    "lm-sparse": lambda: models.lm(
        300, sparse=True, embedding=8, hidden=12, projection=8, sampled=16
    ),
    "resnet18": lambda: models.resnet18(batch=2),
    "mlp": lambda: models.mlp(layers=3, width=8),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_workload_trains(name: str) -> None:
    torch.manual_seed(0)
    workload = SMALL[name]()
    before = [value.detach().clone() for value in workload.model.parameters()]
    loss = workload.step(*workload.batch())
    assert bool(loss.isfinite())
    pairs = zip(before, workload.model.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in pairs)


def test_resnet18_has_the_size_of_the_paper() -> None:
    model = models.ResNet18(classes=1000, small=False)
    assert sum(value.numel() for value in model.parameters()) == 11_689_512


def test_the_perceptron_has_forty_layers() -> None:
    layers = [part for part in models.mlp().model if isinstance(part, torch.nn.Linear)]
    assert len(layers) == 40


def test_variants_take_turns_and_each_goes_first() -> None:
    calls: list[str] = []
    variants = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    result = run_paired(variants, rounds=2, steps=2, warmup=1)
    assert "".join(calls) == "bbaa" + "aabb" + "bbaa"
    assert [len(values) for values in result.seconds.values()] == [2, 2]


def test_a_disturbed_round_does_not_move_the_ratio() -> None:
    # The third round was slow for both, the fourth for one of them.
    result = Paired({"a": [1.0, 2.0, 9.0, 1.0, 1.0], "b": [2.0, 4.0, 18.0, 50.0, 2.0]})
    assert result.ratio("b", "a") == 2.0
    assert result.ratio("a", "a") == 1.0
    assert Paired({"a": [1.0, 1.0], "b": [2.0, 3.0]}).ratio_range("b", "a") == (2.0, 3.0)


def test_encoders_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    encoders.main(["--megabytes", "1", "--workers", "2"])
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = {cells[1].strip(): [float(cell) for cell in cells[2:-1]] for cells in lines}
    assert set(rows) == {"fp16", "bf16", "int8", "onebit", "topk", "powersgd"}
    for size, encode, decode, step, saved, ratio in rows.values():
        assert 0 < size <= 2.01
        assert 0 < encode < step
        assert 0 < decode < step
        assert saved == pytest.approx((4 - size) * 8, abs=0.05)
        assert ratio == pytest.approx(saved / step, rel=0.05)


def test_copies_are_counted() -> None:
    table, rows = torch.zeros(10, 3), torch.ones(2, 3)
    with Copied() as copied:
        table.index_copy_(0, torch.tensor([1, 2]), rows)
        torch.cat([rows, rows])
        rows.clone()
        rows + rows  # computes
        torch.mul(rows, 2, out=table[:2])
    assert copied.by_kind == {"rows": 24, "cat": 48, "copy": 24, "into buckets": 24}


@pytest.mark.long
def test_copies_of_a_step_are_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.copies", "--quick", "--workers", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "│" in line]
    assert len(lines) == 2
    numbers = [[float(cell) for cell in line.split("│")[2:-1]] for line in lines]
    assert all(row[-2] == pytest.approx(sum(row[:-2]), abs=0.05) for row in numbers)
    assert numbers[1][-1] == 0


@pytest.mark.long
def test_what_numbers_of_the_batch_cost_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.batch_numbers", "--rounds", "1", "--steps", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "│" in line]
    assert [int(cells[-1]) for cells in lines] == [0, 1552, 512, 512, 4 * 512]
    assert all(float(cell) > 0 for cells in lines for cell in cells[1:3])


@pytest.mark.long
def test_in_batch_negatives_are_timed_beside_another_system() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.in_batch", "--rounds", "1", "--steps", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "│" in line]
    assert [cells[0].strip() for cells in lines] == list(in_batch.VARIANTS)
    assert all(float(cells[1]) > 0 for cells in lines)


def test_collectives_that_are_timed_move_what_they_should(pool: Pool) -> None:
    for found in pool.run(4, collectives.moved):
        assert all(found.values()), found


def test_collectives_are_timed_for_each_size(pool: Pool) -> None:
    for found in pool.run(4, collectives.speeds):
        assert found.keys() == COLLECTIVES.keys()
        assert all(len(speeds) == 2 and min(speeds) > 0 for speeds in found.values())


def _public(kind: str) -> Case:
    if kind == "does not run":
        raise ValueError("settings do not fit")
    model = torch.nn.Linear(3, 2).double()

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        if kind == "refused" and loss > 0:
            loss = loss * 2
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        return loss

    if kind == "differs":  # as the second of two that are made alike would
        model.weight.data += torch.empty(()).uniform_(generator=_PUBLIC)
    return model, step, [{"x": torch.ones(2, 3, dtype=torch.float64)}] * 3


_PUBLIC = torch.Generator().manual_seed(1)


def test_planning_is_timed_by_its_stages() -> None:
    # In a process of its own, which it makes worker 0 of the cluster.
    with multiprocessing.get_context("spawn").Pool(1) as workers:
        found = workers.apply(planning.plan, (21, 5, "HYBRID"))
    assert (found.variables, found.hosts) == (22, 5)
    assert set(found.seconds) == set(planning.STAGES)
    assert all(seconds > 0 for seconds in found.seconds.values())


@pytest.mark.parametrize("kind", ["same", "differs", "refused", "does not run"])
def test_public_code_is_compared_with_plain_pytorch(kind: str) -> None:
    outcome = try_out("layer", lambda: _public(kind))
    assert outcome.kind == kind
    assert bool(outcome.detail) == (kind != "same")
