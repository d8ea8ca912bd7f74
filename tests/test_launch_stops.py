"""Workers stop together: failures, signals, and what is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from launching import BLOCKED, Run

# Seconds: at once, but for what a busy machine takes; torchrun alone would wait for 30.
SOON = 12


@pytest.mark.parametrize(
    ("failure", "status", "shown", "last"),
    [
        (
            'raise DataDependentError("the step depends on x.", hint="use torch.where.")',
            4,
            ["error: DataDependentError: the step depends on x.", "  What to do: use torch.where."],
            "worker 1 failed with exit status 4; the other workers were stopped",
        ),
        (
            "1 / 0",
            1,
            ["Traceback (most recent call last):", "ZeroDivisionError: division by zero"],
            "worker 1 failed with exit status 1; the other workers were stopped",
        ),
        ("sys.exit(5)", 5, [], "worker 1 failed with exit status 5; the other workers"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            [],
            "worker 1 was killed by signal 9 (SIGKILL), as the kernel does when memory runs out",
        ),
    ],
)
def test_a_failing_worker_ends_all(
    start_script: Callable[..., Run], failure: str, status: int, shown: list[str], last: str
) -> None:
    run = start_script(
        "env = start()\n"
        + BLOCKED
        + f"""
if env.rank == 0:
    block()
while not os.path.exists("go"):
    time.sleep(0.01)
{failure}
"""
    )
    run.wait_for("blocked")
    started = time.monotonic()
    (run.temporary.parent / "go").touch()
    assert run.end() == status, run.text()
    assert time.monotonic() - started < SOON
    for line in shown:
        assert f"[worker 1] {line}" in run.err
    assert f"parallax: {last}" in run.err[-1]
    if "Error" in failure:
        assert not any(line.startswith("[worker 1] Traceback") for line in run.err)
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("leaving", "status", "last"),
    [
        (
            "time.sleep(0.5); os._exit(7)",
            7,
            "worker 1 failed with exit status 7; the other workers were stopped",
        ),
        (
            "pass",
            3,
            "worker 0 failed with exit status 3, as worker 1 ended while others went on",
        ),
    ],
)
def test_who_left_is_named_although_others_notice_it_first(
    start_script: Callable[..., Run], leaving: str, status: int, last: str
) -> None:
    # Its sockets close, here by hand, while the process itself takes a while to end.
    run = start_script(
        f"""
env = start()
if env.rank == 0:
    open("lost", "w").close()
    raise PeerError("worker 1 left.")
while not os.path.exists("lost"):
    time.sleep(0.01)
{leaving}
"""
    )
    assert run.end() == status, run.text()
    assert last in run.err[-1]
    run.assert_nothing_left()


def test_the_last_to_obey_is_killed(start_script: Callable[..., Run]) -> None:
    run = start_script(
        """
env = start()
if env.rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print("deaf")
    time.sleep(100)
while not os.path.exists("go"):
    time.sleep(0.01)
raise PeerError("worker 0 no longer answers.")
"""
    )
    run.wait_for("deaf")
    started = time.monotonic()
    (run.temporary.parent / "go").touch()
    assert run.end() == 3, run.text()
    assert 4 < time.monotonic() - started < 25
    assert "worker 1 failed with exit status 3" in run.err[-1]
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_stop_every_worker(
    start_script: Callable[..., Run], number: signal.Signals, status: int
) -> None:
    # What a handler cannot interrupt is for SIGTERM and SIGHUP to end: those kill by default.
    wait = "time.sleep(100)" if number == signal.SIGINT else "block() if env.rank else 0"
    run = start_script(
        "env = start()\n"
        + BLOCKED
        + f"""
print("ready")
{wait}
time.sleep(100)
"""
    )
    run.wait_for("ready", times=2)
    sockets = run.sockets()
    assert sockets
    assert all(address.startswith("0100007F:") for address in sockets), sockets
    started = time.monotonic()
    # As a terminal does: to the whole group, which is the launcher alone.
    os.killpg(run.process.pid, number)
    assert run.end() == status, run.text()
    assert time.monotonic() - started < SOON
    assert f"parallax: stopped by {number.name}; no worker is left" in run.err[-1]
    assert not any("Traceback" in line for line in run.err)
    run.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_launcher_imports_torch(
    start_script: Callable[..., Run], number: signal.Signals
) -> None:
    # An exception from the handler was swallowed somewhere in torch and the run went on.
    run = start_script("start()\ntime.sleep(100)\n")
    run.wait_for("starting 2 workers")
    os.killpg(run.process.pid, number)
    assert run.end(10) == 128 + number, run.text()
    assert not any("Traceback" in line for line in run.err)
    run.assert_nothing_left()


def test_a_second_interrupt_ends_at_once(start_script: Callable[..., Run]) -> None:
    run = start_script(
        'start()\nsignal.signal(signal.SIGINT, lambda *_: print("busy"))\nprint("ready")\n'
        "while True:\n    time.sleep(0.1)\n"
    )
    run.wait_for("ready", times=2)
    started = time.monotonic()
    os.killpg(run.process.pid, signal.SIGINT)
    run.wait_for("busy", times=2)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == 130, run.text()
    assert time.monotonic() - started < SOON
    run.assert_nothing_left()


def test_no_worker_outlives_a_killed_launcher(start_script: Callable[..., Run]) -> None:
    run = start_script("env = start()\n" + BLOCKED + "block() if env.rank else time.sleep(100)\n")
    run.wait_for("blocked")
    assert len(run.processes()) == 3
    run.process.kill()
    run.end()
    run.assert_nothing_left()


def test_an_ignored_hangup_stays_ignored(start_script: Callable[..., Run]) -> None:
    run = start_script(
        'start()\nprint("ready")\ntime.sleep(100)\n',
        before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None,
    )
    run.wait_for("ready", times=2)
    os.killpg(run.process.pid, signal.SIGHUP)
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.end() == 143, run.text()
    run.assert_nothing_left()


def test_a_normal_end_does_not_wait_for_a_lost_collective(
    start_script: Callable[..., Run],
) -> None:
    run = start_script(
        "env = start()\n"
        + BLOCKED
        + """
import atexit
if env.rank == 0:
    atexit.register(print, "exit function")
    work = dist.all_reduce(torch.ones(3), async_op=True)
    open("pid.part", "w").write(str(os.getpid()))
    os.rename("pid.part", "pid")
    sys.exit(0)
while not os.path.exists("pid"):
    time.sleep(0.01)
pid = int(open("pid").read())
deadline = time.monotonic() + 30
while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
    time.sleep(0.01)
print("gone", not os.path.exists(f"/proc/{pid}"))
"""
    )
    assert run.end() == 0, run.text()
    assert "[worker 0] exit function" in run.out
    assert "[worker 1] gone True" in run.out
    run.assert_nothing_left()
