"""On CUDA: the numbers of one device, by every way to synchronise.

Workers of a pool share the first device and talk through Gloo, so that one is enough. A launched
script has one worker for each device, through NCCL where there are several. The same checks run on
the CPU in the files of their subjects.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bag_steps
import batch_norm_steps
import compiled_steps
import endings
import equality
import pytest
import recorded_steps
import recurrent_steps
import synchronizers
import torch
from launching import LAUNCHER_VARIABLES, ROOT
from pool import Pool
from test_equality import SHORT
from test_synchronizers_long import WAYS

from parallax.runtime.recorded import CudaDevice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

SIZES = (1, 2, 3)
BY_MESSAGES_BETWEEN_TWO = ("ring", "tree", "halving")
"""Gloo has these for memory of the host only."""

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn

import parallax


def training():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 5)).double().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)

    def step(ids, labels):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    return model, step


_, step = training()
runner = parallax.get_runner(step)
model, alone = training()
torch.manual_seed(2)
for _ in range(6):
    ids = torch.randint(50, (runner.num_workers, 3, 4)).cuda()
    labels = torch.randint(5, (runner.num_workers, 3)).cuda()
    alone(ids.flatten(0, 1), labels.flatten())
    runner.run(ids[runner.worker_id], labels[runner.worker_id])
found = runner.state_dict()["model"]
far = max(float((found[k].cuda() - v).abs().max()) for k, v in model.state_dict().items())
assert far < 1e-10, far
print(runner.num_workers, "workers agree", flush=True)
"""


@pytest.fixture(scope="module")
def cuda_pool() -> Iterator[Pool]:
    """Workers that share the first device."""
    workers = Pool(SIZES[-1], (), torch.device("cuda", 0))
    yield workers
    workers.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("option", ["HYBRID", "PS", "AR"])
def test_equals_one_device(cuda_pool: Pool, option: str, size: int) -> None:
    cases = [case for case in equality.all_cases() if case[1] in SHORT]
    # Each case with one option at one size.
    chosen = cases[3 * ["HYBRID", "PS", "AR"].index(option) + size - 1 :: 9]
    for found in cuda_pool.run(size, equality.compare, option, chosen):
        assert set(found) == {"-".join(case) for case in chosen}
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("way", [way for way in WAYS if way not in BY_MESSAGES_BETWEEN_TWO])
def test_every_synchronizer_gives_the_numbers_of_one_device(cuda_pool: Pool, way: str) -> None:
    cases = [("dense", "momentum", "clip_norm"), ("sparse", "adam", "average")]
    for found in cuda_pool.run(3, synchronizers.compare, WAYS[way], cases):
        for case, (difference, chosen) in found.items():
            assert difference < 1e-10, case
            assert chosen


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["whole", "dealt", "some", "rows", "hybrid"])
def test_bags_give_the_numbers_of_one_device(cuda_pool: Pool, kind: str, size: int) -> None:
    for optimizer in ("sgd", "adam", "lazy"):
        for found in cuda_pool.run(size, bag_steps.train, kind, optimizer, optimizer == "adam"):
            assert found["difference"] <= 1e-10, found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", SIZES[:2])
def test_compiled_regions_give_the_numbers_of_one_device(cuda_pool: Pool, size: int) -> None:
    for difference, plan in cuda_pool.run(size, compiled_steps.compare, "HYBRID", "adam"):
        assert difference < 1e-10
        ready, of, total = plan.partition("compiled: ")[2].split()[:3]
        assert (ready, of) == (total, "of"), plan


NORMALISED = [
    *((name, "auto") for name in batch_norm_steps.MODELS),
    *(("images", how) for how in ("none", "inductor")),
    ("features", "inductor"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SIZES[:2])
@pytest.mark.parametrize(("name", "compiled"), NORMALISED)
def test_batches_are_normalised_as_on_one_device(
    cuda_pool: Pool, name: str, size: int, compiled: str
) -> None:
    settings: dict[str, Any] = {"compile": compiled, "sync_batch_norm": True}
    run = batch_norm_steps.train
    for found, sent in cuda_pool.run(size, run, name, "HYBRID", None, torch.float64, settings, 6):
        assert found < 1e-10
        assert bool(sent.get("batch norms")) == (size > 1)


@pytest.mark.parametrize("size", SIZES[:2])
@pytest.mark.parametrize(("option", "optimizer"), [("HYBRID", "adam"), ("PS", "momentum")])
def test_recorded_regions_give_the_numbers_of_regions_that_run(
    cuda_pool: Pool, option: str, optimizer: str, size: int
) -> None:
    for found in cuda_pool.run(size, recorded_steps.compare, option, optimizer):
        assert found["difference"] < 1e-10
        assert recorded_steps.regions_of(found["plan"]) > 0, found["plan"]


def test_one_graph_is_recorded_for_several_lengths(cuda_pool: Pool) -> None:
    (found,) = cuda_pool.run(1, recorded_steps.compare_lengths, recorded_steps.LENGTHS)
    assert recorded_steps.regions_of(found["plan"]) >= 2, found["plan"]


@pytest.mark.parametrize("size", SIZES[:2])
def test_shapes_that_come_often_are_recorded(cuda_pool: Pool, size: int) -> None:
    for found in cuda_pool.run(size, recorded_steps.compare_lengths, recorded_steps.LENGTHS):
        assert found["difference"] < 1e-10
        assert recorded_steps.regions_of(found["plan"]) > 0, found["plan"]


@pytest.mark.parametrize("kind", endings.KINDS)
def test_updates_are_left_out_on_all_workers(cuda_pool: Pool, kind: str) -> None:
    counts = [(4, 4), (3, -2), (1, 5), (2, 2), (5, -1), (1, 6), (2, 2)]
    for found in cuda_pool.run(2, endings.train, kind, counts, {}):
        assert found["difference"] < 1e-10
        assert found["scale"]
        assert len(found["returned"]) == 2


def test_scaled_training_in_float16_is_that_of_one_device() -> None:
    expected, found, scales = endings.half(torch.device("cuda", 0), 40)
    assert scales[-1] < scales[0]
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", recurrent_steps.LAYERS)
def test_recurrent_layers_are_those_of_one_device(
    kind: str,
    dtype: torch.dtype,
    capfd: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    found = recurrent_steps.compare(kind, dtype, torch.device("cuda", 0))
    assert found < (1e-10 if dtype is torch.float64 else 1e-3)
    told = [capfd.readouterr().err, *(str(one.message) for one in recwarn)]
    assert not any("contiguous chunk" in text for text in told), told


def test_random_numbers_and_recordings_go_on_after_one_that_fails() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    x = torch.ones(1000, device="cuda")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            device.record(lambda: [torch.nn.functional.dropout(x), x.nonzero()])
        assert torch.nn.functional.dropout(x).sum() > 0
        repeat, (twice,) = device.record(lambda: [x * 2])
        repeat()
        assert torch.equal(twice, x + x)


GROUPS = """
import torch
import torch.distributed as dist

from parallax.runtime.comm.process_groups import process_group

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
for kind in ("sums", "exchanges"):
    group = process_group([0], kind)
    sent = torch.arange(6.0, device="cuda")
    received = torch.zeros(6, device="cuda")
    dist.all_to_all_single(received, sent, [6], [6], group=group, async_op=True).wait()
    dist.all_reduce(received, group=group, async_op=True).wait()
    dist.broadcast(received, group_src=0, group=group, async_op=True).wait()
    assert torch.equal(received, sent)
print("talks")
"""


def test_groups_are_those_of_nccl() -> None:
    """With one worker, as there may be one device: that such calls are understood."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", GROUPS],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert "talks" in done.stdout


def test_a_script_has_a_worker_for_each_device(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    count = torch.cuda.device_count()
    assert done.stdout.count(f"{count} workers agree") == count, done.stdout
