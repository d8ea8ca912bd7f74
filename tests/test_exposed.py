"""Communication that nothing hides: read off profiles, of steps on a virtual cluster."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks import exposed
from benchmarks.comparison.report import Comparison, Row
from benchmarks.comparison.spans import TURN, idle_seconds
from benchmarks.namespaces import missing_requirement

ROOT = Path(__file__).parents[1]
MISSING = missing_requirement()


@pytest.mark.usefixtures("one_thread")
def test_what_no_operation_takes_is_idle() -> None:
    """Waiting counts, computing does not, and neither does what other threads compute."""
    square = torch.ones(512, 512)
    stop = threading.Event()

    def compute_beside() -> None:
        while not stop.is_set():
            square @ square

    other = threading.Thread(target=compute_beside)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities) as trace,
        torch.profiler.record_function(TURN),
    ):
        began = time.perf_counter()
        other.start()
        stop.wait(0.4)
        waited = time.perf_counter() - began
        stop.set()
        other.join()
        for _ in range(20):
            square @ square
        whole = time.perf_counter() - began
    idle = idle_seconds(trace.events())
    assert waited - 0.01 < idle < whole
    computing = [e for e in trace.events() if e.name == "aten::matmul"][-20:]
    took = sum(e.time_range.elapsed_us() for e in computing) * 1e-6
    assert idle == pytest.approx(whole - took, abs=0.05)


def test_exposed_is_more_than_one_device_has() -> None:
    rows = [
        Row("parallax-hybrid", seconds=0.5, idle_seconds=0.12),
        Row("computation", seconds=0.3, idle_seconds=0.01),
        Row("captured", seconds=0.3, idle_seconds=0.02),
        Row("ddp", seconds=0.9, idle_seconds=0.51),
        Row("parallax-ar", failure="it did not end"),
    ]
    result = Comparison("vgg", 4, 1, "1gbit", rows, 0.3, 0, 0, 1)
    assert exposed.table(result).splitlines() == [
        "**vgg: 4 hosts x 1, 1gbit**",
        "",
        "| system | ms/step | without an operation | exposed | of DDP's |",
        "| --- | --- | --- | --- | --- |",
        "| parallax-hybrid | 500.0 | 120.0 | 100.0 | 0.20 |",
        "| computation | 300.0 | 10.0 | - | - |",
        "| captured | 300.0 | 20.0 | - | - |",
        "| ddp | 900.0 | 510.0 | 500.0 | 1.00 |",
        "",
        "parallax-ar: it did not end",
    ]


@pytest.mark.long
@pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
def test_a_small_cluster_is_traced(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.exposed", "--quick", "--hosts", "2"]
    command += ["--rounds", "2", "--workload", "vgg", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = msgspec.json.decode(file.read_bytes(), type=list[Comparison])
    for row in result.rows:
        assert row.failure == ""
        assert 0 < row.idle_seconds < row.seconds
    assert "| ddp |" in done.stdout
