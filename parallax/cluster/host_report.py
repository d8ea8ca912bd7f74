"""What a host says of itself before anything is started on it."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from parallax.cluster.wire import Order, Report

__all__ = [
    "cores",
    "cuda_devices",
    "free_memory",
    "hash_files",
    "make_report",
    "package_hash",
    "torch_version",
]

_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
_COUNT = "import torch; print(torch.cuda.device_count())"
_SECONDS = 60
DEVICES_HINT = "name devices that it has, or `cpus: N` for N workers on the CPU."


def make_report(order: Order) -> Report:
    """Looks at this host, and at what the order asks of it."""
    devices = cuda_devices() if order.cpus is None else 0
    problems = []
    if order.devices is not None:
        if (lacking := lacking_devices(order.devices, devices)) is not None:
            problems.append((lacking, DEVICES_HINT))
        workers = len(order.devices)
    else:
        workers = order.cpus or devices or order.default_workers
    if not os.path.isdir(order.directory):
        problems.append(
            (
                f"has no directory {order.directory}",
                "put the code at the same path on every host, or set `ssh: {directory: ...}`.",
            )
        )
    elif not os.access(order.directory, os.X_OK):
        problems.append((f"may not enter {order.directory}", "see its permissions."))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        problems += _interface_problem(name, order.environment)
    return Report(
        machine=_machine(),
        python=platform.python_version(),
        torch=torch_version(),
        parallax=_version(),
        package=package_hash(),
        executable=sys.executable,
        workers=workers,
        devices=devices,
        cores=cores(),
        free_memory=free_memory(),
        code=hash_files(order.code),
        problems=problems,
        peer=os.environ.get("SSH_CONNECTION", "").partition(" ")[0],
    )


def lacking_devices(asked: Sequence[int], devices: int) -> str | None:
    """That a host lacks devices which it is asked for, or None; completes "host ..."."""
    lacking = [number for number in asked if number >= devices]
    if not lacking:
        return None
    has = f"has devices 0 to {devices - 1}" if devices else "has no CUDA devices"
    return f"{has}, but {', '.join(map(str, lacking))} was asked for"


def hash_files(paths: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files by path; empty for one that cannot be read."""
    found = {}
    for path in paths:
        found[path] = ""
        with contextlib.suppress(OSError):
            found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


def package_hash() -> str:
    """One hash for all of parallax's own code."""
    root = Path(__file__).resolve().parents[1]
    whole = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        whole.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()


def cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version() -> str:
    import parallax

    return parallax.__version__


def torch_version() -> str:
    """The installed torch; empty if there is none."""
    # Asked of its metadata: an import takes seconds on every host.
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def cuda_devices() -> int:
    """Number of CUDA devices of this machine, whatever CUDA_VISIBLE_DEVICES shows of them."""
    if not any(glob.glob(pattern) for pattern in _DEVICE_FILES):
        return 0
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        done = subprocess.run(
            [sys.executable, "-c", _COUNT],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=True,
        )
        return int(done.stdout.split()[-1])
    return 0


def free_memory() -> int:
    """Bytes of main memory that programs could have; 0 if the system does not tell."""
    with contextlib.suppress(OSError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        if (found := re.search(r"MemAvailable:\s*(\d+) kB", text)) is not None:
            return int(found[1]) * 1024
    return 0


def _machine() -> str:
    """A text that only names of the same machine have in common."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        # Containers share a kernel; what makes them two hosts is their network.
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def _interface_problem(name: str, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    from parallax.cluster.addresses import interfaces

    wanted = environment.get(name, "")
    # NCCL's has operators ("^docker", "=eth0", "eth") that are not looked into.
    if not re.fullmatch(r"[A-Za-z0-9_.@-]+", wanted) or name == "NCCL_SOCKET_IFNAME":
        return []
    have = interfaces()
    if wanted in have:
        return []
    return [
        (
            f"has no network interface {wanted!r}, which {name} names; it has {', '.join(have)}",
            f"unset {name}: parallax finds the interface by the route to the chief.",
        )
    ]
