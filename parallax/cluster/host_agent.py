"""The agent of one host: starts torchrun's agent there, and ends with its launcher.

It runs on every host of a run, also on the launcher's own. Its standard input is its life-line: at
the end of it, or when nothing has been heard for the lease, it ends all that it started and leaves.
It imports no torch, so that nothing a worker does can delay its signs of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from parallax import __version__
from parallax.cluster import wire
from parallax.cluster.addresses import interface_towards
from parallax.cluster.agent_environment import worker_variables
from parallax.cluster.host_output import OutputPipes
from parallax.cluster.host_report import make_report

__all__ = ["main"]

_AGENT = str(Path(__file__).resolve().parent / "agent_start.py")
_PR_SET_CHILD_SUBREAPER = 36
_STORE_SECONDS = 10.0
# torchrun's agent kills its workers 5 s after it was told to stop; so much longer it gets itself.
_STOP_SECONDS = 8.0


def main(data: bytes) -> None:
    """Runs the agent of a host to its end; does not return.

    Args:
        data: the launcher's order as JSON.
    """
    # What anything here prints must not get between the frames.
    channel = os.dup(1)
    os.dup2(2, 1)
    try:
        order = msgspec.json.decode(data, type=wire.Order)
    except msgspec.DecodeError as error:
        problem = f"its parallax {__version__} does not understand the launcher's: {error}"
        hint = "install the same version of parallax on every host."
        os.write(channel, wire.MAGIC + wire.frame(wire.Trouble(problem, hint)))
        os._exit(3)
    # Whoever a worker leaves behind becomes this process's child, and is found at the end.
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        # A terminal's signals are for the launcher, which says what is to be done. Not ignored:
        # that would be inherited by torchrun's agent, which is to heed what it is sent.
        signal.signal(number, lambda *_: None)
    status = 1
    agent = HostAgent(order, channel)
    try:
        status = asyncio.run(agent.run())
    finally:
        agent.kill_all()
        os._exit(status)


class HostAgent:
    """One host's side of a run.

    Args:
        order: what to run.
        channel: descriptor to the launcher.
    """

    def __init__(self, order: wire.Order, channel: int) -> None:
        self._order = order
        self._channel = channel
        self._heard = time.monotonic()
        self._listener: socket.socket | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._directory: Path | None = None
        self._workers = 0
        self._left = asyncio.Event()
        self._finished = asyncio.Event()
        self._ended = asyncio.Event()
        self._stopping = False
        self._hang_up = False
        self._tasks: list[asyncio.Task[None]] = []
        self._writer: asyncio.StreamWriter

    async def run(self) -> int:
        """Serves the launcher until it lets go; the exit status."""
        loop = asyncio.get_running_loop()
        # Frames go through a pipe transport: the channel may be slow, and beats must not wait for
        # a thread.
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(self._channel, "wb", buffering=0)
        )
        self._writer = asyncio.StreamWriter(transport, protocol, None, loop)
        reader = asyncio.StreamReader(limit=1 << 20)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb", buffering=0)
        )
        self._writer.write(wire.MAGIC)
        loop.add_signal_handler(signal.SIGTERM, self._left.set)
        self._begin(self._listen(reader))
        self._begin(self._report())
        await self._left.wait()
        await self._stop_child()
        for task in self._tasks:
            task.cancel()
        # What is still on its way may say why.
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)
        # The report may still wait for a program that it started.
        self.kill_all()
        return 0

    def kill_all(self) -> None:
        """Kills every process that this host's run has left, and removes its files."""
        deadline = time.monotonic() + 5.0
        while (children := _children()) and time.monotonic() < deadline:
            for pid in children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            # Grandchildren arrive here when their parents die.
            for pid in children:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._hang_up:
            _end_connection()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._after)
        self._tasks.append(task)

    def _after(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._trouble(f"its agent failed: {error!r}", "this is a mistake in parallax.")
            self._left.set()

    def _send(self, message: wire.FromAgent) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._writer.write(wire.frame(message))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while (data := await wire.read_frame(reader)) is not None:
                self._heard = time.monotonic()
                await self._obey(wire.decode_from_launcher(data))
        except wire.WireError:
            pass
        finally:
            self._left.set()

    async def _report(self) -> None:
        report = await asyncio.to_thread(make_report, self._order)
        self._workers = report.workers
        self._send(report)
        self._begin(self._beat())

    async def _beat(self) -> None:
        while True:
            self._send(wire.Beat())
            await asyncio.sleep(self._order.beat)
            self._reap()
            if time.monotonic() - self._heard > self._order.lease:
                print(
                    f"parallax: nothing was heard from the launcher for {self._order.lease:.0f} s;"
                    " ending this host's workers",
                    file=sys.stderr,
                    flush=True,
                )
                self._hang_up = True
                self._left.set()

    def _reap(self) -> None:
        """Buries what workers left behind and has ended; this process has become its parent."""
        child = 0 if self._child is None else self._child.pid
        with contextlib.suppress(ChildProcessError):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while (found := os.waitid(os.P_ALL, 0, options)) and found.si_pid != child:
                os.waitpid(found.si_pid, 0)

    async def _obey(self, message: wire.FromLauncher) -> None:
        if isinstance(message, wire.Open):
            self._open(message.address)
        elif isinstance(message, wire.Start):
            self._begin(self._start(message))
        elif isinstance(message, wire.Stop):
            self._signal_child(message.signal)
        elif isinstance(message, wire.Finish):
            self._finished.set()

    def _open(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        except OSError as error:
            self._trouble(
                f"cannot open a port on {address}: {error.strerror}",
                "see that the address by which the resource file names the chief is its own.",
            )
            return
        self._send(wire.Opened(self._listener.getsockname()[1]))

    def _trouble(self, problem: str, hint: str) -> None:
        self._send(wire.Trouble(problem, hint))

    async def _start(self, start: wire.Start) -> None:
        try:
            if start.node > 0:
                await self._try_store(start)
            await self._run_workers(start)
        except OSError as error:
            self._trouble(f"cannot start its workers: {error}", "see the reason given.")

    async def _try_store(self, start: wire.Start) -> None:
        """Sees that the chief can be reached: torch would wait minutes, and name no address."""
        try:
            connecting = asyncio.open_connection(start.address, start.port)
            _, writer = await asyncio.wait_for(connecting, _STORE_SECONDS)
        except (OSError, asyncio.TimeoutError) as error:
            reason = getattr(error, "strerror", None) or "no answer"
            raise OSError(
                f"the chief cannot be reached at {start.address} port {start.port} ({reason}); "
                "workers connect to each other on ports that the system chooses, so no firewall "
                "may be between hosts"
            ) from error
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _run_workers(self, start: wire.Start) -> None:
        place = self._order.environment.get("TMPDIR") or None
        self._directory = Path(tempfile.mkdtemp(prefix="parallax-", dir=place))
        pipes = OutputPipes(self._directory, start.first_rank, self._workers, self._send_output)
        descriptors = [] if self._listener is None else [self._listener.fileno()]
        member = {
            "node": start.node,
            "nodes": start.nodes,
            "first_rank": start.first_rank,
            "address": start.address,
            "port": start.port,
            "run": self._order.run_id,
            "output": str(self._directory),
            "listener": descriptors[0] if descriptors else None,
        }
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            _AGENT,
            *("--parent", str(os.getpid()), "--workers", str(self._workers)),
            *("--seed", str(start.seed), "--member", json.dumps(member), "--"),
            *(sys.executable, *self._order.command),
            cwd=self._order.directory,
            env=worker_variables(self._order, interface_towards(start.address)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=descriptors,
            start_new_session=True,
        )
        if self._listener is not None:
            self._listener.close()
        pipes.start()
        assert self._child.stderr is not None
        said = asyncio.create_task(self._forward(self._child.stderr))
        ended = await self._result(self._child)
        self._ended.set()
        await pipes.finish()
        self._send(ended)
        # Its store serves the other hosts until all have ended.
        await self._finished.wait()
        assert self._child.stdin is not None
        self._child.stdin.close()
        await self._child.wait()
        await said
        self._left.set()

    async def _result(self, child: asyncio.subprocess.Process) -> wire.Ended:
        """What torchrun's agent says at the end of the workers, or how it ended itself."""
        assert child.stdout is not None
        line = await child.stdout.readline()
        try:
            return msgspec.json.decode(line, type=wire.Ended)
        except msgspec.DecodeError:
            status = await child.wait()
            how = f"exit status {status}" if status >= 0 else f"signal {-status}"
            shell = status if status >= 0 else 128 - status
            return wire.Ended(shell, [], 0, f"torchrun's agent ended with {how}")

    async def _forward(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 16):
            await self._send_output(-1, True, data)

    async def _send_output(self, rank: int, error: bool, data: bytes) -> None:
        self._send(wire.Output(rank, error, data))
        with contextlib.suppress(ConnectionError):
            # A slow link slows the workers' printing, not the beats.
            await self._writer.drain()

    def _signal_child(self, number: int) -> None:
        if self._child is None or self._child.returncode is not None:
            self._left.set()
            return
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(number)
        if not self._stopping:
            self._stopping = True
            self._begin(self._kill_late_child(self._child))

    async def _kill_late_child(self, child: asyncio.subprocess.Process) -> None:
        """While it waits for other hosts, torchrun's agent hears no signal."""
        try:
            await asyncio.wait_for(self._ended.wait(), _STOP_SECONDS)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()

    async def _stop_child(self) -> None:
        if self._child is None or self._child.returncode is not None:
            return
        self._signal_child(signal.SIGTERM)
        assert self._child.stdin is not None
        self._child.stdin.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._child.wait(), _STOP_SECONDS)


def _end_connection() -> None:
    """Ends this session's sshd: behind a cut link it would wait for its client for hours."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{parent}/comm").read_text(encoding="utf-8")
        if "SSH_CONNECTION" in os.environ and name.startswith("sshd"):
            os.kill(parent, signal.SIGTERM)


def _children() -> list[int]:
    found = []
    me = str(os.getpid())
    for entry in Path("/proc").iterdir() if os.path.isdir("/proc") else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                if stat.rpartition(")")[2].split()[1] == me:
                    found.append(int(entry.name))
    return found
