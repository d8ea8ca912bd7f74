"""The YAML form of a resource file, read strictly.

YAML's own guesses (``no`` is false, ``012`` is ten, ``22:22`` is a number of seconds, the last of
two equal keys wins) are not made: each field reads the text as it stands and knows what it wants.
Anchors, aliases and tags are refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable
from typing import Any, TypeVar

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from parallax.cluster.resource_problems import Problems
from parallax.cluster.spec import MAX_WORKERS, ClusterSpec, Host, Link, Ssh, address_problem
from parallax.cluster.ssh_options import option_problem
from parallax.cluster.units import (
    format_bandwidth,
    format_bytes,
    format_time,
    parse_bandwidth,
    parse_bytes,
    parse_time,
)

__all__ = ["read_yaml", "to_yaml"]

MAX_DEPTH = 32
# Ten times as fast, which a file of a thousand hosts notices.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BANDWIDTH = (parse_bandwidth, format_bandwidth)
_TIME = (parse_time, format_time)
_BYTES = (parse_bytes, format_bytes)
# How each is read from text, and written.
_MEASURED: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    "bandwidth": _BANDWIDTH,
    "latency": _TIME,
    "inside_bandwidth": _BANDWIDTH,
    "inside_latency": _TIME,
    "memory_bandwidth": _BANDWIDTH,
    "free_memory": _BYTES,
    "device_memory": _BYTES,
}
_TOP = ("hosts", "links", "ssh", "bandwidth", "latency", "inside_bandwidth", "inside_latency")
_HOST = ("address", "devices", "cpus", "ssh", "chief", *_MEASURED)
_SSH = ("user", "port", "key", "options", "python", "directory", "environment")
_LINK = ("between", "bandwidth", "latency")
_Value = TypeVar("_Value")


def read_yaml(text: str, problems: Problems) -> tuple[tuple[Host, ...], tuple[Link, ...]]:
    """Reads the YAML form.

    Args:
        text: the file's content.
        problems: receives what is wrong.

    Returns:
        The hosts and links of the entries that could be read.
    """
    root = _compose(text, problems)
    if root is None:
        return (), ()
    return _Reader(problems).read(root)


def to_yaml(spec: ClusterSpec) -> str:
    """The YAML form of a cluster, which :func:`read_yaml` reads back as the same value."""
    hosts = []
    for host in spec.hosts:
        entry: dict[str, Any] = {"address": host.address}
        if host.devices is not None:
            entry["devices"] = list(host.devices)
        if host.cpus is not None:
            entry["cpus"] = host.cpus
        entry |= _measured(host)
        if host.chief:
            entry["chief"] = True
        ssh = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(host.ssh).items()
            if value not in (None, ())
        }
        if "environment" in ssh:
            ssh["environment"] = dict(host.ssh.environment)
        if ssh:
            entry["ssh"] = ssh
        hosts.append(entry)
    document: dict[str, Any] = {"hosts": hosts}
    if spec.links:
        document["links"] = [
            {"between": list(link.between), **_measured(link)} for link in spec.links
        ]
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _measured(known: Host | Link) -> dict[str, str]:
    values = {name: getattr(known, name, None) for name in _MEASURED}
    return {name: _MEASURED[name][1](value) for name, value in values.items() if value is not None}


def _compose(text: str, problems: Problems) -> Node | None:
    depth = 0
    try:
        # Events first: they are read without recursion and without expanding aliases.
        for event in yaml.parse(text, Loader=_LOADER):
            line = (event.start_mark.line if event.start_mark is not None else 0) + 1
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                problems.add(line, "anchors and aliases (& and *) are not allowed")
                return None
            if isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None):
                problems.add(line, f"tags are not allowed, found {getattr(event, 'tag', '')!r}")
                return None
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                problems.add(line, f"nesting is deeper than {MAX_DEPTH}")
                return None
        node: Node | None = yaml.compose(text, Loader=_LOADER)
        return node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        lines = text.splitlines()
        # Of what is never closed, the end of the file is found wrong.
        while line > 1 and not "".join(lines[line - 1 : line]).strip():
            line -= 1
        found = lines[line - 1] if lines else ""
        tab = "\t" in found[: len(found) - len(found.lstrip())]
        hint = "indent with spaces, not with tabs." if tab else ""
        problems.add(line, f"{error.problem or error.context} in {found.strip()!r}", hint)
    except yaml.YAMLError as error:
        problems.add(1, f"it is no YAML: {' '.join(str(error).split())}")
    return None


class _Wrong(Exception):
    """A value is wrong; the text completes 'field ...'."""


class _Reader:
    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def read(self, root: Node) -> tuple[tuple[Host, ...], tuple[Link, ...]]:
        fields = self._mapping(root, "the file", _TOP)
        if fields is None:
            return (), ()
        if "hosts" not in fields:
            self.problems.add(_line(root), "there is no field 'hosts'", "see docs/machines.md.")
            return (), ()
        ssh = self._ssh(fields["ssh"], "ssh", Ssh()) if "ssh" in fields else Ssh()
        base = dataclasses.replace(Host("", ssh=ssh), **self._given(fields, ""))
        entries = self._value(fields, "hosts", "hosts", _sequence) or []
        read = [self._host(entry, f"hosts[{at}]", base) for at, entry in enumerate(entries)]
        hosts = tuple(host for host in read if host is not None)
        known = {host.address for host in hosts}
        links = self._value(fields, "links", "links", _sequence) or []
        made = [self._link(entry, f"links[{at}]", known) for at, entry in enumerate(links)]
        return hosts, tuple(link for link in made if link is not None)

    def _host(self, node: Node, path: str, base: Host) -> Host | None:
        line = _line(node)
        if isinstance(node, ScalarNode):
            return dataclasses.replace(base, address=node.value, line=line)
        fields = self._mapping(node, path, _HOST)
        if fields is None:
            return None
        if "address" not in fields:
            self.problems.add(line, f"{path} has no address")
            return None
        if "devices" in fields and "cpus" in fields:
            self.problems.add(
                _line(fields["cpus"]), f"{path} has both devices and cpus; a host uses one kind"
            )
        address = self._value(fields, "address", path, _address)
        if address is None:
            return None
        take = self._value
        read = Host(
            address,
            devices=take(fields, "devices", path, _devices),
            cpus=take(fields, "cpus", path, lambda n: _integer(n, 1, MAX_WORKERS)),
            ssh=self._ssh(fields["ssh"], f"{path}.ssh", base.ssh) if "ssh" in fields else base.ssh,
            chief=bool(take(fields, "chief", path, _boolean)),
            line=line,
        )
        usual = {name: getattr(base, name) for name in _MEASURED}
        return dataclasses.replace(read, **{**usual, **self._given(fields, path)})

    def _given(self, fields: dict[str, Node], path: str) -> dict[str, Any]:
        """What the fields say of speeds and memory; what is wrong is as if it were absent."""
        read = {
            name: self._value(fields, name, path or name, _quantity(name))
            for name in fields
            if name in _MEASURED
        }
        return {name: value for name, value in read.items() if value is not None}

    def _ssh(self, node: Node, path: str, base: Ssh) -> Ssh:
        fields = self._mapping(node, path, _SSH)
        if fields is None:
            return base
        readers: dict[str, Callable[[Node], Any]] = {
            "user": _user,
            "port": lambda n: _integer(n, 1, 65535),
            "key": _text,
            "options": _options,
            "python": _text,
            "directory": _absolute,
            "environment": self._environment,
        }
        found = {name: self._value(fields, name, path, readers[name]) for name in fields}
        given = {name: value for name, value in found.items() if value is not None}
        if "environment" in given:
            given["environment"] = tuple({**dict(base.environment), **given["environment"]}.items())
        return dataclasses.replace(base, **given)

    def _environment(self, node: Node) -> dict[str, str]:
        if not isinstance(node, MappingNode):
            raise _Wrong(f"must be a mapping of names to texts, found {_shown(node)}")
        found: dict[str, str] = {}
        for key, value in node.value:
            name = _text(key)
            if not _VARIABLE.fullmatch(name):
                raise _Wrong(f"has {name!r}, which is no name of a variable")
            if name in found:
                raise _Wrong(f"sets {name} twice")
            if not isinstance(value, ScalarNode):
                raise _Wrong(f"sets {name} to {_shown(value)}; a text is needed")
            found[name] = value.value
        return found

    def _link(self, node: Node, path: str, known: set[str]) -> Link | None:
        fields = self._mapping(node, path, _LINK)
        if fields is None:
            return None
        between = self._value(fields, "between", path, _pair)
        if between is None:
            if "between" not in fields:
                self.problems.add(_line(node), f"{path} has no field 'between'")
            return None
        for address in between:
            if address not in known:
                self.problems.add(
                    _line(fields["between"]), f"{path} names {address!r}, which is no host"
                )
        return Link(
            between,
            self._value(fields, "bandwidth", path, _quantity("bandwidth")),
            self._value(fields, "latency", path, _quantity("latency")),
        )

    def _mapping(self, node: Node, path: str, known: tuple[str, ...]) -> dict[str, Node] | None:
        if not isinstance(node, MappingNode):
            self.problems.add(
                _line(node),
                f"{path} must be a mapping with {', '.join(known)}, found {_shown(node)}",
            )
            return None
        found: dict[str, Node] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value) if isinstance(key, ScalarNode) else _shown(key)
            line = _line(key)
            if name in lines:
                self.problems.add(line, f"{path} has {name!r} twice, first on line {lines[name]}")
            elif name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
                guess = f" (did you mean {near[0]!r}?)" if near else ""
                self.problems.add(
                    line, f"{path} has no field {name!r}{guess}; it has {', '.join(known)}"
                )
            else:
                found[name] = value
            lines.setdefault(name, line)
        return found

    def _value(
        self, fields: dict[str, Node], name: str, path: str, read: Callable[[Node], _Value]
    ) -> _Value | None:
        """The field's value, or None if it is absent or wrong."""
        if name not in fields:
            return None
        try:
            return read(fields[name])
        except _Wrong as wrong:
            where = name if path == name else f"{path}.{name}"
            self.problems.add(_line(fields[name]), f"{where} {wrong}")
            return None


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _shown(node: Node) -> str:
    if isinstance(node, ScalarNode):
        return repr(node.value) if node.value else "nothing"
    return "a list" if isinstance(node, SequenceNode) else "a mapping"


def _text(node: Node) -> str:
    if not isinstance(node, ScalarNode) or not node.value.strip():
        raise _Wrong(f"must be a text, found {_shown(node)}")
    if any(ord(c) < 32 for c in node.value):
        raise _Wrong(f"must be one line without control characters, found {node.value!r}")
    return str(node.value)


def _address(node: Node) -> str:
    text = _text(node)
    text = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    problem = address_problem(text)
    if problem is not None:
        raise _Wrong(f"is wrong: {problem}")
    return text


def _user(node: Node) -> str:
    text = _text(node)
    if not _USER.fullmatch(text):
        raise _Wrong(f"must be the name of an account, found {text!r}")
    return text


def _absolute(node: Node) -> str:
    text = _text(node)
    if not text.startswith("/"):
        raise _Wrong(f"must be an absolute path, found {text!r}")
    return text


def _options(node: Node) -> tuple[str, ...]:
    found = tuple(_text(entry) for entry in _sequence(node))
    for option in found:
        if (problem := option_problem(option)) is not None:
            raise _Wrong(problem)
    return found


def _sequence(node: Node) -> list[Node]:
    if not isinstance(node, SequenceNode):
        raise _Wrong(f"must be a list, found {_shown(node)}")
    return list(node.value)


def _integer(node: Node, low: int, high: int) -> int:
    text = node.value if isinstance(node, ScalarNode) else None
    if text is None or not re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text):
        raise _Wrong(f"must be an integer from {low} to {high}, found {_shown(node)}")
    if not low <= int(text) <= high:
        raise _Wrong(f"must be from {low} to {high}, found {text}")
    return int(text)


def _devices(node: Node) -> tuple[int, ...]:
    if not isinstance(node, SequenceNode):
        raise _Wrong(
            f"must be a list of numbers such as [0, 1], found {_shown(node)}; leave it out for all"
            " devices of the host"
        )
    return tuple(_integer(entry, -(10**6), 10**6) for entry in node.value)


def _boolean(node: Node) -> bool:
    text = node.value if isinstance(node, ScalarNode) else None
    if text not in ("true", "false"):
        raise _Wrong(f"must be true or false, found {_shown(node)}")
    return bool(text == "true")


def _pair(node: Node) -> tuple[str, str]:
    entries = _sequence(node)
    if len(entries) != 2:
        raise _Wrong(f"must name two hosts, found {len(entries)}")
    one, other = (_address(entry) for entry in entries)
    if one == other:
        raise _Wrong(f"names {one!r} twice")
    return one, other


def _quantity(name: str) -> Callable[[Node], Any]:
    """Reads a field that has a unit."""

    def read(node: Node) -> Any:
        try:
            return _MEASURED[name][0](_text(node))
        except ValueError as error:
            raise _Wrong(str(error)) from error

    return read
