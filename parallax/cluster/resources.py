"""How many workers this machine runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch

from parallax.errors import ConfigError, LaunchError

MAX_BYTES = 1 << 20
_HERE = {"localhost", "127.0.0.1", "::1"}


def local_workers(resource_info: str | os.PathLike[str] | None, workers: int) -> int:
    """Number of workers to start on this machine.

    Args:
        resource_info: None, or a file with one line ``host: device,device,...`` as in the
            Parallax user guide; the host must be this machine.
        workers: workers without a file and without a CUDA device.

    Raises:
        ConfigError: the file cannot be read or does not say which devices to use.
        LaunchError: it names another machine.
    """
    if resource_info is None:
        return torch.cuda.device_count() if torch.cuda.is_available() else workers
    hosts = _read(Path(resource_info))
    names = _HERE | {socket.gethostname(), socket.getfqdn()}
    other = [host for host, _ in hosts if host not in names]
    if other:
        raise LaunchError(
            f"{resource_info} names the machine {other[0]!r}, which is not this one "
            f"({socket.gethostname()}).",
            hint="start the script on every machine with torchrun --nnodes N --nproc-per-node K, "
            "which parallax runs under; a resource file describes this machine only.",
        )
    return len(hosts[0][1])


def _read(path: Path) -> list[tuple[str, list[int]]]:
    if not path.is_file():
        raise ConfigError(
            f"resource_info {str(path)!r} is no file.",
            hint="write a file with one line such as 'localhost: 0,1', or pass None.",
        )
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"resource_info {str(path)!r} is larger than {MAX_BYTES} bytes.")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (UnicodeDecodeError, OSError) as error:
        what = "is no UTF-8 text" if isinstance(error, ValueError) else "cannot be read"
        raise ConfigError(f"resource_info {str(path)!r} {what}: {error}.") from error
    hosts: list[tuple[str, list[int]]] = []
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        host, separator, devices = text.rpartition(":")
        words = [word.strip() for word in devices.split(",") if word.strip()]
        if not separator or not words or not all(word.isdigit() for word in words):
            raise ConfigError(
                f"{path}:{number}: {line.strip()!r} is not 'host: device,device,...'.",
                hint="for example 'localhost: 0,1' for two workers on this machine.",
            )
        ids = [int(word) for word in words]
        if len(set(ids)) != len(ids):
            raise ConfigError(f"{path}:{number}: a device is named twice in {line.strip()!r}.")
        if any(host.strip() == known for known, _ in hosts):
            raise ConfigError(f"{path}:{number}: the host {host.strip()!r} is listed twice.")
        hosts.append((host.strip(), ids))
    if not hosts:
        raise ConfigError(
            f"resource_info {str(path)!r} lists no hosts.", hint="for example 'localhost: 0,1'."
        )
    return hosts
