"""The launcher's process: starts the workers of this machine through torchrun's machinery.

``python -m parallax.cluster.agent --workers N [--redirect DIR] [--seed S] -- COMMAND...`` runs the
command N times, each with its own RANK (``environment.py`` lists the variables). It ends with 0
when all workers did, with the status of the first worker that failed (128 + n if signal n killed
it), or with 128 + n when it received signal n itself; no worker outlives it. ``launch.py`` turns
the user's process into this one. With ``--member`` it is one host's of several (``member.py``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from parallax.cluster import worker_exec
from parallax.cluster.environment import LAUNCHED_VARIABLE, SEED_VARIABLE, launch_seed
from parallax.cluster.host_report import cores
from parallax.cluster.member import Member, MemberOutput, take_channels
from parallax.cluster.worker_output import WorkerOutput
from parallax.cluster.worker_watch import (
    PEER_STATUS,
    WorkerEnd,
    WorkerWatch,
    describe_status,
    first_failure,
)
from parallax.errors import LaunchError, ParallaxError
from parallax.logs import configure_logging

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

__all__ = ["main"]

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_USAGE = (
    "python -m parallax.cluster.agent --workers N [--redirect DIR] [--seed S] [--member JSON]"
    " -- COMMAND..."
)


@dataclass(frozen=True)
class _Order:
    workers: int
    command: list[str]
    redirect: Path | None = None
    seed: int | None = None
    member: Member | None = None


def main(arguments: Sequence[str]) -> int:
    """Runs the workers to their end.

    Args:
        arguments: the command line after the program's name.

    Returns:
        The exit status.
    """
    try:
        order = _read_order(arguments)
    except ParallaxError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    # A host's agent removes what a member leaves in its directory, should the member be killed.
    place = None if order.member is None else order.member.output
    directory = Path(tempfile.mkdtemp(prefix="parallax-", dir=place))
    stop_signals = _prepare_signals(directory)
    try:
        if order.member is not None:
            take_channels()
        _set_environment(order, configure_logging())
        return _run(order, directory, stop_signals)
    except ParallaxError as error:
        if order.member is not None:
            return order.member.tell(error.exit_code, [], None, error.problem)
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _prepare_signals(directory: Path) -> list[signal.Signals]:
    """Until there are workers, a signal simply ends this process, without a traceback.

    Returns the signals that stop the run: those that are not ignored, as SIGHUP under nohup.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        # An exception would be lost where torch, while imported, catches everything.
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(128 + number)

    heeded = [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, leave)
    return heeded


def _read_order(arguments: Sequence[str]) -> _Order:
    own, command = list(arguments), []
    if "--" in own:
        position = own.index("--")
        own, command = own[:position], own[position + 1 :]
    options = dict(zip(own[::2], own[1::2], strict=False))
    known = {"--workers", "--redirect", "--seed", "--member"}
    numbers = (options.get("--workers", ""), options.get("--seed", "0"))
    if len(own) % 2 or not command or not set(options) <= known:
        raise LaunchError(f"The launcher cannot read its arguments {own}.", hint=_USAGE)
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise LaunchError(f"--workers and --seed need numbers, found {own}.", hint=_USAGE)
    redirect = options.get("--redirect")
    return _Order(
        workers=int(options["--workers"]),
        command=command,
        redirect=Path(redirect) if redirect is not None else None,
        seed=int(options["--seed"]) if "--seed" in options else None,
        member=Member.of(options["--member"]) if "--member" in options else None,
    )


def _set_environment(order: _Order, logger: logging.Logger) -> None:
    """Sets what all workers share; they inherit it from this process."""
    seed = order.seed
    if seed is None:
        seed = launch_seed()
    if seed is None:
        seed = secrets.randbits(31)
    os.environ[SEED_VARIABLE] = str(seed)
    os.environ[LAUNCHED_VARIABLE] = str(os.getpid())
    # Their output goes to a pipe, which would otherwise show it in blocks of 8 KB.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    alone = order.member is None or order.member.nodes == 1
    if alone and "GLOO_SOCKET_IFNAME" not in os.environ and "lo" in _interfaces():
        # Workers of one machine need no network, and the host's name may resolve to none.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    note = ""
    if "OMP_NUM_THREADS" not in os.environ:
        available = cores()
        threads = max(1, available // max(1, order.workers))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        note = f", each with OMP_NUM_THREADS={threads} ({available} cores)"
    number = f"{order.workers} worker" + ("" if order.workers == 1 else "s")
    logger.info("starting %s on this machine%s", number, note)


def _interfaces() -> set[str]:
    try:
        return {name for _, name in socket.if_nameindex()}
    except OSError:
        return set()


def _run(order: _Order, directory: Path, stop_signals: Sequence[signal.Signals]) -> int:
    with _quiet_torchrun():
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher.api import elastic_launch
    output: WorkerOutput | MemberOutput
    try:
        if order.member is None:
            output = WorkerOutput(directory, order.workers, order.redirect)
        else:
            output = MemberOutput(order.member.output, order.workers)
        watch = WorkerWatch(directory, order.workers, lambda: _remove_names(order, directory))
    except OSError as error:
        raise LaunchError(f"The workers' output cannot be received: {error}.") from error
    config = _launch_config(order, output, stop_signals)
    command = [os.path.abspath(worker_exec.__file__), str(os.getpid()), watch.notices]
    output.start()
    watch.start()
    received: int | None = None
    failed: ChildFailedError | None = None
    try:
        # -I and -S: the first instructions need nothing but the standard library.
        arguments = ["-I", "-S", *command, *order.command]
        elastic_launch(config, sys.executable)(*(_unsubstituted(item) for item in arguments))
    except SignalException as stopped:
        received = stopped.sigval
    except ChildFailedError as error:
        failed = error
    except (OSError, RendezvousError, DistError) as error:
        if not watch.first_signal:
            raise LaunchError(f"The workers cannot be started: {error}.") from error
    finally:
        for number in stop_signals:
            signal.signal(number, signal.SIG_IGN)
        watch.finish()
        output.finish()
    # torchrun learns of a signal by an exception, which a destructor, say, can swallow.
    return _report(order, received or watch.first_signal, watch.ends(), failed)


def _remove_names(order: _Order, directory: Path) -> None:
    """Pipes need no names when all have opened them; then none is left, whatever happens."""
    shutil.rmtree(directory, ignore_errors=True)
    if order.member is not None:
        shutil.rmtree(order.member.output, ignore_errors=True)


@contextlib.contextmanager
def _quiet_torchrun() -> Iterator[None]:
    """Silences the loggers that torchrun makes inside: of a failure, they tell a longer story.

    Some take their level from LOGLEVEL when they are made, the others from their parent. A user
    who sets LOGLEVEL, or debugs, sees it all.
    """
    debug = logging.getLogger("parallax").isEnabledFor(logging.DEBUG)
    if debug or "LOGLEVEL" in os.environ:
        yield
        return
    os.environ["LOGLEVEL"] = "CRITICAL"
    try:
        yield
    finally:
        del os.environ["LOGLEVEL"]
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


def _launch_config(
    order: _Order, output: WorkerOutput | MemberOutput, stop_signals: Sequence[signal.Signals]
) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    from parallax.cluster import static_rendezvous
    from parallax.cluster.worker_logs import PipeLogs

    static_rendezvous.register()
    member = order.member or Member(run=f"parallax-{os.getpid()}")
    return LaunchConfig(
        min_nodes=member.nodes,
        max_nodes=member.nodes,
        nproc_per_node=order.workers,
        run_id=member.run,
        role="worker",
        rdzv_backend=static_rendezvous.BACKEND,
        rdzv_endpoint="127.0.0.1",
        rdzv_configs=member.rendezvous(),
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=PipeLogs(output.stdouts, output.stderrs),
        signals_to_handle=",".join(number.name for number in stop_signals),
    )


def _unsubstituted(argument: str) -> str:
    # torchrun reads each argument as a template: "$$" stands for "$", "${local_rank}" for a number.
    return argument.replace("$", "$$")


def _report(
    order: _Order,
    received: int | None,
    ends: Sequence[WorkerEnd],
    failed: ChildFailedError | None,
) -> int:
    """Says in one line how the run ended, unless well; returns the exit status."""
    # Without pidfds nothing was seen but what torchrun found, in the order in which it looked.
    seen = {end.rank for end in ends}
    failures = failed.failures if failed is not None else {}
    first_rank = 0 if order.member is None else order.member.first_rank
    unseen = [
        WorkerEnd(rank - first_rank, failure.exitcode, stopped=failure.exitcode == -signal.SIGTERM)
        for rank, failure in failures.items()
        if rank - first_rank not in seen
    ]
    if order.member is not None:
        return order.member.tell(0 if failed is None else 1, [*ends, *unseen], received)
    if received is not None:
        _say(f"stopped by {signal.Signals(received).name}; no worker is left")
        return 128 + received
    if failed is None:
        return 0
    first = first_failure([*ends, *unseen])
    assert first is not None
    how = describe_status(first.status)
    early = [end.rank for end in ends if end.status == 0]
    if first.status == PEER_STATUS and early:
        how += f", as worker {early[0]} ended while others went on"
    others = "; the other workers were stopped" if order.workers > 1 else ""
    where = ""
    if order.redirect is not None:
        where = f"; its output is in {order.redirect}/worker-{first.rank}.err"
    _say(f"worker {first.rank} {how}{others}{where}")
    return first.shell_status


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"parallax: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
