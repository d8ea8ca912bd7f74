"""The launcher's side of one host: its ssh, frames both ways, and when it was last heard of."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from parallax.cluster import wire
from parallax.cluster.spec import Host
from parallax.cluster.ssh import agent_command, explain_end, ssh_command

__all__ = ["HostLink", "Lost"]

CONNECT_SECONDS = 30.0
_SAID_BYTES = 64 * 1024
_NOISE_BYTES = 64 * 1024


class Lost:
    """The link to a host is gone.

    Args:
        problem: why, as a sentence without its full stop; names the host.
        hint: the way out.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        self.problem = problem
        self.hint = hint


Event = wire.FromAgent | Lost


class HostLink:
    """One host of a run.

    Args:
        host: which.
        local: whether it is this machine, which needs no ssh.
        order: what its agent is to do.
        python: the interpreter there.
        deliver: called with each message and with the end of the link.
    """

    def __init__(
        self,
        host: Host,
        local: bool,
        order: wire.Order,
        python: str,
        deliver: Callable[[HostLink, Event], None],
    ) -> None:
        self.host = host
        self.local = local
        self.order = order
        self.noise = b""
        self.heard = time.monotonic()
        self._python = python
        self._deliver = deliver
        self._process: asyncio.subprocess.Process | None = None
        self._said = b""
        self._spoke = False
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        """The host as the resource file names it."""
        return self.host.address

    async def open(self) -> None:
        """Starts the agent and sends it the order; what comes of it is delivered."""
        local = agent_command(self._python)
        command = local if self.local else ssh_command(self.host, self._python)
        try:
            # In a session of its own: a terminal's Ctrl-C is for the launcher alone.
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=1 << 20,
            )
        except OSError as error:
            hint = "install OpenSSH's client." if not self.local else "see `ssh: python`."
            self._end(Lost(f"{command[0]} cannot be run for {self.name}: {error.strerror}", hint))
            return
        self._write(wire.MAGIC + wire.frame(self.order))
        self._tasks = [
            asyncio.create_task(self._read_said(self._process)),
            asyncio.create_task(self._read(self._process)),
            asyncio.create_task(self._beat()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._after)

    def send(self, message: wire.FromLauncher) -> None:
        """Sends a message; of a link that is gone the reader tells."""
        self._write(wire.frame(message))

    def let_go(self) -> None:
        """Closes the agent's life-line: it ends what it started, and itself."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._process.stdin.close()

    async def close(self, seconds: float) -> None:
        """Lets go, waits so long for the end of ssh, then kills it."""
        self._over = True
        self.let_go()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), seconds)
            except asyncio.TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def said(self) -> str:
        """What ssh, or the agent, wrote to its standard error before the start."""
        return self._said.decode(errors="replace")

    def silence(self) -> float:
        """Seconds since the host was heard of."""
        return time.monotonic() - self.heard

    def _write(self, data: bytes) -> None:
        pipe = None if self._process is None else self._process.stdin
        if pipe is not None and not pipe.is_closing():
            with contextlib.suppress(ConnectionError, RuntimeError):
                pipe.write(data)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.order.beat)
            self.send(wire.Beat())

    async def _read_said(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(1 << 16):
            self._said = (self._said + data)[-_SAID_BYTES:]
            if self._spoke:
                self._deliver(self, wire.Output(-1, True, data))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            if await self._find_magic(process.stdout):
                while (data := await wire.read_frame(process.stdout)) is not None:
                    self.heard = time.monotonic()
                    self._deliver(self, wire.decode_from_agent(data))
        except wire.WireError as error:
            self._end(Lost(f"{self.name} does not speak parallax's language: {error}"))
            return
        await self._explain(process)

    async def _find_magic(self, reader: asyncio.StreamReader) -> bool:
        """Skips what a login shell prints; whether the agent has begun to speak."""
        try:
            before = await asyncio.wait_for(reader.readuntil(wire.MAGIC), CONNECT_SECONDS)
        except asyncio.IncompleteReadError as error:
            self.noise = error.partial[-_NOISE_BYTES:]
            return False
        except asyncio.LimitOverrunError:
            self._end(Lost(f"{self.name} prints without end when it is logged in to"))
            return False
        except asyncio.TimeoutError:
            self._end(
                Lost(
                    f"{self.name} did not answer in {CONNECT_SECONDS:.0f} s",
                    "its login shell may wait for something; see that"
                    f" `ssh {self.name} true` returns at once.",
                )
            )
            return False
        self.noise = before[: -len(wire.MAGIC)].strip()[-_NOISE_BYTES:]
        self._spoke = True
        self.heard = time.monotonic()
        return True

    async def _explain(self, process: asyncio.subprocess.Process) -> None:
        try:
            status = await asyncio.wait_for(process.wait(), 5.0)
            await asyncio.wait_for(asyncio.shield(self._tasks[0]), 5.0)
        except asyncio.TimeoutError:
            status = 255
        if not self._spoke:
            self._end(Lost(*explain_end(self.host, self._python, status, self.said())))
            return
        last = [line.strip() for line in self.said().splitlines() if line.strip()][-1:]
        because = f": {last[0]}" if last else ""
        what = "its agent" if self.local else "the connection, or its agent,"
        self._end(
            Lost(f"{self.name} was lost: {what} ended with status {status}{because}"),
        )

    def _after(self, task: asyncio.Task[None]) -> None:
        # Nobody awaits these tasks while the run goes on: a mistake in one must not be a hang.
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(Lost(f"the link to {self.name} failed in the launcher: {error!r}"))

    def _end(self, lost: Lost) -> None:
        if not self._over:
            self._over = True
            self._deliver(self, lost)
