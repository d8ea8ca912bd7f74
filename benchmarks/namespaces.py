"""Namespaces, links and processes of virtual clusters, and the removal of what is left over.

Everything is named after the process that made it, ``plx<process>x<serial>``: the namespaces
``plx12x0-vhost1`` and ``plx12x0-switch``, the link ``plx12x0`` of this machine, and the directory
``parallax-cluster-plx12x0``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

DIRECTORY = "parallax-cluster-"
NAMES = re.compile(r"plx(\d+)x\d+")
ADMINISTRATION = ":/usr/sbin:/sbin"  # a user's PATH may lack them
SECONDS = 20.0  # for processes to go that were killed


class VirtualClusterError(Exception):
    """A virtual cluster cannot be made or used; ``hint`` is the way out."""

    def __init__(self, problem: str, hint: str) -> None:
        self.problem = problem
        self.hint = hint
        super().__init__(f"{problem}\n  What to do: {hint}")


@dataclass(frozen=True)
class VirtualHost:
    """One host: its name, which is its host name too, and its addresses."""

    index: int
    name: str
    address: str
    address6: str


def missing_requirement(sshd: bool = True) -> tuple[str, str] | None:
    """Why a virtual cluster cannot be made here and what to do, or None if it can.

    Args:
        sshd: its hosts run one each.
    """
    if os.geteuid() != 0:
        return "a virtual cluster needs root, for network namespaces", "run this as root"
    programs = {
        **dict.fromkeys(("ip", "tc"), "iproute2"),
        **dict.fromkeys(("unshare", "nsenter"), "util-linux"),
    }
    if sshd:
        programs |= dict.fromkeys(("ssh", "ssh-keygen"), "openssh-client")
        programs["sshd"] = "openssh-server"
    for program, package in programs.items():
        if which(program) is None:
            return f"a virtual cluster needs {program}", f"apt-get install {package}"
    attempt = ["unshare", "--net", "--uts", "--ipc", "--mount", "--", "mount", "-t", "tmpfs"]
    done = subprocess.run([*attempt, "tmpfs", "/mnt"], capture_output=True, text=True)
    if done.returncode:
        why = f"namespaces cannot be made here: {done.stderr.strip()}"
        return why, "run this on a machine or in a container that may mount (CAP_SYS_ADMIN)"
    return None


def rate_bits(rate: str) -> int:
    """Bits per second of a rate in ``tc``'s words, such as ``"100mbit"``.

    Raises:
        VirtualClusterError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if match is None or float(match[1]) == 0:
        raise VirtualClusterError(
            f"{rate!r} is no rate", 'write a number and its unit, such as "1gbit" or "100mbit"'
        )
    return int(float(match[1]) * {"k": 10**3, "m": 10**6, "g": 10**9}[match[2]])


def link_bytes(pid: int | None = None) -> tuple[int, int]:
    """Bytes received and sent by ``eth0`` of the host on which a process runs, this one if None."""
    for line in Path(f"/proc/{pid or 'self'}/net/dev").read_text().splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == "eth0":
            fields = numbers.split()
            return int(fields[0]), int(fields[8])
    raise VirtualClusterError("this host has no eth0", "run this on a host of a virtual cluster")


def shape(namespace: str, device: str, bits: int) -> None:
    """Limit what leaves a device, in bits per second."""
    # Packets of up to 64 KiB reach the filter uncut, and one larger than the burst is dropped.
    burst = max(128 * 1024, bits // 8 // 1000)
    command = f"qdisc add dev {device} root tbf rate {bits}bit burst {burst}b latency 100ms"
    run(["tc", "-n", namespace, *command.split()])


def free_network() -> IPv4Network:
    """A /24 that nothing on this machine has a route to."""
    routes = json.loads(run(["ip", "-j", "-4", "route", "show", "table", "all"]) or "[]")
    taken = [IPv4Network(r["dst"], strict=False) for r in routes if r["dst"][0].isdigit()]
    for number in range(256):
        network = IPv4Network(f"10.213.{number}.0/24")
        if not any(network.overlaps(other) for other in taken if other.prefixlen):
            return network
    raise VirtualClusterError(
        "all networks 10.213.0.0/24 to 10.213.255.0/24 have routes",
        "take clusters down: python -m benchmarks.virtual_cluster down",
    )


def which(program: str) -> str | None:
    """The path of a program, or None."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ADMINISTRATION)


def run(command: Sequence[str], text: str | None = None) -> str:
    """Run a program on a text; what it wrote. Raises VirtualClusterError if it fails."""
    program = which(command[0]) or command[0]
    done = subprocess.run([program, *command[1:]], input=text, capture_output=True, text=True)
    if done.returncode:
        raise VirtualClusterError(
            f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()}",
            "take old clusters down (python -m benchmarks.virtual_cluster down) and try again",
        )
    return done.stdout


def ip(lines: str, namespace: str | None = None) -> None:
    """Run lines of ``ip``, in a namespace or here."""
    inside = [] if namespace is None else ["-n", namespace]
    run(["ip", *inside, "-batch", "-"], lines + "\n")


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """One process at a time makes or removes clusters. The lock leaves no file behind."""
    descriptor = os.open("/run", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def directory_of(name: str) -> Path:
    """Where a cluster's keys and configuration are."""
    return Path(tempfile.gettempdir(), f"{DIRECTORY}{name}")


def start_time(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None if there is none of that number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]


def _owned(name: str) -> bool:
    """Whether the process that made a cluster still runs."""
    match = NAMES.fullmatch(name)
    assert match is not None
    now = start_time(int(match[1]))
    try:
        then = Path(directory_of(name), "owner").read_text()
    except FileNotFoundError:
        return now is not None
    return now is not None and now == then


def clusters() -> dict[str, bool]:
    """All clusters of this machine by name, and whether the process that made each still runs."""
    found = [entry.rpartition("-")[0] for entry in _namespaces()]
    found += [link for link in os.listdir("/sys/class/net") if NAMES.fullmatch(link)]
    directories = Path(tempfile.gettempdir()).glob(f"{DIRECTORY}*")
    found += [directory.name[len(DIRECTORY) :] for directory in directories]
    return {name: _owned(name) for name in sorted(set(found)) if NAMES.fullmatch(name)}


def _namespaces() -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir("/run/netns")
    return []


def sweep(only: str | None = None) -> list[str]:
    """Remove all clusters, or one, whose process is gone; their names."""
    gone = [name for name, owned in clusters().items() if not owned and only in (None, name)]
    for name in gone:
        remove(name)
    return gone


def remove(name: str) -> None:
    """End what runs in a cluster and remove all of it."""
    for namespace in [entry for entry in _namespaces() if entry.startswith(f"{name}-")]:
        kill(namespace)
        run(["ip", "netns", "delete", namespace])
    # The kernel removes links of a namespace later, in its own time: this one is seen here.
    with contextlib.suppress(VirtualClusterError):
        run(["ip", "link", "delete", name])
    shutil.rmtree(directory_of(name), ignore_errors=True)


def processes(namespace: str) -> list[int]:
    """Numbers of the processes in a namespace."""
    return [int(pid) for pid in run(["ip", "netns", "pids", namespace]).split()]


def kill(namespace: str, keep: Collection[int] = ()) -> None:
    """Kill what runs in a namespace, and return when it is gone."""
    deadline = time.monotonic() + SECONDS
    # Again and again: a process may have forked while the others were killed.
    while pids := set(processes(namespace)).difference(keep):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise VirtualClusterError(
                f"processes of {namespace} do not end: {sorted(pids)}", "see them with ps"
            )


def command_line(pid: int) -> str:
    """What a process was started as; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""
