"""The Parallax guide's resource file: one host a line, with optional device numbers.

::

    # what follows a number sign is a comment
    10.0.0.4: 0,1,2       three workers, on CUDA devices 0, 1 and 2
    10.0.0.5              a worker for each CUDA device that the host has
    node-6: cpus=2        two workers on the CPU
    [fe80::7%eth0]: 0     an IPv6 address; without brackets a space has to follow the last colon

A line is split at the colon after a bracket, else at the only colon, else at the last one that a
space follows. A line that as a whole is an IPv6 address is a host without device numbers.
"""

from __future__ import annotations

import re

from parallax.cluster.resource_problems import Problems
from parallax.cluster.spec import MAX_WORKERS, Host, address_problem

__all__ = ["read_text"]

_HINT = "for example 'localhost: 0,1' for two workers, or 'localhost: cpus=2' on the CPU."


def read_text(text: str, problems: Problems) -> tuple[Host, ...]:
    """Reads the guide's form.

    Args:
        text: the file's content.
        problems: receives what is wrong.

    Returns:
        The hosts of the lines that could be read.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split("#")[0].strip()
        if not content:
            continue
        host = _read_line(content, number, problems)
        if host is not None:
            hosts.append(host)
    return tuple(hosts)


def _read_line(text: str, number: int, problems: Problems) -> Host | None:
    address, devices = _split(text)
    if (problem := address_problem(address)) is not None:
        problems.add(number, problem, _HINT if ":" in text else "")
        return None
    if devices is None:
        return Host(address, line=number)
    count = re.fullmatch(r"cpus\s*=\s*([0-9]{1,6})", devices)
    if count is not None:
        if not 1 <= int(count[1]) <= MAX_WORKERS:
            problems.add(number, f"cpus must be from 1 to {MAX_WORKERS}, found {count[1]}")
            return None
        return Host(address, cpus=int(count[1]), line=number)
    words = [word.strip() for word in devices.split(",")]
    if devices == "all":
        problems.add(
            number,
            f"{text!r} is not 'host: device,device,...': devices are numbers",
            "leave the devices out for all that the host has.",
        )
        return None
    if not all(re.fullmatch(r"-?[0-9]{1,6}", word) for word in words):
        problems.add(number, f"{text!r} is not 'host: device,device,...'", _HINT)
        return None
    return Host(address, devices=tuple(map(int, words)), line=number)


def _split(text: str) -> tuple[str, str | None]:
    """The address and what follows its colon, None without one."""
    if text.startswith("["):
        address, bracket, rest = text[1:].partition("]")
        rest = rest.strip()
        if not bracket or (rest and not rest.startswith(":")):
            return text, None
        return address.strip(), rest[1:].strip() if rest else None
    if text.count(":") > 1 and address_problem(text) is None:
        return text, None
    if text.count(":") <= 1:
        address, colon, rest = text.partition(":")
    else:
        parts = re.fullmatch(r"(.*):(?:\s+(.*))?", text, re.DOTALL)
        if parts is None:
            return text, None
        address, colon, rest = parts[1], ":", parts[2] or ""
    return address.strip(), rest.strip() if colon else None
