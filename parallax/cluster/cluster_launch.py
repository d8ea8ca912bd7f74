"""Turns the user's process into the launcher of workers on several hosts."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import msgspec

from parallax.cluster.chief import Launch
from parallax.cluster.code_files import imported_files
from parallax.cluster.environment import refuse_nested_launch
from parallax.cluster.host_report import hash_files
from parallax.cluster.launch import AGENT, made_directory, program
from parallax.cluster.local_workers import local_host
from parallax.cluster.spec import ClusterSpec
from parallax.errors import LaunchError

__all__ = ["find_here", "launch_cluster"]


def find_here(spec: ClusterSpec) -> int:
    """The number of this machine among the hosts.

    Raises:
        LaunchError: it is none of them, or another is marked as the chief, or a key is missing.
    """
    host = local_host(spec)
    if host is None:
        raise LaunchError(
            f"{spec.source} names the machine {spec.hosts[0].address!r}, which is not this one "
            f"({socket.gethostname()}), and no other that is.",
            hint="start the script on one of the file's hosts, or add this machine to it.",
        )
    if spec.chief is not None and spec.chief is not host:
        raise LaunchError(
            f"{spec.source}:{spec.chief.line}: the chief is {spec.chief.address!r}, and this "
            f"machine is {host.address!r}.",
            hint="start the script on the chief, or leave `chief` out: then it is the host that "
            "you start on.",
        )
    refuse_missing_keys(spec)
    return spec.hosts.index(host)


def refuse_missing_keys(spec: ClusterSpec) -> None:
    """Checks that the files of private keys exist.

    Raises:
        LaunchError: one does not.
    """
    for host in spec.hosts:
        if host.ssh.key is not None and not Path(host.ssh.key).expanduser().is_file():
            raise LaunchError(
                f"{spec.source}:{host.line}: the key {host.ssh.key!r} of {host.address!r} is no "
                "file.",
                hint="correct `ssh: key`, or leave it out for the keys of your ssh configuration.",
            )


def launch_cluster(
    spec: ClusterSpec, *, redirect_path: str | None, seed: int | None, default_workers: int
) -> NoReturn:
    """Replaces this process by the launcher of a run on several hosts.

    Each worker runs the same program, from its beginning, in the directory in which it was started
    here. Functions registered with ``atexit`` do not run in this process.

    Args:
        spec: the hosts; this machine is one of them.
        redirect_path: directory that receives each worker's output, besides the console.
        seed: base of the workers' random numbers; a random one if None.
        default_workers: workers of a host without devices that the file says nothing of.

    Raises:
        LaunchError: this process is a worker already, there is no script to start again, or this
            machine is none of the hosts.
    """
    refuse_nested_launch()
    here = find_here(spec)
    command, directory = program()
    launch = Launch(
        spec=spec,
        here=here,
        command=command[1:],
        directory=directory or os.getcwd(),
        code=hash_files(imported_files()),
        redirect=None if redirect_path is None else made_directory(redirect_path),
        seed=seed,
        default_workers=default_workers,
    )
    execute(launch)


def execute(launch: Launch) -> NoReturn:
    """Becomes the launcher.

    Raises:
        LaunchError: it cannot be started.
    """
    for stream in (sys.stdout, sys.stderr):
        # A closed console is the workers' business.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    try:
        # Handed on in a file without a name: a command line can be read by everybody.
        with tempfile.TemporaryFile() as file:
            file.write(msgspec.json.encode(launch))
            file.flush()
            file.seek(0)
            os.set_inheritable(file.fileno(), True)
            os.chdir(launch.directory)
            os.execv(sys.executable, [sys.executable, AGENT, "--cluster", str(file.fileno())])
    except OSError as error:
        raise LaunchError(f"The launcher cannot be started: {error}.") from error
