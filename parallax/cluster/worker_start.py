"""What a launched worker prepares: how it dies with its launcher, and how it leaves on an error.

A worker must leave at once when it fails. Python's own way out destroys process groups, and a
gloo group with a collective that never finishes (its peer failed) blocks there for the collective's
timeout, 30 minutes by default; so the worker prints what happened and leaves by ``os._exit``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from parallax.cluster.addresses import interface_between_hosts
from parallax.cluster.environment import LAUNCHED_VARIABLE, WorkerEnvironment
from parallax.cluster.worker_exec import die_with_parent
from parallax.errors import LaunchError, ParallaxError, PeerError
from parallax.logs import LOG_LEVEL_VARIABLE

__all__ = ["exit_status", "keep_undestroyed", "prepare_worker_process"]

_INTERRUPTED = 130
_LINGER_SECONDS = 2.0
_GLOO_LOST_PEER = re.compile(
    r"gloo/transport/.*(Connection closed by peer|Connection reset by peer)", re.DOTALL
)
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def prepare_worker_process(env: WorkerEnvironment) -> None:
    """Makes this process a worker that ends with its launcher and leaves at once when it fails.

    To be called once, as soon as the process knows that it is a worker. A process that no launcher
    started is left as it is.

    Args:
        env: which worker this is.

    Raises:
        LaunchError: the environment is a worker's, but this process is not the one that the
            launcher started: the worker started it and handed its environment down.
    """
    if not env.launched:
        return
    launcher = _launcher()
    spawned = multiprocessing.parent_process() is not None and _rank_was_inherited()
    if spawned or (launcher is not None and launcher != os.getppid()):
        raise LaunchError(
            f"This process has the environment of worker {env.rank} but was started by it.",
            hint='put the training under `if __name__ == "__main__":` if a data loader or'
            " multiprocessing started it; give other programs an environment without RANK,"
            f" WORLD_SIZE and {LAUNCHED_VARIABLE}.",
        )
    if (launcher is not None or _under_torchrun()) and not die_with_parent(launcher):
        _watch_parent()
    _export(env)
    # An abort in native code says where in the user's program it happened.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.enable()
    sys.excepthook = _leave_on_error(sys.excepthook)
    if env.rank == 0:
        for warning in _environment_warnings(os.environ):
            logging.getLogger("parallax").warning(warning)


def _export(env: WorkerEnvironment) -> None:
    """Says in torch's own variables what a scheduler said in others, and which network to use."""
    known = {
        "RANK": env.rank,
        "WORLD_SIZE": env.world_size,
        "LOCAL_RANK": env.local_rank,
        "LOCAL_WORLD_SIZE": env.local_world_size,
        "MASTER_ADDR": env.master_addr,
        "MASTER_PORT": env.master_port,
    }
    for name, value in known.items():
        if value is not None:
            os.environ.setdefault(name, str(value))
    hosts = env.local_world_size < env.world_size and env.master_addr is not None
    if hosts and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_between_hosts(str(env.master_addr))
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface


def _rank_was_inherited() -> bool:
    """Whether RANK came with this process, as against being set by its own program.

    A program may well start workers with multiprocessing and give each its environment.
    """
    try:
        variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return any(variable.startswith(b"RANK=") for variable in variables)


def exit_status(error: BaseException) -> int:
    """The exit status of a worker that failed with ``error``.

    Gloo's plain error for a lost peer, from a collective of the user's own, gives the status of
    PeerError: the peer's sockets close before the system tells that it ended, so this worker may
    well end first, and the launcher must know which of the two is the bystander.

    Args:
        error: what nobody caught.
    """
    if isinstance(error, ParallaxError):
        return error.exit_code
    if isinstance(error, RuntimeError) and _GLOO_LOST_PEER.search(str(error)):
        return PeerError.exit_code
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def keep_undestroyed(value: object) -> None:
    """Keeps an object until the process has ended; its destructor never runs.

    For process groups: a worker whose script ends normally then does not wait in the destructor
    of a group whose last collective never finishes.

    Args:
        value: the object.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _launcher() -> int | None:
    """The process id of our launcher, if it started this worker on this machine."""
    text = os.environ.get(LAUNCHED_VARIABLE, "")
    # A container's first process needs no watch: all others end with it.
    return int(text) if text.isdecimal() and int(text) > 1 else None


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _watch_parent() -> None:
    """Where the kernel gives no notice of the parent's death: asks every second."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _leave_on_error(shown_by: _Hook) -> _Hook:
    console = sys.stderr

    def leave(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        try:
            # init_process_group wraps the hook that it finds: it collects the text in a string
            # and prints it after the hook returns, which this one does not.
            with contextlib.redirect_stderr(console):
                _show(shown_by, kind, error, traceback)
            _end_children()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            if exit_status(error) == PeerError.exit_code:
                # Sockets close before their process has ended: who left them comes first.
                time.sleep(_LINGER_SECONDS)
        finally:
            os._exit(exit_status(error))

    return leave


def _show(
    shown_by: _Hook,
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    debug = os.environ.get(LOG_LEVEL_VARIABLE, "").strip().upper() == "DEBUG"
    if debug or not isinstance(error, ParallaxError | KeyboardInterrupt):
        shown_by(kind, error, traceback)
    if isinstance(error, ParallaxError):
        print(f"error: {kind.__name__}: {error}", file=sys.stderr)


def _end_children() -> None:
    # Data loaders' processes: nobody else stops them when the worker leaves this way.
    for child in multiprocessing.active_children():
        child.kill()


def _environment_warnings(variables: Mapping[str, str]) -> list[str]:
    warnings = []
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        warnings.append(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL is set: every collective takes about twice as long."
        )
    if variables.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "").lower() in ("1", "y", "yes", "true"):
        warnings.append(
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set: torch.load runs code from the files it reads."
        )
    return warnings
