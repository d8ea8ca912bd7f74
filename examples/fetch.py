"""Data of the examples: fetched and prepared once per host, and never seen half done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
import zipfile
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


def chosen(path: Path, choose: Callable[[], str]) -> str:
    """What ``choose`` says, once per host and kept in ``path``: all workers, and later runs, use
    the same data, also where only the first could have fetched another."""
    return made_once(path, lambda target: _write(target, choose())).read_text(encoding="utf-8")


def debian_files(package: str, content: str, cache: Path) -> Path | None:
    """A folder or file that a Debian package ships, without installing the package.

    Args:
        package: name of the package in the release that this machine runs.
        content: path inside the package, such as ``usr/share/dictd``.
        cache: directory that keeps what was unpacked.

    Returns:
        Where ``content`` is, or None where the package cannot be had (no apt-get, no network).
    """
    return _part_of(cache / package, content, lambda target: _unpack_debian(package, target))


def wheel_files(requirement: str, content: str, cache: Path) -> Path | None:
    """A folder or file that a Python package ships, without installing or importing the package.

    Args:
        requirement: name and version, such as ``recbole==1.2.1``.
        content: path inside the wheel.
        cache: directory that keeps what was unpacked.

    Returns:
        Where ``content`` is, or None where the package cannot be had (no pip, no network).
    """
    return _part_of(
        cache / requirement, content, lambda target: _unpack_wheel(requirement, content, target)
    )


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _part_of(package: Path, content: str, unpack: Callable[[Path], None]) -> Path | None:
    def make(target: Path) -> None:
        target.mkdir()
        unpack(target)
        wanted = target / content
        files = [wanted] if wanted.is_file() else [f for f in wanted.rglob("*") if f.is_file()]
        if not any(file.stat().st_size for file in files):
            raise DataError(f"The package {package.name} holds nothing under {content}.")

    try:
        made_once(package, make)
    except (subprocess.SubprocessError, DataError, OSError):
        return None
    found = package / content
    return found if found.exists() else None


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=FETCH_SECONDS)


def _unpack_debian(package: str, target: Path) -> None:
    _run(["apt-get", "download", package], target)
    (archive,) = target.glob("*.deb")
    _run(["dpkg-deb", "-x", archive.name, "."], target)
    archive.unlink()


def _unpack_wheel(requirement: str, content: str, target: Path) -> None:
    # Only binary: a source distribution would run its own code.
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    _run([*pip, requirement], target)
    (archive,) = target.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        for name in wheel.namelist():
            if name.startswith(content):
                wheel.extract(name, target)
    archive.unlink()


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
