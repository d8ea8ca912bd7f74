"""Starting and stopping the workers of one machine, with real scripts and processes."""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import LAUNCHER_VARIABLES, PROLOGUE, ROOT, Run

from parallax.cluster import worker_watch
from parallax.cluster.launch import Target, find_target, original_command
from parallax.cluster.worker_output import MAX_LINE_BYTES, LineMarker
from parallax.cluster.worker_start import exit_status
from parallax.cluster.worker_watch import WorkerEnd, WorkerWatch, first_failure
from parallax.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LaunchError,
    ModelError,
    ParallaxError,
    PeerError,
)

NASTY = [
    "",
    "with space",
    "--",
    "--workers",
    "-c",
    'it\'s "quoted"',
    "new\nline\r\ttab",
    "$HOME $(id) `id` ${local_rank} $$ $",
    "Grüße 火 🏖️",
    "back\\slash",
    "*?[a]{b,c}",
    "-m",
    b"\xff\xfe".decode("utf-8", "surrogateescape"),
]


def test_workers_get_everything_as_the_user_gave_it(
    start_script: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    run = start_script(
        """
os.chdir("elsewhere")
env = start(seed=7)
print(json.dumps({
    "rank": env.rank,
    "world": env.world_size,
    "argv": sys.argv,
    "directory": os.getcwd(),
    "options": [sys.flags.optimize, sys.warnoptions, sys._xoptions.get("utf8")],
    "seed": os.environ["PARALLAX_SEED"],
    "threads": os.environ["OMP_NUM_THREADS"],
}))
print("to stderr", file=sys.stderr)
print()
print("unfinished", end="")
""",
        *NASTY,
        command=["-O", "-Wignore", "-X", "utf8=1", "./sub/train.py"],
        path="sub/train.py",
    )
    assert run.end() == 0, run.text()
    lines = [re.fullmatch(r"\[worker (\d)\] (.*)", line) for line in run.out]
    assert all(lines), run.text()
    for rank in (0, 1):
        report, empty, unfinished = [m[2] for m in lines if m and m[1] == str(rank)]
        assert json.loads(report) == {
            "rank": rank,
            "world": 2,
            "argv": ["./sub/train.py", *NASTY],
            "directory": str(tmp_path / "elsewhere"),
            "options": [1, ["ignore"], "1"],
            "seed": "7",
            "threads": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        }
        assert (empty, unfinished) == ("", "unfinished")
        assert f"[worker {rank}] to stderr" in run.err
    # Not a word of torchrun's own.
    (first,) = [line for line in run.err if not line.startswith("[worker")]
    assert "starting 2 workers on this machine, each with OMP_NUM_THREADS=" in first
    run.assert_nothing_left()


def test_module_and_redirected_output(start_script: Callable[..., Run], tmp_path: Path) -> None:
    run = start_script(
        """
env = start(redirect_path="logs")
print("out", env.rank, __spec__.name, sys.argv[1:], os.environ["PARALLAX_SEED"])
print("err", env.rank, file=sys.stderr)
""",
        "-x",
        command=["-m", "pkg.train"],
        path="pkg/train.py",
    )
    assert run.end() == 0, run.text()
    seeds = set()
    for rank in (0, 1):
        line = (tmp_path / "logs" / f"worker-{rank}.out").read_text()
        found = re.fullmatch(rf"out {rank} pkg.train \['-x'\] (\d+)\n", line)
        assert found, run.text()
        seeds.add(found[1])
        assert f"[worker {rank}] {line.strip()}" in run.out
        assert (tmp_path / "logs" / f"worker-{rank}.err").read_text() == f"err {rank}\n"
    assert len(seeds) == 1
    run.assert_nothing_left()


def test_a_worker_may_not_start_workers(start_script: Callable[..., Run]) -> None:
    run = start_script(
        """
env = start()
if "child" not in sys.argv:
    if env.rank == 0:
        child = subprocess.run([sys.executable, __file__, "child"])
        print("child", child.returncode)
        launch_local_workers(2, redirect_path=None)
    time.sleep(100)
"""
    )
    assert run.end() == 3, run.text()
    text = run.text()
    assert "has the environment of worker 0 but was started by it" in text
    assert "error: LaunchError: This process is already a worker that parallax started" in text
    run.assert_nothing_left()


def test_interactive_programs_are_refused(tmp_path: Path) -> None:
    body = PROLOGUE + "start()\n"
    environ = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    environ["PYTHONPATH"] = str(ROOT)

    def error(command: list[str], text: str | None = None) -> str:
        result = subprocess.run(
            [sys.executable, *command],
            env=environ,
            cwd=tmp_path,
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 1
        return result.stderr

    assert "comes from a `python -c` command" in error(["-c", body])
    assert "comes from its standard input" in error(["-"], body)
    spawning = tmp_path / "spawning.py"
    spawning.write_text(
        body.replace("start()\n", "")
        + """
import multiprocessing
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=start)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
    )
    assert "This process was started by multiprocessing" in error([str(spawning)])


def test_pytest_is_refused() -> None:
    with pytest.raises(LaunchError, match="runs inside pytest"):
        original_command(["python", "-m", "pytest", "-q"], sys.executable, None, "/")
    with pytest.raises(LaunchError, match="runs inside pytest"):
        original_command(["python", "/opt/bin/pytest"], sys.executable, None, "/")


def test_notebooks_and_consoles_are_refused() -> None:
    with pytest.raises(LaunchError, match="comes from a notebook"):
        original_command(["python", "-m", "ipykernel_launcher", "-f", "x"], "/py", None, "/")
    with pytest.raises(LaunchError, match="comes from an interactive session"):
        original_command(["python", "-q"], "/py", None, "/")


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (["train.py", "-m", "x"], Target("script", "train.py", 1)),
        (["-u", "-Wignore", "-X", "dev", "train.py"], Target("script", "train.py", 5)),
        (["-W", "-m", "train.py"], Target("script", "train.py", 3)),
        (["--check-hash-based-pycs", "always", "a.py"], Target("script", "a.py", 3)),
        (["-uBm", "pkg.train", "-c"], Target("module", "pkg.train", 2)),
        (["-mpkg.train"], Target("module", "pkg.train", 1)),
        (["-Ec", "pass", "train.py"], Target("command", "pass", 2)),
        (["-u", "-", "x"], Target("stdin", index=2)),
        (["-i"], Target("nothing")),
        ([], Target("nothing")),
    ],
)
def test_what_a_command_line_runs(words: list[str], target: Target) -> None:
    assert find_target(["python", *words]) == target


def test_a_relative_script_is_found_after_a_change_of_directory(tmp_path: Path) -> None:
    script = tmp_path / "sub" / "train.py"
    script.parent.mkdir()
    script.touch()

    def found(name: str, main_file: str | None, directory: str | None) -> object:
        return original_command(["python", name, "-x"], "/py", main_file, directory)

    here = str(tmp_path)
    assert found("sub/train.py", str(script), "/") == (["/py", "sub/train.py", "-x"], here)
    assert found(str(script), str(script), None) == (["/py", str(script), "-x"], None)
    assert found("sub/train.py", None, here) == (["/py", "sub/train.py", "-x"], here)
    # A script that was started through a link, say.
    assert found("other.py", str(script), None) == (["/py", str(script), "-x"], None)
    with pytest.raises(LaunchError, match=r"The script sub/train\.py is no longer found"):
        found("sub/train.py", None, None)


@given(st.lists(st.text(), max_size=4))
def test_arguments_of_the_program_are_not_touched(arguments: list[str]) -> None:
    words = ["python", "-u", "/bin/sh", *arguments]
    assert original_command(words, "/py", None, None)[0] == ["/py", *words[1:]]
    assert find_target(words) == Target("script", "/bin/sh", 2)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("x"), 2),
        (LaunchError("x"), 3),
        (PeerError("x"), 3),
        (ModelError("x"), 4),
        (DataError("x"), 5),
        (CheckpointError("x"), 6),
        (ParallaxError("x"), 1),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"), 3),
        (RuntimeError("Connection closed by peer"), 1),
    ],
)
def test_exit_status_of_each_family(error: BaseException, status: int) -> None:
    assert exit_status(error) == status


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([], None),
        ([WorkerEnd(0, 0), WorkerEnd(1, 0)], None),
        ([WorkerEnd(0, 0), WorkerEnd(1, 4), WorkerEnd(2, 1)], WorkerEnd(1, 4)),
        ([WorkerEnd(0, 3), WorkerEnd(1, 4)], WorkerEnd(1, 4)),
        ([WorkerEnd(0, 3), WorkerEnd(1, -15, stopped=True)], WorkerEnd(0, 3)),
        ([WorkerEnd(2, 3), WorkerEnd(0, 3)], WorkerEnd(2, 3)),
        ([WorkerEnd(0, -9), WorkerEnd(1, 3)], WorkerEnd(0, -9)),
    ],
)
def test_the_first_failure_is_not_hidden_by_bystanders(
    ends: list[WorkerEnd], first: WorkerEnd | None
) -> None:
    assert first_failure(ends) == first


def test_a_stopped_worker_is_not_blamed_for_a_failure_that_was_not_seen(tmp_path: Path) -> None:
    """torchrun may reap the worker that failed before the watch can ask for its status."""
    watch = WorkerWatch(tmp_path, 2, lambda: None)
    assert watch._was_stopped(-15, now=0.0)
    assert not watch._was_stopped(5, now=0.0)
    bystander = WorkerEnd(0, -15, stopped=watch._was_stopped(-15, now=0.0))
    assert first_failure([bystander, WorkerEnd(1, 5)]) == WorkerEnd(1, 5)
    assert first_failure([bystander, WorkerEnd(1, 3)]) == WorkerEnd(1, 3)


def test_who_is_killed_after_an_end_that_was_not_seen_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = WorkerWatch(tmp_path, 2, lambda: None)
    statuses = {101: None, 100: -9}  # torchrun was quicker for the first
    monkeypatch.setattr(worker_watch, "_peek_status", statuses.get)
    monkeypatch.setattr(worker_watch, "_kill_group", lambda pid: None)
    for rank, pid, seconds in ((1, 101, 0.0), (0, 100, 5.0)):
        monkeypatch.setattr(worker_watch.time, "monotonic", lambda seconds=seconds: 1e6 + seconds)
        read, write = os.pipe()
        os.close(write)
        watch._running[read] = pid
        watch._selector.register(read, selectors.EVENT_READ, (rank, pid))
        watch._on_end(read, rank, pid)
    assert watch.ends() == [WorkerEnd(0, -9, stopped=True)]
    assert first_failure([*watch.ends(), WorkerEnd(1, 3)]) == WorkerEnd(1, 3)


def test_status_of_a_signal() -> None:
    assert WorkerEnd(0, -11).shell_status == 139
    assert WorkerEnd(0, 4).shell_status == 4


@given(st.binary(), st.lists(st.integers(0, 40)))
def test_lines_do_not_depend_on_how_they_arrive(data: bytes, cuts: list[int]) -> None:
    def marked(pieces: list[bytes]) -> bytes:
        marker = LineMarker(b"> ")
        return b"".join(map(marker.feed, pieces)) + marker.finish()

    edges = sorted([0, *(min(cut, len(data)) for cut in cuts), len(data)])
    pieces = [data[low:high] for low, high in pairwise(edges)]
    assert marked(pieces) == marked([data])


def test_lines() -> None:
    marker = LineMarker(b"> ")
    assert marker.feed(b"a") == b""
    assert marker.feed(b"b\n\nc\r\nd\r") == b"> ab\n> \n> c\n"
    assert marker.feed(b" 5%\r10%") == b"> d\n>  5%\n"
    assert marker.finish() == b"> 10%\n"
    assert marker.finish() == b""
    long = b"x" * (MAX_LINE_BYTES + 5)
    assert marker.feed(long) == b"> " + long + b"\n"
