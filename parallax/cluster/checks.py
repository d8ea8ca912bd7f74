"""What is checked before anything is started: that every host can run, and runs the same."""

from __future__ import annotations

import io
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from parallax.cluster.host_report import package_hash, torch_version
from parallax.cluster.wire import Report

__all__ = ["HostProblem", "Versions", "find_problems", "own_versions", "summary", "version_table"]

LOW_MEMORY = 512 << 20


@dataclass(frozen=True)
class HostProblem:
    """Why a host cannot take part.

    Args:
        host: as the resource file names it.
        problem: a sentence without its full stop that names the host.
        hint: the way out.
    """

    host: str
    problem: str
    hint: str = ""


@dataclass(frozen=True)
class Versions:
    """What has to be the same everywhere, but for the user's code."""

    python: str
    torch: str
    parallax: str
    package: str

    def differences(self, other: Versions) -> list[str]:
        """Names of what differs, as the table's columns have them."""
        # Python's last number is for repairs; bytecode, pickles and hashes are those of the minor.
        found = []
        if self.python.split(".")[:2] != other.python.split(".")[:2]:
            found.append("Python")
        if self.torch != other.torch:
            found.append("torch")
        if (self.parallax, self.package) != (other.parallax, other.package):
            found.append("parallax")
        return found


def own_versions() -> Versions:
    """Of this process."""
    from parallax import __version__

    return Versions(platform.python_version(), torch_version(), __version__, package_hash())


def find_problems(
    reports: Mapping[str, Report], own: Versions, code: Mapping[str, Mapping[str, str]]
) -> list[HostProblem]:
    """Everything that stands in the way, host by host.

    Args:
        reports: by host; of those that could be reached.
        own: versions of the launching host.
        code: by host, the SHA-256 that each of the user's files should have there.
    """
    found = []
    machines: dict[str, str] = {}
    for host, report in reports.items():
        found += [HostProblem(host, f"{host} {text}", hint) for text, hint in report.problems]
        if report.machine in machines:
            found.append(
                HostProblem(
                    host,
                    f"{host} and {machines[report.machine]} are the same machine",
                    "write all workers of a host on one line of the resource file.",
                )
            )
        machines.setdefault(report.machine, host)
        different = versions_of(report).differences(own)
        if different:
            shown = ", ".join(_version_difference(name, report, own) for name in different)
            found.append(
                HostProblem(
                    host,
                    f"{host} has other versions than the launching host: {shown}",
                    "install the same versions everywhere, or set `ssh: python` to an interpreter "
                    "that has them.",
                )
            )
        found += _code_problems(host, report, code[host])
    return found + _kind_problems(reports)


def versions_of(report: Report) -> Versions:
    """The versions of a report."""
    return Versions(report.python, report.torch, report.parallax, report.package)


def _version_difference(name: str, report: Report, own: Versions) -> str:
    if name == "Python":
        return f"Python {report.python} instead of {own.python}"
    if name == "torch":
        return f"torch {report.torch or 'not installed'} instead of {own.torch}"
    if report.parallax != own.parallax:
        return f"parallax {report.parallax} instead of {own.parallax}"
    return f"other code of parallax {own.parallax}"


def _code_problems(host: str, report: Report, code: Mapping[str, str]) -> list[HostProblem]:
    missing = [path for path in code if not report.code.get(path)]
    other = [path for path in code if report.code.get(path) and report.code[path] != code[path]]
    found = []
    if missing:
        found.append(
            HostProblem(
                host,
                f"{host} has no {_paths(missing)}",
                "put the code at the same path on every host.",
            )
        )
    if other:
        found.append(
            HostProblem(
                host,
                f"{host} has different code: {_paths(other)}",
                "copy the same version to every host; workers of different code train wrongly.",
            )
        )
    return found


def _paths(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:5])
    return shown if len(paths) <= 5 else f"{shown} and {len(paths) - 5} more"


def _kind_problems(reports: Mapping[str, Report]) -> list[HostProblem]:
    kinds = {host: report.devices > 0 for host, report in reports.items()}
    if len(set(kinds.values())) < 2:
        return []
    cuda = next(host for host, kind in kinds.items() if kind)
    return [
        HostProblem(
            host,
            f"{host} has no CUDA devices, but {cuda} has",
            "all workers compute on the same kind: give every host `cpus`, or leave it out.",
        )
        for host, kind in kinds.items()
        if not kind
    ]


def summary(report: Report) -> str:
    """One line about a host that could be reached."""
    kind = f"{report.devices} CUDA devices, " if report.devices else ""
    text = (
        f"Python {report.python}, torch {report.torch or 'missing'}, {kind}{report.cores} cores, "
        f"{report.free_memory / 2**30:.1f} GB free, {_count(report.workers, 'worker')}"
    )
    warnings = []
    if not report.devices and report.workers > report.cores:
        warnings.append(f"more workers than its {report.cores} cores")
    if 0 < report.free_memory < LOW_MEMORY * report.workers:
        warnings.append("little memory is free")
    return text + "".join(f"; warning: {warning}" for warning in warnings)


def version_table(reports: Mapping[str, Report], own: Versions) -> str:
    """Hosts and versions as a table; what differs from the launching host is marked."""
    table = Table(show_edge=False, pad_edge=False, box=None)
    for name in ("host", "Python", "torch", "parallax", "interpreter"):
        table.add_column(name, no_wrap=True)
    table.add_row("(this one)", own.python, own.torch, _parallax(own), "")
    for host, report in reports.items():
        versions = versions_of(report)
        different = versions.differences(own)
        cells = {
            "Python": versions.python,
            "torch": versions.torch or "missing",
            "parallax": _parallax(versions),
        }
        marked = [f"{text} <<<" if name in different else text for name, text in cells.items()]
        table.add_row(host, *marked, report.executable)
    text = io.StringIO()
    Console(file=text, width=200, color_system=None, highlight=False).print(table)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _parallax(versions: Versions) -> str:
    return f"{versions.parallax} ({versions.package[:8]})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
