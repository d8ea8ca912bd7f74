"""Keys and configuration of ssh for a virtual cluster, and what its hosts see in /etc."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import namespaces
from benchmarks.namespaces import VirtualHost


def write_names(here: Path, hosts: Sequence[VirtualHost]) -> None:
    """Write the hosts' and users' names, as each host sees them in /etc, in ``here``."""
    # sshd refuses root where the machine locks its password; the hosts have none to lock.
    _write(here / "shadow", ["root:*:19000:0:99999:7:::"])
    names = [f"{host.address} {host.name}" for host in hosts]
    _write(here / "hosts", ["127.0.0.1 localhost", "::1 localhost", *names])


def write_ssh_files(here: Path, hosts: Sequence[VirtualHost]) -> None:
    """Make one user key, a key for each host, and the files that let them meet, in ``here``."""
    _make_key(here / "user_key")
    shutil.copy(here / "user_key.pub", here / "authorized_keys")
    known = []
    config = []
    for host in hosts:
        _make_key(here / host.name / "host_key")
        kind, key, *_ = (here / host.name / "host_key.pub").read_text().split()
        known.append(f"{host.name},{host.address},{host.address6} {kind} {key}")
        config += [f"Host {host.name}", f"    HostName {host.address}"]
        _write(here / host.name / "sshd_config", _sshd_config(here, host))
    _write(here / "known_hosts", known)
    addresses = " ".join(f"{host.address} {host.address6}" for host in hosts)
    config += [
        f"Host vhost* {addresses}",
        "    User root",
        f"    IdentityFile {here / 'user_key'}",
        "    IdentitiesOnly yes",
        f"    UserKnownHostsFile {here / 'known_hosts'}",
        "    GlobalKnownHostsFile /dev/null",
        "    StrictHostKeyChecking yes",
        "    BatchMode yes",
        "    ConnectTimeout 10",
    ]
    _write(here / "ssh_config", config)


def _sshd_config(here: Path, host: VirtualHost) -> list[str]:
    return [
        f"HostKey {here / host.name / 'host_key'}",
        f"AuthorizedKeysFile {here / 'authorized_keys'}",
        "PidFile none",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "StrictModes no",  # the keys lie in a directory below /tmp
        "UsePAM no",
        "UseDNS no",
        "MaxStartups 100",
        "Subsystem sftp internal-sftp",
    ]


def _make_key(path: Path) -> None:
    comment = ["-C", "virtual-cluster"]
    namespaces.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", *comment, "-f", str(path)])


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600 if path.name == "shadow" else 0o644)
