"""Batches that are read ahead, whose ids travel a step before their rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ahead
import pytest
import torch
from cells import sampled
from pool import Pool
from test_errors_processes import MODEL, run
from torch import nn

from parallax.config import Config
from parallax.errors import BatchError
from parallax.graph.analysis.variables import analyze
from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover
from parallax.graph.objects.state import aliases
from parallax.rewrite.ahead import ids_graph
from parallax.rewrite.pipeline import rewrite
from parallax.runtime.ahead import Batches
from parallax.runtime.comm.world import single
from parallax.runtime.runner import Runner
from parallax.runtime.state.state_table import StateTable
from parallax.strategy.builders import ClusterFacts
from parallax.strategy.choose import choose_strategy

STEPS = 10


EXAMPLES = [("dlrm", "HYBRID"), ("nmt", "HYBRID"), ("nmt", "PS")]


@pytest.mark.parametrize(
    ("name", "option", "size"),
    sampled(((*example, size) for size in (3, 2, 4) for example in EXAMPLES), 4),
)
def test_numbers_are_those_of_one_device(pool: Pool, name: str, option: str, size: int) -> None:
    for difference, found in pool.run(size, ahead.example, name, option):
        assert difference <= 1e-10
        # The program of the second step has the optimizer's slots, and is not known in the first.
        assert found >= STEPS - 2


def test_random_ids_do_not_travel_ahead(pool: Pool) -> None:
    # The language model draws its sampled classes in the step.
    assert [found for _, found in pool.run(2, ahead.example, "lm", "HYBRID")] == [0, 0]


def test_all_do_without_when_one_has_no_batch_that_follows(pool: Pool) -> None:
    found = pool.run(3, ahead.one_reads_less_ahead)
    assert all(difference <= 1e-10 for difference, _ in found), found
    assert len({count for _, count in found}) == 1
    assert 1 <= found[0][1] <= 3


def test_another_batch_in_between(pool: Pool) -> None:
    for difference, found in pool.run(2, ahead.another_in_between):
        assert difference <= 1e-10
        assert 4 <= found <= STEPS - 2


def test_a_loop_that_moves_its_batches_runs_as_without(pool: Pool) -> None:
    for difference, found in pool.run(2, ahead.moved_by_the_loop):
        assert difference <= 1e-10
        assert found == 0


def test_a_loop_that_changes_its_batches_soon_runs_as_without(pool: Pool) -> None:
    for difference, found in pool.run(2, ahead.changed_by_the_loop):
        assert difference <= 1e-10
        assert found == 0


def test_a_batch_as_one_argument(pool: Pool) -> None:
    for difference, found in pool.run(2, ahead.nested):
        assert difference <= 1e-10
        assert found >= STEPS - 3


@pytest.mark.parametrize("place", [1, 5, STEPS - 1])
def test_a_bad_id_that_came_ahead_changes_nothing(pool: Pool, place: int) -> None:
    for difference, found, errors in pool.run(3, ahead.bad_id, place):
        assert difference <= 1e-10
        assert found >= 3
        assert len(errors) == 1
        assert "Worker 2 looks up row 11 of table" in errors[0]
        assert "Nothing was updated in this step." in errors[0]


@pytest.mark.parametrize("kind", ["rows", "bags"])
def test_batches_of_other_sizes(pool: Pool, kind: str) -> None:
    for difference, found in pool.run(2, ahead.other_shapes, kind):
        assert difference <= 1e-10
        assert found >= 4


DEVIATES = f"""{MODEL}
import datetime
from parallax.runtime.comm import texts
runner = parallax.get_runner(step)
for number, ids in enumerate(runner.ahead([torch.tensor([1, 2])] * 9)):
    if number == 4:  # when all have begun, which may take longer
        texts.START_TIMEOUT = datetime.timedelta(seconds=3)
    runner.run(ids.clone() if rank == 1 and number == 5 else ids)
"""


def test_one_worker_alone_may_not_run_another_batch(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(DEVIATES)
    (first, text), (second, other) = run([path, path])
    assert first != 0
    assert second != 0
    assert "PeerError: Worker 1 waited 3 s to agree on running another batch than the one" in other
    assert "that runner.ahead() gave; still missing: worker 0." in other
    assert "PeerError" in text


# -- Reading -----------------------------------------------------------------------------------


def test_batches_come_in_their_order_and_two_are_read_ahead() -> None:
    read = []

    def source() -> Iterator[int]:
        for number in range(5):
            read.append(number)
            yield number

    batches = Batches(source(), 2)
    assert next(batches) == 0
    assert read == [0, 1, 2]
    assert batches.after([0]) == [[1], [2]]
    assert batches.after([1]) == []
    assert list(batches) == [1, 2, 3, 4]
    assert batches.after([4]) == []
    assert next(batches, None) is None


def test_what_reading_fails_with_is_raised_when_its_batch_is_due() -> None:
    def source() -> Iterator[int]:
        yield 0
        yield 1
        raise OSError("no more disk")

    batches = Batches(source(), 2)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match="no more disk"):
        next(batches)


def test_a_source_that_uses_its_tensors_again_is_refused() -> None:
    def source() -> Iterator[torch.Tensor]:
        ids = torch.zeros(2)
        for _ in range(3):
            yield ids.add_(1)

    with pytest.raises(BatchError, match=r"a batch that changed when a later one was read"):
        next(Batches(source(), 2))


def test_one_worker_reads_nothing_ahead() -> None:
    table = nn.Embedding(5, 3)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = table(ids).sum()
        loss.backward()
        optimizer.step()
        return loss

    runner = Runner(step, discover(step), Config(workers=1), single(torch.device("cpu")))
    read = []

    def source() -> Iterator[torch.Tensor]:
        for number in range(3):
            read.append(number)
            yield torch.tensor([number])

    for count, ids in enumerate(runner.ahead(source()), 1):
        runner.run(ids)
        assert len(read) == count


# -- What is computed ahead ------------------------------------------------------------------------


class _Shifted(nn.Module):
    """Reads by numbers that follow from the batch, or also from something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(40, 3)
        self.register_buffer("offset", torch.tensor(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.kind == "random":
            ids = ids + torch.randint(3, ids.shape)
        elif self.kind == "state":
            ids = ids + self.offset
        elif self.kind == "changed":
            ids = ids.add_(1)
        else:
            ids = ids.flip(0)[::2] * 2 + 1
        return self.table(ids).sum()


@pytest.mark.parametrize("kind", ["batch", "random", "state", "changed"])
def test_only_what_follows_from_the_batch_is_known_ahead(kind: str) -> None:
    model = _Shifted(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(ids)
        loss.backward()
        optimizer.step()
        return loss

    objects = discover(step)
    leaves = StateTable(objects, 0, 2).leaves
    captured = capture(step, objects, (torch.arange(4),), {}, {}, None)
    analysis = analyze(captured, leaves, aliases(objects))
    strategy = choose_strategy("PS", analysis, ClusterFacts(2, None, (0, 0)))
    rewritten = rewrite(analysis, strategy, 0, 2)
    graph = ids_graph(rewritten.step, rewritten.resources)
    if kind != "batch":
        assert graph is None
        return
    assert graph is not None
    (tables,) = graph([torch.tensor([5, 6, 7, 8])])
    assert [[ids.tolist() for ids in one] for one in tables] == [[[17, 13]]]
