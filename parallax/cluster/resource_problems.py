"""What is wrong with a resource file: collected with line numbers, reported together."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from parallax.cluster.spec import Host, address_problem, device_problem
from parallax.errors import ConfigError

__all__ = ["Problems"]

# Of a longer problem, which quotes what is long in the file, the beginning and the end are told.
_LONGEST = 400


class Problems:
    """Collects problems while a file is read, so that the user can repair them all at once.

    Args:
        source: the file, for messages.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[tuple[int, str, str]] = []

    def add(self, line: int, text: str, hint: str = "") -> None:
        """Notes a problem: the line from 1, what it is, and a way out if there is one."""
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST * 3 // 4]} … {text[-_LONGEST // 4 :]}"
        self.found.append((line, text, hint))

    def report(self) -> None:
        """Raises what was found.

        Raises:
            ConfigError: something was.
        """
        if not self.found:
            return
        found = sorted(set(self.found), key=lambda item: item[0])
        hints = list(dict.fromkeys(hint for _, _, hint in found if hint))
        lines = [f"{self.source}:{line}: {text}." for line, text, _ in found]
        problem = lines[0]
        if len(lines) > 1:
            problem = f"{self.source} has {len(lines)} problems:" + "".join(
                f"\n  - {line}" for line in lines
            )
        raise ConfigError(problem, hint=" ".join(hints))

    def check_hosts(self, hosts: Sequence[Host]) -> None:
        """What only the whole list shows: hosts named twice, two chiefs, mixed kinds."""
        seen: dict[str, Host] = {}
        for host in hosts:
            if (problem := address_problem(host.address)) is not None:
                self.add(host.line, problem)
                continue
            if host.devices is not None and (problem := device_problem(host.devices)) is not None:
                self.add(host.line, f"{problem} (host {host.address})")
            key = _same(host.address)
            if key in seen:
                self.add(
                    host.line,
                    f"the host {host.address!r} is listed twice, first on line {seen[key].line}",
                    "write all devices of a host on one line.",
                )
            seen.setdefault(key, host)
        chiefs = [host for host in hosts if host.chief]
        for host in chiefs[1:]:
            self.add(
                host.line,
                f"{host.address!r} is a second chief; the first is {chiefs[0].address!r} on line "
                f"{chiefs[0].line}",
                "worker 0 runs on one host: mark one, or none for the one that you start on.",
            )
        self._check_kinds(hosts)

    def _check_kinds(self, hosts: Sequence[Host]) -> None:
        on_cpu = [host for host in hosts if host.cpus is not None]
        on_cuda = [host for host in hosts if host.devices is not None]
        if on_cpu and on_cuda:
            self.add(
                on_cpu[0].line,
                f"{on_cpu[0].address!r} computes on the CPU and {on_cuda[0].address!r} on CUDA "
                f"devices (line {on_cuda[0].line}); all workers of a run compute on the same kind",
                "give all hosts devices, or all hosts cpus.",
            )


def _same(address: str) -> str:
    """One text for all spellings of an address."""
    if ":" in address:
        literal, percent, scope = address.partition("%")
        return str(ipaddress.IPv6Address(literal)) + percent + scope
    return address.lower().rstrip(".")
