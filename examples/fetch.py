"""Data of the examples: fetched and prepared once per host, and never seen half done."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from parallax.errors import DataError

CACHE = Path.home() / ".cache" / "parallax-examples"
FETCH_SECONDS = 300
WAIT_SECONDS = 900


def first_on_host() -> bool:
    """Whether this process prepares data: before workers exist, or as a host's first worker."""
    return os.environ.get("LOCAL_RANK", "0") in ("", "0")


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """``path``, which ``make`` writes (a file or a directory) unless it is there already.

    ``make`` gets a temporary path beside it, which takes its place in one rename: neither another
    worker nor a later run can meet a half-written file. A host's other workers wait for its first.
    """
    if path.exists():
        return path
    if not first_on_host():
        return _awaited(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        make(temporary)
        try:
            os.replace(temporary, path)
        except OSError:
            # A second program has made the same directory meanwhile: its content is as good.
            if not path.exists():
                raise
    finally:
        _remove(temporary)
    return path


def debian_files(package: str, content: str, cache: Path) -> Path | None:
    """A folder or file that a Debian package ships, without installing the package.

    Args:
        package: name of the package in the release that this machine runs.
        content: path inside the package, such as ``usr/share/dictd``.
        cache: directory that keeps what was unpacked.

    Returns:
        Where ``content`` is, or None where the package cannot be had (no apt-get, no network).
    """
    unpacked = cache / package
    if not unpacked.exists():
        if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
            return None
        try:
            made_once(unpacked, lambda target: _unpack(package, content, target))
        except (subprocess.SubprocessError, DataError, OSError):
            return None
    found = unpacked / content
    return found if found.exists() else None


def _unpack(package: str, content: str, target: Path) -> None:
    target.mkdir()
    run = {"cwd": target, "check": True, "capture_output": True, "timeout": FETCH_SECONDS}
    subprocess.run(["apt-get", "download", package], **run)  # type: ignore[call-overload]
    (archive,) = target.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", archive.name, "."], **run)  # type: ignore[call-overload]
    archive.unlink()
    wanted = target / content
    files = [wanted] if wanted.is_file() else [item for item in wanted.rglob("*") if item.is_file()]
    if not any(item.stat().st_size for item in files):
        raise DataError(f"The Debian package {package} holds nothing under {content}.")


def _awaited(path: Path) -> Path:
    end = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            raise DataError(
                f"{path} did not appear within {WAIT_SECONDS} s.",
                hint="this host's first worker prepares it; look at that worker's output.",
            )
        time.sleep(0.2)
    return path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
