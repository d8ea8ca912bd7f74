"""Resource files: what they mean, and what each wrong one is answered (RELIABILITY.md 1-22)."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from errors_help import raised
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.cluster.addresses import is_this_machine
from parallax.cluster.begin import begin
from parallax.cluster.local_workers import local_host, pin_devices, workers_here
from parallax.cluster.resource_yaml import to_yaml
from parallax.cluster.resources import read_resources
from parallax.cluster.spec import ClusterSpec, Host, Link, Ssh
from parallax.cluster.units import (
    format_bandwidth,
    format_bytes,
    format_time,
    parse_bandwidth,
    parse_bytes,
    parse_time,
)
from parallax.errors import ConfigError, LaunchError


def read(directory: Path, text: str | bytes, name: str = "hosts") -> ClusterSpec:
    path = directory / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_resources(path)


# -- What files mean ------------------------------------------------------------------------------

TEXTS: dict[str, tuple[str, tuple[Host, ...]]] = {
    "guide": (
        "10.0.0.4: 0,1,2\n10.0.0.5:1,3,4\n",
        (Host("10.0.0.4", (0, 1, 2)), Host("10.0.0.5", (1, 3, 4))),
    ),
    "no devices": ("host-a\nhost-b\n", (Host("host-a"), Host("host-b"))),
    "comments": ("\ufeff# all\r\n\r\nlocalhost: 0 , 1 # two\r\n", (Host("localhost", (0, 1)),)),
    "cpus": ("localhost: cpus=2\n\tb:\tcpus = 3\n", (Host("localhost", cpus=2), Host("b", cpus=3))),
    "ipv6": (
        "[::1]: 0\n[fe80::1%eth0]\nfe80::2\nfe80::3: 0, 1\n::1:0\n",
        (
            Host("::1", (0,)),
            Host("fe80::1%eth0"),
            Host("fe80::2"),
            Host("fe80::3", (0, 1)),
            Host("::1:0"),
        ),
    ),
    "mapped": ("[::ffff:10.0.0.4]:2", (Host("::ffff:10.0.0.4", (2,)),)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str, tmp_path: Path) -> None:
    text, hosts = TEXTS[name]
    assert read(tmp_path, text).hosts == hosts


YAML = """
ssh: {user: trainer, port: 2222, options: [ConnectTimeout=5]}
bandwidth: 1 Gbit/s
latency: 0.1 ms
hosts:
- 10.0.0.4
- address: node-5
  devices: [0, 2]
  chief: true
  bandwidth: 10 Gbit/s
  memory_bandwidth: 20 GB/s
  ssh:
    user: other
    key: ~/.ssh/training
    python: /opt/py/bin/python
    directory: /data/run 1
    environment: {A: no, B: '012', C: "x: $(y)"}
- address: "[fe80::6]"
links:
- between: [10.0.0.4, "fe80::6"]
  latency: 2 ms
"""


def test_yaml(tmp_path: Path) -> None:
    spec = read(tmp_path, YAML, "hosts.yml")
    base = Ssh(user="trainer", port=2222, options=("ConnectTimeout=5",))
    own = Ssh(
        user="other",
        port=2222,
        key="~/.ssh/training",
        options=("ConnectTimeout=5",),
        python="/opt/py/bin/python",
        directory="/data/run 1",
        environment=(("A", "no"), ("B", "012"), ("C", "x: $(y)")),
    )
    assert spec.hosts == (
        Host("10.0.0.4", ssh=base, bandwidth=1.25e8, latency=1e-4),
        Host(
            "node-5",
            (0, 2),
            ssh=own,
            bandwidth=1.25e9,
            latency=1e-4,
            memory_bandwidth=2e10,
            chief=True,
        ),
        Host("fe80::6", ssh=base, bandwidth=1.25e8, latency=1e-4),
    )
    assert [host.line for host in spec.hosts] == [6, 7, 18]
    assert spec.chief is spec.hosts[1]
    assert spec.links == (Link(("10.0.0.4", "fe80::6"), None, 2e-3),)
    assert spec.latency("fe80::6", "10.0.0.4") == 2e-3
    assert spec.latency("node-5", "10.0.0.4") == 1e-4
    assert spec.bandwidth("node-5", "10.0.0.4") == 1.25e8
    assert spec.uneven
    assert not read(tmp_path, "a: 0,1\nb: 2,3").uneven


def test_what_is_measured_is_read_and_written(tmp_path: Path) -> None:
    text = """
inside_bandwidth: 8 Gbit/s
inside_latency: 20 us
hosts:
- {address: a, free_memory: 16 GB, device_memory: 80 GiB, memory_bandwidth: 40 GB/s}
- {address: b, inside_bandwidth: 16 Gbit/s}
"""
    spec = read(tmp_path, text, "hosts.yml")
    a = {"free_memory": 16 * 10**9, "device_memory": 80 * 2**30, "memory_bandwidth": 4e10}
    assert spec.hosts == (
        Host("a", inside_bandwidth=1e9, inside_latency=2e-5, **a),  # type: ignore[arg-type]
        Host("b", inside_bandwidth=2e9, inside_latency=2e-5),
    )
    again = read(tmp_path, to_yaml(spec), "again.yml")
    assert again.hosts[1] == spec.hosts[1]
    assert again.hosts[0].device_memory == pytest.approx(80 * 2**30, rel=1e-5)


def test_yaml_is_known_by_its_content(tmp_path: Path) -> None:
    assert read(tmp_path, "# mine\nhosts: [a, {address: b}]\n").hosts == (Host("a"), Host("b"))


def test_yaml_written_is_read_as_the_same(tmp_path: Path) -> None:
    spec = read(tmp_path, YAML, "hosts.yml")
    again = read(tmp_path, to_yaml(spec), "again.yml")
    assert again == spec
    plain = read(tmp_path, "[::1]: 0,1\nb\nc: 3")
    assert read(tmp_path, to_yaml(plain), "again.yml") == plain


@given(st.floats(1.0, 1e15), st.floats(1e-9, 1e3))
def test_units_written_are_read(bandwidth: float, seconds: float) -> None:
    assert parse_bandwidth(format_bandwidth(bandwidth)) == pytest.approx(bandwidth, rel=1e-5)
    assert parse_time(format_time(seconds)) == pytest.approx(seconds, rel=1e-5)


def test_units() -> None:
    found = [parse_bandwidth(t) for t in ("8 bit/s", "1Gbit/s", "125 MB/s", "1 GiB/s", "1e2 kB/s")]
    assert found == [1.0, 1.25e8, 1.25e8, 2.0**30, 1e5]
    sizes = [parse_bytes(text) for text in ("8 B", "1.5 kB", "2GB", "1 GiB")]
    assert sizes == [8, 1500, 2 * 10**9, 2**30]
    assert [format_bytes(size) for size in sizes] == ["8 B", "1.5 kB", "2 GB", "1.07374 GB"]
    times = [parse_time(text) for text in ("1 s", "0.5 ms", "50us", "50 µs")]
    assert times == pytest.approx([1, 5e-4, 5e-5, 5e-5], rel=1e-12)


# -- What is wrong --------------------------------------------------------------------------------

WRONG_TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty": ("# nothing\n\n", ("lists no hosts", "'localhost: 0,1'")),
    "no devices": ("localhost:", (":1: 'localhost:' is not 'host: device", "for example")),
    "words": ("localhost: one", (":1: 'localhost: one' is not 'host: device",)),
    "range": ("a: 0-3", (":1: 'a: 0-3' is not 'host: device",)),
    "all": ("localhost: all", ("devices are numbers", "leave the devices out for all")),
    "negative": ("#\na: -1", (":2: the device -1 must be a number from 0 to 1023 (host a)",)),
    "large": ("a: 5000", (":1: the device 5000 must be a number from 0 to 1023",)),
    "twice": ("localhost: 0,1,0", (":1: the device 0 is named twice (host localhost)",)),
    "gap": ("localhost: 0,,1", ("is not 'host: device",)),
    "host twice": ("a: 0\nb: 0\nA.: 1", (":3:", "listed twice, first on line 1", "one line")),
    "ipv6 twice": ("fe80::1\n[fe80:0::1]: 0", (":2: the host 'fe80:0::1' is listed twice",)),
    "no space": ("fe80::1:0,1", ("is no host name and no IPv6 address", "for example")),
    "half bracket": ("[fe80::1: 0", ("is no host name and no IPv6 address",)),
    "cpus 0": ("a: cpus=0", (":1: cpus must be from 1 to 1024, found 0",)),
    "mixed kinds": (
        "a: cpus=2\nb: 0",
        (":1: 'a' computes on the CPU and 'b' on CUDA", "same kind"),
    ),
    "two problems": (
        "a: x\nb\n-c: 0",
        ("has 2 problems", ":1: 'a: x'", ":3: the host '-c' begins"),
    ),
    "zero byte": ("a\0b: 0", ("is no text: byte 1 is zero",)),
    "comma": ("a, b: 0", (":1: 'a, b' is no host name",)),
}
HOSTILE = {
    "-oProxyCommand=touch x": "begins with '-', which ssh would take for an option",
    "a;touch x": "is no host name",
    "$(touch x)": "is no host name",
    "`touch x`": "is no host name",
    "a b": "is no host name",
    "bob@a": "contains '@'; the user's name belongs under 'ssh: user'",
    "a" * 300: "is no host name",
    "10.0.0.256": "is no IPv4 address",
    "hоst": "is no host name",
    "a|b": "is no host name",
    ".": "is no host name",
}


@pytest.mark.parametrize("name", WRONG_TEXTS)
def test_a_wrong_text_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    text, fragments = WRONG_TEXTS[name]
    error = raised(lambda: read(tmp_path, text), ConfigError, str(tmp_path / "hosts"), *fragments)
    assert error.exit_code == 2


@pytest.mark.parametrize("host", HOSTILE)
def test_a_host_that_ssh_or_a_shell_would_misread(host: str, tmp_path: Path) -> None:
    raised(lambda: read(tmp_path, f"good: 0\n{host}: 0"), ConfigError, ":2: ", HOSTILE[host])
    text = f"hosts:\n- good\n- address: '{host}'\n"
    raised(lambda: read(tmp_path, text), ConfigError, ":3: hosts[1].address", HOSTILE[host])


WRONG_YAML: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty": ("", ("lists no hosts",)),
    "no hosts": ("bandwidth: 1 Gbit/s", (":1: there is no field 'hosts'", "docs/machines.md")),
    "empty list": ("hosts: []", ("lists no hosts",)),
    "null": ("hosts:", (":1: hosts must be a list, found nothing",)),
    "text": ("hosts: a,b", (":1: hosts must be a list, found 'a,b'",)),
    "list": ("- a", (":1: the file must be a mapping with hosts", "found a list")),
    "unknown": (
        "hosts:\n- address: a\n  device: [0]\n",
        (":3: hosts[0] has no field 'device' (did you mean 'devices'?); it has address",),
    ),
    "unknown top": ("host: [a]\nhosts: [a]", (":1: the file has no field 'host' (did you mean",)),
    "unknown ssh": (
        "hosts:\n- address: a\n  ssh: {usr: b}",
        (":3: hosts[0].ssh has no field 'usr' (did you mean 'user'?)",),
    ),
    "twice": (
        "hosts:\n- address: a\n  address: b",
        (":3: hosts[0] has 'address' twice, first on",),
    ),
    "syntax": ("hosts: [a, b", (":1:", "in 'hosts: [a, b'")),
    "tab": ("hosts:\n- address: a\n\tdevices: [0]", (":3:", "with spaces, not with tabs")),
    "tag": ("hosts: !!python/object/apply:os.system [x]", (":1: tags are not allowed",)),
    "alias": ("a: &x [1]\nhosts: *x", (":1: anchors and aliases", "not allowed")),
    "depth": ("hosts: " + "[" * 40, (":1: nesting is deeper than 32",)),
    # Newer releases of libyaml refuse this by a limit of their own.
    "far too deep": ("hosts: " + "[" * 100_000, (":1:", "nesting")),
    "no address": ("hosts:\n- devices: [0]", (":2: hosts[0] has no address",)),
    "devices all": (
        "hosts:\n- address: a\n  devices: all",
        (":3: hosts[0].devices must be a list",),
    ),
    "devices text": (
        "hosts:\n- address: a\n  devices: 0-3",
        ("found '0-3'; leave it out for all",),
    ),
    "device word": ("hosts:\n- address: a\n  devices: [x]", ("must be an integer", "found 'x'")),
    "octal": ("hosts:\n- address: a\n  devices: [012]", ("must be an integer", "found '012'")),
    "no devices": ("hosts:\n- address: a\n  devices: []", (":2: the list of devices is empty",)),
    "both": ("hosts:\n- address: a\n  devices: [0]\n  cpus: 2", (":4: hosts[0] has both devices",)),
    "cpus": ("hosts:\n- address: a\n  cpus: 0", (":3: hosts[0].cpus must be from 1 to 1024",)),
    "cpus huge": ("hosts:\n- address: a\n  cpus: 1" + "0" * 5000, ("must be an integer from 1",)),
    "chief": ("hosts:\n- address: a\n  chief: yes", (":3: hosts[0].chief must be true or false",)),
    "two chiefs": (
        "hosts:\n- {address: a, chief: true}\n- {address: b, chief: true}",
        (":3: 'b' is a second chief; the first is 'a' on line 2", "mark one"),
    ),
    "no unit": ("hosts: [a]\nbandwidth: 10", (":2: bandwidth has no unit: '10'", "'1 Gbit/s'")),
    "half unit": ("hosts: [a]\nbandwidth: 10G", ("has the unknown unit 'G'",)),
    "bps": ("hosts: [a]\nbandwidth: 10 Gbps", ("has the unknown unit 'Gbps'",)),
    "negative": ("hosts: [a]\nbandwidth: -1 Gbit/s", ("must be a positive number",)),
    "zero": ("hosts: [a]\nlatency: 0 ms", (":2: latency must be a positive number",)),
    "nan": ("hosts: [a]\nlatency: nan ms", ("must be a positive number", "'nan ms'")),
    "infinite": ("hosts: [a]\nlatency: .inf", ("must be a positive number",)),
    "port": ("hosts: [a]\nssh: {port: 70000}", (":2: ssh.port must be from 1 to 65535",)),
    "port trap": ("hosts: [a]\nssh: {port: 22:22}", ("ssh.port must be an integer",)),
    "port 0": ("hosts: [a]\nssh: {port: 0}", ("must be from 1 to 65535, found 0",)),
    "user": ("hosts: [a]\nssh: {user: -o}", (":2: ssh.user must be the name of an account",)),
    "directory": ("hosts: [a]\nssh: {directory: run}", ("must be an absolute path, found 'run'",)),
    "python": ("hosts: [a]\nssh: {python: [x]}", ("ssh.python must be a text, found a list",)),
    "lines": ('hosts: [a]\nssh: {python: "a\\nb"}', ("must be one line without control",)),
    "variable": ("hosts: [a]\nssh: {environment: {A-B: 1}}", ("'A-B', which is no name",)),
    "variables": ("hosts: [a]\nssh: {environment: [A]}", ("must be a mapping of names",)),
    "proxy": ("hosts: [a]\nssh: {options: [ProxyCommand=x]}", ("'ProxyCommand'", "~/.ssh/config")),
    "option": (
        "hosts: [a]\nssh: {options: [ConectTimeout=3]}",
        ("did you mean 'ConnectTimeout'?",),
    ),
    "option form": ("hosts: [a]\nssh: {options: [Port 3]}", ("must be of the form 'Name=value'",)),
    "option value": ("hosts: [a]\nssh: {options: ['Ciphers=$(x)']}", ("has the value '$(x)'",)),
    "no check": (
        "hosts: [a]\nssh: {options: [StrictHostKeyChecking=no]}",
        ("StrictHostKeyChecking=no: host keys are always checked",),
    ),
    "memory without a unit": (
        "hosts:\n- address: a\n  free_memory: 16",
        (":3: hosts[0].free_memory has no unit: '16'; write it as '16 GB' or '16 GiB'",),
    ),
    "speed inside": (
        "inside_bandwidth: fast\nhosts: [a]",
        (":1: inside_bandwidth must be a positive number with a unit such as '1 Gbit/s'",),
    ),
    "memory of all": ("free_memory: 16 GB\nhosts: [a]", (":1: the file has no field 'free_memor",)),
    "link": (
        "hosts: [a]\nlinks:\n- between: [a, b]",
        (":3: links[0] names 'b', which is no host",),
    ),
    "link of one": ("hosts: [a]\nlinks:\n- between: [a]", ("must name two hosts, found 1",)),
    "link to itself": ("hosts: [a]\nlinks: [{between: [a, a]}]", ("names 'a' twice",)),
    "link without": ("hosts: [a]\nlinks: [{latency: 1 ms}]", ("has no field 'between'",)),
}


@pytest.mark.parametrize("name", WRONG_YAML)
def test_a_wrong_yaml_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    text, fragments = WRONG_YAML[name]
    path = str(tmp_path / "hosts.yml")
    error = raised(lambda: read(tmp_path, text, "hosts.yml"), ConfigError, path, *fragments)
    assert len(str(error)) < 1500


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    text = "hosts:\n- {address: a, cpu: 2}\n- {address: -b}\nbandwidth: 3\n"
    error = raised(lambda: read(tmp_path, text, "h.yml"), ConfigError, "has 3 problems")
    assert [f"h.yml:{n}: " in str(error) for n in (2, 3, 4)] == [True] * 3


@settings(deadline=None)
@given(st.text(alphabet="ab-:.[]%0,# \n\t{}&*!\"'\\x", max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    directory = tmp_path_factory.getbasetemp()
    for name in ("any", "any.yml"):
        try:
            spec = read(directory, text, name)
        except ConfigError as error:
            assert str(directory / name) in error.problem  # noqa: PT017
        else:
            assert all(not host.address.startswith("-") for host in spec.hosts)


def test_a_resource_file_that_is_no_file(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path, tmp_path / "absent", fifo, Path("/dev/zero")):
        raised(lambda p=path: read_resources(p), ConfigError, str(path), "is no file")
    large = tmp_path / "large"
    large.write_text("#" * (1 << 20) + "\n")
    raised(lambda: read_resources(large), ConfigError, "is larger than 1048576 bytes")
    binary = tmp_path / "binary"
    binary.write_bytes(b"local\xff\xfehost: 0")
    raised(lambda: read_resources(binary), ConfigError, str(binary), "is no UTF-8 text")


# -- This machine ---------------------------------------------------------------------------------


def test_this_machine() -> None:
    own = [name for name in ("localhost", "127.0.0.1", "::1", socket.gethostname()) if name]
    assert [is_this_machine(name) for name in own] == [True] * len(own)
    assert not is_this_machine("198.51.100.1")  # of a block for documentation
    assert not is_this_machine("no-such-host.invalid")


def test_workers_of_this_machine(tmp_path: Path) -> None:
    assert workers_here(None, 3) in (3, *range(1, 65))
    assert workers_here(read(tmp_path, "localhost: 0,1,2").hosts[0], 7) == 3
    assert workers_here(read(tmp_path, "localhost: cpus=5").hosts[0], 7) == 5
    spec = read(tmp_path, "localhost: 0\n127.0.0.1: 1")
    raised(
        lambda: local_host(spec), LaunchError, ":2: '127.0.0.1' and 'localhost' (line 1) are both"
    )


def test_devices_of_this_machine() -> None:
    """A host with four CUDA devices, as far as variables go."""
    variables: dict[str, str] = {"CUDA_VISIBLE_DEVICES": "3"}
    assert not pin_devices(Host("a"), 4, variables)
    assert not pin_devices(Host("a", (0, 1)), 0, variables)
    assert variables == {"CUDA_VISIBLE_DEVICES": "3"}
    assert pin_devices(Host("a", (2,)), 4, variables)
    assert variables == {"CUDA_VISIBLE_DEVICES": "2"}
    assert pin_devices(Host("a", cpus=1), 4, variables)
    assert variables == {"CUDA_VISIBLE_DEVICES": ""}
    assert not pin_devices(Host("a", (0,)), 4, variables)
    assert variables == {"CUDA_VISIBLE_DEVICES": "0"}
    sentence = "a has devices 0 to 3, but 4, 7 was asked for."
    raised(
        lambda: pin_devices(Host("a", (0, 4, 7)), 4, variables), LaunchError, sentence, "cpus: N"
    )


def test_one_worker_needs_no_launch(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost: cpus=1")
    begin(tmp_path / "hosts", workers=2)


@pytest.mark.parametrize("text", ["far.example: 0,1", "198.51.100.1\n198.51.100.2"])
def test_this_machine_must_be_among_the_hosts(text: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    found: Any = raised(lambda: begin(tmp_path / "hosts", workers=2), LaunchError, "not this one")
    assert found.exit_code == 3
