"""Several hosts in one machine, with links of a given rate: for tests and benchmarks of clusters.

    python -m benchmarks.virtual_cluster run --hosts 4 --rate 100mbit -- ip -br address
    python -m benchmarks.virtual_cluster up --hosts 2
    python -m benchmarks.virtual_cluster down

Each host is a network namespace with its own address, host name, ``/dev/shm``, ``/run`` and sshd,
joined by a veth pair to a bridge in a namespace of its own. ``tc tbf`` shapes each link in both
directions. Files, users and process numbers are the machine's: hosts see the same disk.

It needs root, and of Debian the packages iproute2, openssh-server and util-linux;
``missing_requirement`` says what is not there.

Namespaces, links and the directory with the keys carry the number of the process that made them.
When that process ends, however it ends, a sweeper takes its cluster down, and so does the next
``up``, ``run`` or ``down``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from benchmarks import namespaces
from benchmarks.namespaces import (
    VirtualClusterError,
    VirtualHost,
    missing_requirement,
    rate_bits,
)
from benchmarks.ssh_files import write_names, write_ssh_files

__all__ = ["VirtualCluster", "VirtualClusterError", "VirtualHost", "missing_requirement"]

ROOT = Path(__file__).parents[1]
SECONDS = 20.0  # for sshd to listen, and for processes to end
MAX_HOSTS = 200
_serial = itertools.count()


class VirtualCluster:
    """Hosts ``vhost1`` to ``vhostN``; a context manager that leaves nothing behind.

    Args:
        hosts: how many.
        rate: of each host's link, for each direction, in ``tc``'s words: ``"1gbit"``,
            ``"100mbit"``; None does not shape.
        sshd: each host runs one; without, only :meth:`popen` starts anything there.

    Raises:
        VirtualClusterError: what it needs is missing, or ``hosts`` or ``rate`` make no sense.
    """

    def __init__(self, hosts: int, rate: str | None = None, *, sshd: bool = True) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise VirtualClusterError(
                f"hosts is {hosts}", f"ask for 1 to {MAX_HOSTS} hosts: they share one /24"
            )
        self.rate = rate
        self._rate_bits = None if rate is None else rate_bits(rate)
        missing = missing_requirement(sshd)
        if missing is not None:
            raise VirtualClusterError(*missing)
        self.name = f"plx{os.getpid()}x{next(_serial)}"
        self.hosts: tuple[VirtualHost, ...] = ()
        self._count = hosts
        self._with_sshd = sshd
        self._holders: list[subprocess.Popen[bytes]] = []
        self._sshd: dict[str, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[Any]] = []
        self._sweeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VirtualCluster:
        try:
            with namespaces.lock():
                namespaces.sweep()
                self.directory = namespaces.directory_of(self.name)
                self.directory.mkdir(mode=0o700)
                (self.directory / "owner").write_text(namespaces.start_time(os.getpid()) or "")
                self._start_sweeper()
                self.network = namespaces.free_network()
                self.hosts = tuple(
                    VirtualHost(i, f"vhost{i + 1}", str(self.network[i + 1]), _address6(i + 1))
                    for i in range(self._count)
                )
                self._join()
            for host in self.hosts:
                (self.directory / host.name).mkdir()
            write_names(self.directory, self.hosts)
            if self._with_sshd:
                write_ssh_files(self.directory, self.hosts)
            self._hold()
            if self._with_sshd:
                for host in self.hosts:
                    self.start_sshd(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def ssh_config(self) -> Path:
        """For ``ssh -F``: with it ``ssh vhost1`` asks nothing, from here and from every host."""
        return self.directory / "ssh_config"

    def close(self) -> None:
        """End every process on the hosts, and remove all that was made. May be called again."""
        for process in self._started:
            process.kill()  # one that has not entered its namespaces yet is not found there
        with namespaces.lock():
            namespaces.remove(self.name)
        for process in [*self._started, *self._sshd.values(), *self._holders]:
            process.wait(SECONDS)
        for holder in self._holders:
            for stream in (holder.stdin, holder.stdout, holder.stderr):
                if stream is not None:
                    stream.close()
        if self._sweeper is not None:
            os.killpg(self._sweeper.pid, signal.SIGKILL)
            self._sweeper.wait(SECONDS)
            assert self._sweeper.stdin is not None
            self._sweeper.stdin.close()
        self._started, self._holders, self._sweeper = [], [], None
        self._sshd.clear()

    def popen(
        self,
        host: VirtualHost | str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on a host; when this returns, it runs there.

        Args:
            host: or its name.
            command: program and arguments.
            env: variables to add to this process's own.
            options: of ``subprocess.Popen``, such as ``stdout`` and ``text``.
        """
        variables = {**os.environ, **(env or {})}
        enter = self._enter(host)
        # No fork lies between: signals to the Popen object reach the command itself.
        process = subprocess.Popen([*enter, *command], env=variables, **options)
        self._started.append(process)
        while process.poll() is None:
            line = namespaces.command_line(process.pid)  # empty while one program becomes the next
            if line and not line.startswith(" ".join(enter)):
                break
            select.select([], [], [], 0.001)  # the program that enters tells nobody when it is in
        return process

    def cut(self, host: VirtualHost | str) -> None:
        """Take the host's link down, as if its cable were pulled."""
        namespaces.ip(f"link set {self.host(host).name} down", self._switch)

    def heal(self, host: VirtualHost | str) -> None:
        """Bring the link up again."""
        namespaces.ip(f"link set {self.host(host).name} up", self._switch)

    def sent_bytes(self, host: VirtualHost | str) -> int:
        """Bytes that the host has sent over its link, in all.

        A packet counts with one header, also if it is cut into several on the wire, as a network
        card that segments by itself would count.
        """
        return self._counters(host)[1]

    def received_bytes(self, host: VirtualHost | str) -> int:
        """Bytes that the host has received over its link, in all."""
        return self._counters(host)[0]

    def processes(self, host: VirtualHost | str) -> dict[int, str]:
        """Number and command line of what runs on the host, besides its sshd."""
        name = self.host(host).name
        own = {self._holders[self.host(host).index].pid}
        if name in self._sshd:
            own.add(self._sshd[name].pid)
        running = set(namespaces.processes(self._namespace(name))) - own
        return {pid: namespaces.command_line(pid) for pid in sorted(running)}

    def kill(self, host: VirtualHost | str) -> None:
        """Kill all that runs on the host, its sshd too, as a crash would; its link stays up."""
        name = self.host(host).name
        namespaces.kill(self._namespace(name), keep=[self._holders[self.host(host).index].pid])
        self.stop_sshd(name)

    def start_sshd(self, host: VirtualHost | str) -> None:
        """Start the host's sshd, and return when it listens."""
        host = self.host(host)
        program = namespaces.which("sshd")
        assert program is not None
        config = str(self.directory / host.name / "sshd_config")
        log = str(self.directory / host.name / "sshd.log")
        process = subprocess.Popen(
            [*self._enter(host), program, "-D", "-f", config, "-E", log],
            stdin=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "")},
        )
        self._sshd[host.name] = process
        deadline = time.monotonic() + SECONDS
        while not _answers(host.address):
            if process.poll() is not None or time.monotonic() > deadline:
                said = Path(log).read_text() if Path(log).exists() else ""
                raise VirtualClusterError(
                    f"sshd of {host.name} does not listen: {said.strip()}",
                    "start it by hand in the host's namespace to see more: "
                    + shlex.join([*self._enter(host), program, "-D", "-d", "-f", config]),
                )
            select.select([], [], [], 0.01)  # sshd tells nobody when it listens

    def stop_sshd(self, host: VirtualHost | str) -> None:
        """Stop the host's sshd: connections are refused from now on."""
        process = self._sshd.pop(self.host(host).name, None)
        if process is not None:
            process.kill()
            process.wait(SECONDS)

    def host(self, host: VirtualHost | str) -> VirtualHost:
        """The host of that name.

        Raises:
            VirtualClusterError: there is none.
        """
        if isinstance(host, VirtualHost):
            return host
        for one in self.hosts:
            if one.name == host:
                return one
        names = ", ".join(one.name for one in self.hosts)
        raise VirtualClusterError(f"there is no host {host!r}", f"choose one of {names}")

    @property
    def _switch(self) -> str:
        return self._namespace("switch")

    def _namespace(self, name: str) -> str:
        return f"{self.name}-{name}"

    def _enter(self, host: VirtualHost | str) -> list[str]:
        holder = self._holders[self.host(host).index]
        return ["nsenter", f"--target={holder.pid}", "--net", "--uts", "--ipc", "--mount", "--"]

    def _counters(self, host: VirtualHost | str) -> tuple[int, int]:
        return namespaces.link_bytes(self._holders[self.host(host).index].pid)

    def _start_sweeper(self) -> None:
        # It reads until our end of the pipe closes, which the kernel does however we end.
        down = [sys.executable, "-m", "benchmarks.virtual_cluster", "down", "--only", self.name]
        self._sweeper = subprocess.Popen(
            ["sh", "-c", f"cat; exec {shlex.join(down)}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=ROOT,
        )

    def _join(self) -> None:
        """Make the namespaces, the bridge and the links."""
        names = [host.name for host in self.hosts]
        namespaces.ip(
            "\n".join(f"netns add {self._namespace(name)}" for name in ["switch", *names])
        )
        # This machine has a port of its own, not shaped: by it tests reach the hosts.
        lines = [f"link add {self.name} type veth peer name uplink netns {self._switch}"]
        for name in names:
            peer = f"peer name eth0 netns {self._namespace(name)}"
            lines.append(f"link add {name} netns {self._switch} type veth {peer}")
        lines.append(f"addr add {self.network[254]}/24 dev {self.name}")
        lines.append(f"link set {self.name} up")
        namespaces.ip("\n".join(lines))
        ports = ["uplink", *names]
        lines = ["link add bridge type bridge forward_delay 0 mcast_snooping 0"]
        lines += [f"link set {port} master bridge up" for port in ports]
        namespaces.ip("\n".join([*lines, "link set bridge up"]), self._switch)
        for host in self.hosts:
            lines = ["link set lo up", "link set eth0 up"]
            lines.append(f"addr add {host.address}/24 dev eth0")
            lines.append(f"addr add {host.address6}/64 dev eth0 nodad")
            namespaces.ip("\n".join(lines), self._namespace(host.name))
            if self._rate_bits is not None:
                namespaces.shape(self._namespace(host.name), "eth0", self._rate_bits)
                namespaces.shape(self._switch, host.name, self._rate_bits)

    def _hold(self) -> None:
        """Keep a process on each host: its namespaces of names and files live as long."""
        for host in self.hosts:
            here = shlex.quote(str(self.directory))
            made = shlex.quote(str(self.directory / host.name / "sys"))
            config = f"mount --bind {here}/ssh_config /etc/ssh/ssh_config"
            script = f"""set -e
                hostname {host.name}
                mount --bind {here}/hosts /etc/hosts
                mount --bind {here}/shadow /etc/shadow
                {config if self._with_sshd else ""}
                mkdir {made}
                mount -t sysfs sysfs {made}
                if mountpoint -q /sys/fs/cgroup; then
                    mount --rbind /sys/fs/cgroup {made}/fs/cgroup
                fi
                mount --move {made} /sys
                mount -t tmpfs tmpfs /dev/shm
                mount -t tmpfs tmpfs /run
                mkdir -m 755 /run/sshd
                echo ready
                exec cat
            """
            enter = ["nsenter", f"--net=/run/netns/{self._namespace(host.name)}", "--"]
            unshare = ["unshare", "--uts", "--ipc", "--mount", "--propagation=private", "--"]
            # Its own session: a Ctrl-C at the terminal is for what runs on the hosts.
            holder = subprocess.Popen(
                [*enter, *unshare, "sh", "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._holders.append(holder)
            assert holder.stdout is not None
            assert holder.stderr is not None
            if holder.stdout.readline() != b"ready\n":
                said = holder.stderr.read().decode(errors="replace").strip()
                raise VirtualClusterError(
                    f"{host.name} cannot be set up: {said}",
                    "run this where mounting is allowed (CAP_SYS_ADMIN)",
                )


def _address6(number: int) -> str:
    return f"fd70:6c78::{number:x}"


def _answers(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), timeout=SECONDS):
            return True
    except OSError:
        return False


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.virtual_cluster",
        description="Several hosts in one machine, with links of a given rate. Needs root.",
    )
    commands = parser.add_subparsers(dest="action", required=True)
    up = commands.add_parser("up", help="make hosts that stay until `down`")
    down = commands.add_parser("down", help="remove what `up` made, and what crashes left")
    run = commands.add_parser("run", help="run a command on every host of a new cluster")
    serve = commands.add_parser("serve", help="make hosts that stay until a signal")
    for one in (up, run, serve):
        one.add_argument("--hosts", type=int, default=4, help="how many (4)")
        one.add_argument("--rate", help='of each link, such as "1gbit" (not shaped)')
    down.add_argument("--only", metavar="NAME", help="this one cluster, if its process is gone")
    run.add_argument("command", nargs="+", help="has HOST_INDEX and HOST_COUNT set; after `--`")
    args = parser.parse_args(arguments)
    try:
        if args.action == "up":
            return _up(args.hosts, args.rate)
        if args.action == "down":
            return _down(args.only)
        with VirtualCluster(args.hosts, args.rate) as cluster:
            if args.action == "run":
                return _run_everywhere(cluster, args.command)
            return _serve(cluster)
    except VirtualClusterError as error:
        print(error, file=sys.stderr)
        return 2


def _run_everywhere(cluster: VirtualCluster, command: list[str]) -> int:
    """Run a command on every host; the largest exit status. Each line gets its host's name."""
    running = []
    for host in cluster.hosts:
        env = {"HOST_INDEX": str(host.index), "HOST_COUNT": str(len(cluster.hosts))}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = cluster.popen(host, command, env, text=True, errors="replace", **pipes)
        reader = threading.Thread(target=_print_lines, args=(host.name, process.stdout))
        reader.start()
        running.append((process, reader))
    for _, reader in running:
        reader.join()
    return max(abs(process.wait()) for process, _ in running)


def _print_lines(name: str, lines: IO[str]) -> None:
    for line in lines:
        print(f"[{name}] {line}", end="", flush=True)


def _serve(cluster: VirtualCluster) -> int:
    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    (cluster.directory / "serves").touch()
    for host in cluster.hosts:
        print(host.name, host.address, host.address6)
    print(f"ssh -F {cluster.ssh_config} {cluster.hosts[0].name}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
    return 0


def _up(hosts: int, rate: str | None) -> int:
    command = [sys.executable, "-m", "benchmarks.virtual_cluster", "serve", "--hosts", f"{hosts}"]
    command += ["--rate", rate] if rate else []
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    )
    assert server.stdout is not None
    assert server.stderr is not None
    for line in server.stdout:
        print(line, end="")
        if line.startswith("ssh "):
            return 0
    print(server.stderr.read(), end="", file=sys.stderr)
    return server.wait()


def _down(only: str | None) -> int:
    with namespaces.lock():
        gone = namespaces.sweep(only)
        servers = {
            name: int(namespaces.NAMES.fullmatch(name)[1])  # type: ignore[index]
            for name, owned in namespaces.clusters().items()
            if owned and only is None and (namespaces.directory_of(name) / "serves").exists()
        }
    # Clusters that a test or a benchmark holds are theirs.
    for name, pid in servers.items():
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            os.kill(pid, signal.SIGTERM)
            select.select([process], [], [], SECONDS)
            os.close(process)
        gone.append(name)
    for name in gone:
        print(f"removed {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
