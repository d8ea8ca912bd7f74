"""What a trace says of steps that workers ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import traces
from pool import Pool

from parallax.runtime.trace import Event, chrome_trace, shares


@pytest.mark.parametrize(("size", "strategy"), [(1, "HYBRID"), (2, "HYBRID"), (3, "rings")])
def test_workers_record_their_steps(pool: Pool, size: int, strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    results = pool.run(size, traces.record, str(path), strategy)
    found = json.loads(path.read_text())["traceEvents"]
    for worker, result in enumerate(results):
        assert result["recorder"] is None
        own = [event for event in found if event["pid"] == worker and event["ph"] == "X"]
        steps = [event for event in own if event["tid"] == 0]
        assert [event["name"] for event in steps] == ["step 0", "step 1", "step 2"]
        messages = [event for event in own if "args" in event]
        assert len(messages) == traces.RECORDED * result["messages"]
        assert sum(event["args"]["bytes sent"] for event in messages) == result["sent"]
        assert bool(messages) == (size > 1)
        assert all(event["dur"] >= 0 for event in own)
        inside = [e for e in own if e["tid"] == 1]
        total = sum(event["dur"] for event in steps)
        assert sum(event["dur"] for event in inside) == pytest.approx(total, rel=0.05)
        # All workers see the same.
        assert result["shares"] == results[0]["shares"]
        assert len(result["shares"]) == size
        step, computing, waiting, communicating = result["shares"][worker]
        assert step == pytest.approx(computing + waiting)
        assert step * traces.RECORDED * 1e6 == pytest.approx(total, rel=1e-6)
        assert (communicating > 0) == (size > 1)
        assert result["shown"][0] == "3 steps are to be recorded"
        assert result["shown"][1].count("worker ") == size
        assert result["refused"] == [
            "steps must be a positive integer, found 0.",
            "path must be that of a file, found 3.",
            "3 steps are being recorded already.\n"
            "  What to do: call profile() again when they have run.",
        ]


UNFINISHED = """
import torch, parallax
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
runner = parallax.get_runner(step, config=parallax.Config(workers=1))
for number in range(4):
    if number == 1:
        runner.profile(5, "absent.json")
    runner.run(torch.ones(3, 2))
"""


def test_a_script_that_ends_too_early_is_told(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(UNFINISHED)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "profile(5) recorded 3 steps when the script ended" in done.stdout + done.stderr
    assert not (tmp_path / "absent.json").exists()


EVENTS = [
    Event("step", "step 0", 0.0, 10.0),
    Event("message", "dense: sum", 1.0, 6.0, 100.0),
    Event("message", "rows: push", 2.0, 4.0, 10.0),
    Event("waiting", "waiting", 5.0, 6.0),
    Event("waiting", "waiting", 8.0, 9.5),
    Event("step", "step 1", 12.0, 14.0),
    Event("message", "dense: sum", 9.0, 13.0, 100.0),
]


def test_shares_are_of_the_steps_alone() -> None:
    found = shares(EVENTS)
    assert found.step == 6.0
    assert found.waiting == 1.25
    assert found.computing == 4.75
    assert found.communicating == (5 + 1 + 1) / 2  # what overlaps counts once


def test_messages_at_the_same_time_have_lines_of_their_own() -> None:
    found = chrome_trace([EVENTS])["traceEvents"]
    names = [event["args"]["name"] for event in found if event["ph"] == "M"]
    assert names == ["worker 0", "steps", "computing and waiting", "messages 1", "messages 2"]
    lines = {
        (event["ts"] / 1e6, event["name"]): event["tid"] for event in found if event["ph"] == "X"
    }
    assert lines[1.0, "dense: sum"] == 2
    assert lines[2.0, "rows: push"] == 3
    assert lines[9.0, "dense: sum"] == 2
    computing = [event for event in found if event["name"] == "computing"]
    spans = [(event["ts"] / 1e6, event["dur"] / 1e6) for event in computing]
    assert spans == [(0.0, 5.0), (6.0, 2.0), (9.5, 0.5), (12.0, 2.0)]
