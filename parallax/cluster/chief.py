"""The launcher of a run on several hosts.

It runs on the chief's host, in the place of the user's process (``cluster_launch.py``), and imports
no torch. It starts an agent on each host, its own included; compares what they report; has the
chief's agent open the store's port; starts the workers; shows their output; and ends all when one
fails, when a host falls silent, or when it gets a signal. If it is itself killed, the agents see
the end of their life-lines, or miss its signs of life, and end what they started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from parallax.cluster import wire
from parallax.cluster.agent_environment import travelling
from parallax.cluster.checks import (
    HostProblem,
    find_problems,
    own_versions,
    summary,
    version_table,
    versions_of,
)
from parallax.cluster.cluster_output import ClusterOutput
from parallax.cluster.environment import LAUNCHER_VARIABLES, launch_seed
from parallax.cluster.host_link import Event, HostLink, Lost
from parallax.cluster.spec import ClusterSpec, Host
from parallax.cluster.ssh import default_python, package_parent
from parallax.cluster.store_address import store_address
from parallax.cluster.verdict import Failure, Verdict
from parallax.errors import LaunchError, ParallaxError
from parallax.logs import configure_logging

__all__ = ["Launch", "Launcher", "main", "run_launch"]

CHECK_SECONDS = 90.0
OPEN_SECONDS = 20.0
STOP_SECONDS = 15.0
SETTLE_SECONDS = 2.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Launch(msgspec.Struct, frozen=True):
    """What the user's process hands to the launcher.

    Args:
        spec: the hosts.
        here: number of this machine among them; None if it is none of them, for a check.
        command: what follows the interpreter on the workers' command line.
        directory: where the user started the script.
        code: SHA-256 of the user's files by path.
        redirect: directory for the workers' output.
        seed: base of random numbers.
        default_workers: workers of a host without devices that the file says nothing of.
        check_only: whether to stop after the checks.
    """

    spec: ClusterSpec
    here: int | None
    command: list[str]
    directory: str
    code: dict[str, str]
    redirect: str | None = None
    seed: int | None = None
    default_workers: int = 2
    check_only: bool = False


def main(arguments: Sequence[str]) -> int:
    """Runs a launch that is read from a descriptor.

    Args:
        arguments: ``--cluster`` and the descriptor's number.

    Returns:
        The exit status.
    """
    with os.fdopen(int(arguments[1]), "rb") as file:
        launch = msgspec.json.decode(file.read(), type=Launch)
    try:
        return run_launch(launch)
    except ParallaxError as error:
        _print(f"error: {type(error).__name__}: {error}")
        return error.exit_code


def run_launch(launch: Launch) -> int:
    """Checks the hosts of a launch and runs it to its end; the exit status.

    Raises:
        LaunchError: a host cannot take part; all are named.
    """
    # It warns of every write to a host that is gone; that is told here in other words.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    try:
        redirect = Path(launch.redirect) if launch.redirect is not None else None
        output = ClusterOutput(redirect, not configure_logging().isEnabledFor(logging.INFO))
    except OSError as error:
        raise LaunchError(f"redirect_path cannot be made: {error}.") from error
    try:
        return asyncio.run(Launcher(launch, output).run())
    finally:
        output.finish()


class _Signalled(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Launcher:
    """One launch.

    Args:
        launch: what to run.
        output: where workers' output goes.
    """

    def __init__(self, launch: Launch, output: ClusterOutput) -> None:
        self._launch = launch
        self._output = output
        self._verdict = Verdict()
        self._signal: int | None = None
        self._events: asyncio.Queue[tuple[HostLink, Event] | int] = asyncio.Queue()
        self._unconfirmed: list[str] = []
        self._ranks: dict[HostLink, range] = {}
        hosts = list(launch.spec.hosts)
        if launch.here is not None:
            # Worker 0 and the store are here, so ranks begin here.
            hosts.insert(0, hosts.pop(launch.here))
        run_id = secrets.token_hex(8)
        environment = travelling(os.environ, launch.directory)
        self._links = [
            HostLink(
                host,
                launch.here is not None and at == 0,
                self._order(host, run_id, environment),
                host.ssh.python or default_python(),
                lambda link, event: self._events.put_nowait((link, event)),
            )
            for at, host in enumerate(hosts)
        ]

    async def run(self) -> int:
        """Runs it; the exit status.

        Raises:
            LaunchError: a host cannot take part.
        """
        self._heed_signals()
        closing = 1.0
        try:
            reports = await self._check()
            if self._launch.check_only:
                one = len(reports) == 1
                self._output.say(
                    "the host is ready" if one else f"all {len(reports)} hosts are ready"
                )
                return 0
            await self._start(reports)
            await self._watch(set(self._links))
            closing = 10.0
            return self._conclude()
        except _Signalled as stopped:
            self._output.finish()
            _print(
                f"parallax: stopped by {signal.Signals(stopped.number).name}; nothing was started"
            )
            return 128 + stopped.number
        finally:
            silent = set(self._unconfirmed)
            await asyncio.gather(
                *(
                    link.close(0.0 if link.name in silent and not link.local else closing)
                    for link in self._links
                )
            )

    def _order(self, host: Host, run_id: str, environment: dict[str, str]) -> wire.Order:
        launch = self._launch
        paths = environment.get("PYTHONPATH", "")
        own = {k: v for k, v in environment.items() if k not in LAUNCHER_VARIABLES}

        def there(path: str) -> str:
            """Where a path below the working directory is on that host."""
            below = path.startswith(launch.directory.rstrip(os.sep) + os.sep)
            if host.ssh.directory is None or not below:
                return path
            return os.path.join(host.ssh.directory, os.path.relpath(path, launch.directory))

        if "PYTHONPATH" in own:
            own["PYTHONPATH"] = os.pathsep.join(map(there, own["PYTHONPATH"].split(os.pathsep)))
        return wire.Order(
            host=host.address,
            run_id=run_id,
            paths=[*(there(path) for path in paths.split(os.pathsep) if path), package_parent()],
            directory=host.ssh.directory or launch.directory,
            command=[there(word) if word in launch.code else word for word in launch.command],
            environment={**own, **dict(host.ssh.environment)},
            devices=None if host.devices is None else list(host.devices),
            cpus=host.cpus,
            default_workers=launch.default_workers,
            code={there(path): digest for path, digest in launch.code.items()},
        )

    def _heed_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._events.put_nowait, int(number))
        # Stopped by Ctrl-Z it could give no sign of life, and the run would end.
        signal.signal(signal.SIGTSTP, lambda *_: None)
        for number in (signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)

    async def _event(self, deadline: float) -> tuple[HostLink, Event] | int | None:
        """The next event; None at the deadline."""
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._events.get(), max(0.0, deadline - time.monotonic()))
        return None

    # -- Before the start ---------------------------------------------------------------------

    async def _check(self) -> dict[HostLink, wire.Report]:
        several = f"checking {len(self._links)} hosts"
        self._output.say("checking one host" if len(self._links) == 1 else several)
        begun = time.monotonic()
        await asyncio.gather(*(link.open() for link in self._links))
        reports: dict[HostLink, wire.Report] = {}
        problems: list[HostProblem] = []
        waiting = set(self._links)
        while waiting:
            event = await self._event(begun + CHECK_SECONDS)
            if isinstance(event, int):
                raise _Signalled(event)
            if event is None:
                for link in waiting:
                    text = f"{link.name} did not report in {CHECK_SECONDS:.0f} s"
                    problems.append(HostProblem(link.name, text, "see what keeps it busy."))
                break
            link, message = event
            if isinstance(message, wire.Report):
                reports[link] = message
                waiting.discard(link)
                seconds = time.monotonic() - begun
                self._output.say(f"{link.name}: {summary(message)} ({seconds:.1f} s){_noise(link)}")
            elif isinstance(message, Lost | wire.Trouble):
                waiting.discard(link)
                reports.pop(link, None)
                problem = self._name(link, message)
                problems.append(HostProblem(link.name, problem + _noise(link), message.hint))
                self._output.say(f"{link.name}: FAILED: {problem}")
        self._refuse(reports, problems)
        return reports

    def _name(self, link: HostLink, message: Lost | wire.Trouble) -> str:
        if isinstance(message, Lost):
            return message.problem
        return f"{link.name}: {message.problem}"

    def _refuse(self, reports: dict[HostLink, wire.Report], problems: list[HostProblem]) -> None:
        own = own_versions()
        by_name = {link.name: reports[link] for link in self._links if link in reports}
        code = {link.name: link.order.code for link in self._links}
        problems = problems + find_problems(by_name, own, code)
        if any(versions_of(report).differences(own) for report in by_name.values()):
            self._output.write(version_table(by_name, own))
        if not problems:
            return
        self._output.finish()
        source = self._launch.spec.source
        if len(problems) == 1:
            raise LaunchError(
                f"The hosts of {source} cannot run this: {problems[0].problem}.",
                hint=problems[0].hint,
            )
        lines = "".join(f"\n  - {found.problem}." for found in problems)
        hints = dict.fromkeys(found.hint for found in problems if found.hint)
        raise LaunchError(
            f"The hosts of {source} cannot run this, for {len(problems)} reasons:{lines}",
            hint="".join(f"\n  - {hint}" for hint in hints),
        )

    async def _start(self, reports: dict[HostLink, wire.Report]) -> None:
        counts = [reports[link].workers for link in self._links]
        total = sum(counts)
        names = ", ".join(f"{link.name} {n}" for link, n in zip(self._links, counts, strict=True))
        uneven = "" if len(set(counts)) == 1 else "; hosts run different numbers of workers"
        self._output.say(f"starting {total} workers on {len(counts)} hosts ({names}){uneven}")
        peers = [reports[link].peer for link in self._links[1:]]
        address = await asyncio.to_thread(
            store_address, self._links[0].host, [link.host for link in self._links[1:]], peers
        )
        port = await self._open_store(address)
        seed = self._launch.seed
        if seed is None:
            seed = launch_seed()
        if seed is None:
            seed = secrets.randbits(31)
        self._output.save(total)
        first = 0
        for node, link in enumerate(self._links):
            link.send(wire.Start(node, len(self._links), first, address, port, seed))
            self._ranks[link] = range(first, first + counts[node])
            first += counts[node]

    async def _open_store(self, address: str) -> int:
        self._links[0].send(wire.Open(address))
        deadline = time.monotonic() + OPEN_SECONDS
        while (event := await self._event(deadline)) is not None:
            if isinstance(event, int):
                raise _Signalled(event)
            link, message = event
            if isinstance(message, wire.Opened):
                return message.port
            if isinstance(message, Lost | wire.Trouble):
                problem = f"{self._name(link, message)}."
                raise LaunchError(f"The run cannot start: {problem}", hint=message.hint)
        raise LaunchError(f"The run cannot start: {self._links[0].name} opened no port in time.")

    # -- While it runs ------------------------------------------------------------------------

    async def _watch(self, running: set[HostLink]) -> None:
        """Until every host has ended, or has been given up."""
        stop_at: float | None = None  # when to tell the others, after a failure
        give_up_at: float | None = None
        while running:
            event = await self._event(time.monotonic() + 0.5)
            if isinstance(event, int):
                self._signal = self._signal or event
                self._verdict.stopping = True
                give_up_at = give_up_at or time.monotonic() + STOP_SECONDS
                self._tell(running, event)
            elif event is not None:
                self._take(running, *event)
            self._find_silent(running)
            now = time.monotonic()
            if self._verdict.failures and not self._verdict.stopping:
                # Who only lost its peer often comes first: the cause is not long in coming.
                settle = 0.0 if self._verdict.known else SETTLE_SECONDS
                stop_at = min(stop_at or now + settle, now + settle)
                if now >= stop_at:
                    self._verdict.stopping = True
                    give_up_at = now + STOP_SECONDS
                    self._tell(running, signal.SIGTERM)
            if give_up_at is not None and now >= give_up_at:
                self._unconfirmed += [link.name for link in self._links if link in running]
                return
        for link in self._links:
            link.send(wire.Finish())

    def _take(self, running: set[HostLink], link: HostLink, message: Event) -> None:
        if isinstance(message, wire.Output):
            self._output.show(link.name, message.rank, message.error, message.data)
        elif link not in running:
            return
        elif isinstance(message, wire.Ended):
            running.discard(link)
            self._verdict.host_ended(link.name, message)
        elif isinstance(message, Lost):
            running.discard(link)
            self._verdict.host_lost(
                link.name, message.problem + self._workers_of(link), message.hint
            )
        elif isinstance(message, wire.Trouble):
            running.discard(link)
            problem = self._name(link, message) + self._workers_of(link)
            self._verdict.host_lost(link.name, problem, message.hint)

    def _find_silent(self, running: set[HostLink]) -> None:
        for link in [link for link in running if link.silence() > link.order.lease]:
            running.discard(link)
            self._unconfirmed.append(link.name)
            self._verdict.host_lost(
                link.name,
                f"{link.name} has not been heard of for {link.silence():.0f} s: the host or the "
                f"way to it is down{self._workers_of(link)}",
                "its agent ends the workers there by itself.",
            )

    def _workers_of(self, link: HostLink) -> str:
        """Which workers ran on a host, as the end of a sentence about it."""
        ranks = self._ranks.get(link)
        if not ranks:
            return ""
        if len(ranks) == 1:
            return f"; worker {ranks[0]} ran there"
        return f"; workers {ranks[0]} to {ranks[-1]} ran there"

    def _tell(self, running: set[HostLink], number: int) -> None:
        for link in running:
            link.send(wire.Stop(number))

    # -- At the end ---------------------------------------------------------------------------

    def _conclude(self) -> int:
        """Says how the run ended, unless well; the exit status."""
        self._output.finish()
        left = "no worker is left"
        if self._unconfirmed:
            names = ", ".join(dict.fromkeys(self._unconfirmed))
            left = f"{names} did not confirm it: an agent that misses its launcher ends its workers"
        first = self._verdict.first
        if self._signal is not None:
            _print(f"parallax: stopped by {signal.Signals(self._signal).name}; {left}")
            return 128 + self._signal
        if first is None:
            return 0
        others = "; all workers were stopped" if not self._unconfirmed else f"; {left}"
        _print(self._last_words(first) + f"parallax: {first.text}{self._cause(first)}{others}")
        if first.hint:
            _print(f"  What to do: {first.hint}")
        return first.status

    def _last_words(self, first: Failure) -> str:
        """What the worker said of it, again: other workers' lines have come after."""
        if first.rank is None:
            return ""
        mark = f"[{first.host} worker {first.rank}] "
        words = self._output.last_words(first.host, first.rank)
        return "".join(f"{mark}{line}\n" for line in words)

    def _cause(self, first: Failure) -> str:
        if first.rank is None:
            return ""
        cause = self._output.cause(first.host, first.rank)
        where = ""
        if self._launch.redirect is not None:
            where = f"; its output is in {self._launch.redirect}/worker-{first.rank}.err"
        return (f": {cause}" if cause else "") + where


def _noise(link: HostLink) -> str:
    if not link.noise:
        return ""
    text = link.noise.decode(errors="replace").strip().splitlines()
    return f" (it printed {text[-1]!r} on login)" if text else ""


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
