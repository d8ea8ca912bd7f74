"""The virtual cluster: hosts that are apart, links of a rate, ssh, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import namespaces
from benchmarks.virtual_cluster import VirtualCluster, VirtualClusterError, missing_requirement

MISSING = missing_requirement()
needs_cluster = pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "benchmarks.virtual_cluster"]
MEGABYTE = 10**6

SEND = """
import socket, sys, time
with socket.create_server(("", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    begin = time.monotonic()
    connection.sendall(bytes(int(sys.argv[1])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # the other side has read it all
    print(time.monotonic() - begin)
"""
RECEIVE = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    while connection.recv(1 << 16):
        pass
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    if MISSING is not None:
        pytest.skip(str(MISSING))
    with VirtualCluster(2, "100mbit") as made:
        yield made


def output(cluster: VirtualCluster, host: str, *command: str) -> str:
    process = cluster.popen(host, command, stdout=subprocess.PIPE, text=True)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return text.strip()


def ssh(cluster: VirtualCluster, *command: str) -> subprocess.CompletedProcess[str]:
    # No terminal and no input: a question would fail.
    arguments = ["ssh", "-F", str(cluster.ssh_config), *command]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True}
    return subprocess.run(arguments, text=True, timeout=60, **pipes)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def traces(name: str) -> list[str]:
    """What there is of a cluster: namespaces, links, directory, processes."""
    found = [entry for entry in os.listdir("/run/netns") if entry.startswith(f"{name}-")]
    found += [link for link in os.listdir("/sys/class/net") if link == name]
    directory = namespaces.directory_of(name)
    lines = {
        entry: namespaces.command_line(int(entry))
        for entry in os.listdir("/proc")
        if entry.isdigit()
    }
    found += [line for line in lines.values() if str(directory) in line]
    return found + ([str(directory)] if directory.exists() else [])


def test_hosts_are_apart(cluster: VirtualCluster) -> None:
    first, second = cluster.hosts
    assert [first.name, second.name] == ["vhost1", "vhost2"]
    assert output(cluster, "vhost1", "hostname") == "vhost1"
    for host in cluster.hosts:
        addresses = output(cluster, host.name, "ip", "-br", "address")
        assert re.search(rf"^eth0\S* +UP +{host.address}/24 {host.address6}/64", addresses, re.M)
        assert re.search(r"^lo +\S+ +127.0.0.1/8", addresses, re.M)
        assert output(cluster, host.name, "ls", "/sys/class/net").split() == ["eth0", "lo"]
    output(cluster, "vhost1", "touch", "/dev/shm/mine", "/run/mine")
    assert "mine" not in output(cluster, "vhost2", "ls", "/dev/shm", "/run")
    assert not Path("/run/mine").exists()


def test_ssh_asks_nothing_from_here_and_among_hosts(cluster: VirtualCluster) -> None:
    done = ssh(cluster, "vhost2", "hostname")
    assert (done.stdout, done.stderr, done.returncode) == ("vhost2\n", "", 0)
    assert output(cluster, "vhost1", "ssh", "vhost2", "hostname") == "vhost2"
    address6 = cluster.host("vhost1").address6
    assert output(cluster, "vhost2", "ssh", address6, "hostname") == "vhost1"


def test_ssh_refuses_a_host_with_another_key(cluster: VirtualCluster) -> None:
    known = cluster.directory / "known_hosts"
    right = known.read_text()
    first, second = right.splitlines()
    key = second.split()[2]
    known.write_text(f"{first.rsplit(' ', 1)[0]} {key}\n{second}\n")
    try:
        done = ssh(cluster, "vhost1", "hostname")
    finally:
        known.write_text(right)
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


def test_links_have_the_rate_and_count_bytes(cluster: VirtualCluster) -> None:
    size = 8 * MEGABYTE
    before = {host: cluster.sent_bytes(host) for host in cluster.hosts}
    received = cluster.received_bytes("vhost2")
    command = [sys.executable, "-c", SEND, f"{size}"]
    sender = cluster.popen("vhost1", command, stdout=subprocess.PIPE, text=True)
    assert sender.stdout is not None
    port = sender.stdout.readline().strip()
    output(cluster, "vhost2", sys.executable, "-c", RECEIVE, cluster.hosts[0].address, port)
    seconds = float(sender.communicate(timeout=60)[0])
    # Two filters may let a burst of 128 KiB each pass at once, and no more.
    assert seconds > (size - 2 * 131_072) * 8 / 100e6
    sent = {host.name: cluster.sent_bytes(host) - before[host] for host in cluster.hosts}
    assert size < sent["vhost1"] < 1.1 * size
    assert sent["vhost2"] < 0.1 * size
    assert size < cluster.received_bytes("vhost2") - received < 1.1 * size


def test_a_cut_link_carries_nothing_until_it_heals(cluster: VirtualCluster) -> None:
    cluster.cut("vhost2")
    try:
        done = ssh(cluster, "-o", "ConnectTimeout=1", "vhost2", "hostname")
        assert done.returncode == 255
        assert "Connection timed out" in done.stderr or "No route to host" in done.stderr
        # The host itself runs on.
        assert output(cluster, "vhost2", "hostname") == "vhost2"
    finally:
        cluster.heal("vhost2")
    assert ssh(cluster, "vhost2", "hostname").stdout == "vhost2\n"


def test_sshd_stops_and_starts(cluster: VirtualCluster) -> None:
    cluster.stop_sshd("vhost1")
    try:
        assert "Connection refused" in ssh(cluster, "vhost1", "hostname").stderr
    finally:
        cluster.start_sshd("vhost1")
    assert ssh(cluster, "vhost1", "hostname").stdout == "vhost1\n"


def test_a_host_that_is_killed_has_no_processes(cluster: VirtualCluster) -> None:
    sleeper = cluster.popen("vhost1", ["sleep", "600"])
    # Beside it may be what is left of a session of ssh.
    assert cluster.processes("vhost1")[sleeper.pid] == "sleep 600"
    assert sleeper.pid not in cluster.processes("vhost2")
    cluster.kill("vhost1")
    assert sleeper.wait(60) == -signal.SIGKILL
    assert cluster.processes("vhost1") == {}
    cluster.start_sshd("vhost1")
    assert ssh(cluster, "vhost1", "hostname").stdout == "vhost1\n"


def test_a_signal_reaches_the_command_itself(cluster: VirtualCluster) -> None:
    program = "trap 'echo caught; exit 3' TERM; echo ready; while :; do read line; done"
    process = cluster.popen(
        "vhost1", ["sh", "-c", program], {"A": "b"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.terminate()
    assert process.communicate(timeout=60)[0] == b"caught\n"
    assert process.returncode == 3


def test_an_unknown_host_is_refused(cluster: VirtualCluster) -> None:
    with pytest.raises(VirtualClusterError) as raised:
        cluster.popen("vhost3", ["true"])
    assert str(raised.value) == (
        "there is no host 'vhost3'\n  What to do: choose one of vhost1, vhost2"
    )


@needs_cluster
def test_two_clusters_at_once_and_nothing_stays() -> None:
    with VirtualCluster(1) as one, VirtualCluster(1) as two:
        assert one.network != two.network
        assert ssh(one, "vhost1", "hostname").stdout == "vhost1\n"
        assert ssh(two, "vhost1", "hostname").stdout == "vhost1\n"
        sleeper = two.popen("vhost1", ["sh", "-c", "trap '' TERM HUP; sleep 600 & wait"])
        assert namespaces.clusters().items() >= {one.name: True, two.name: True}.items()
    assert sleeper.poll() == -signal.SIGKILL
    assert traces(one.name) == traces(two.name) == []
    two.close()  # once more does no harm


HELD = """
import signal, sys
from benchmarks.virtual_cluster import VirtualCluster
with VirtualCluster(2) as cluster:
    cluster.popen("vhost1", ["setsid", "sleep", "600"])
    print(cluster.name, cluster._sweeper.pid, flush=True)
    signal.pause()
"""


@needs_cluster
@pytest.mark.parametrize("sweeper", ["lives", "is killed too"])
def test_nothing_stays_when_the_owner_is_killed(sweeper: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert owner.stdout is not None
    name, pid = owner.stdout.readline().split()
    assert len(traces(name)) > 4
    if sweeper == "is killed too":
        os.killpg(int(pid), signal.SIGKILL)
    owner.kill()
    owner.wait(60)
    if sweeper == "is killed too":
        assert len(traces(name)) > 4
        done = subprocess.run([*COMMAND, "down"], capture_output=True, text=True, cwd=ROOT)
        assert f"removed {name}\n" in done.stdout
        assert traces(name) == []
    wait_until(lambda: traces(name) == [])
    owner.stdout.close()


@needs_cluster
def test_run_is_on_every_host_and_gives_the_worst_exit_status() -> None:
    command = 'echo "$HOST_INDEX of $HOST_COUNT on $(hostname)"; exit $HOST_INDEX'
    run = [*COMMAND, "run", "--hosts", "3", "--rate", "1gbit", "--", "sh", "-c", command]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert sorted(done.stdout.splitlines()) == [
        "[vhost1] 0 of 3 on vhost1",
        "[vhost2] 1 of 3 on vhost2",
        "[vhost3] 2 of 3 on vhost3",
    ]
    assert done.returncode == 2


@needs_cluster
def test_up_stays_until_down_which_leaves_others_alone() -> None:
    with VirtualCluster(1) as other:
        up = [*COMMAND, "up", "--hosts", "2"]
        done = subprocess.run(up, capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert done.returncode == 0
        *hosts, last = done.stdout.splitlines()
        assert [line.split()[0] for line in hosts] == ["vhost1", "vhost2"]
        config = last.split()[2]
        name = Path(config).parent.name.removeprefix("parallax-cluster-")
        try:
            answer = subprocess.run([*last.split(), "hostname"], capture_output=True, text=True)
            assert answer.stdout == "vhost1\n"
        finally:
            done = subprocess.run([*COMMAND, "down"], capture_output=True, text=True, cwd=ROOT)
        assert f"removed {name}\n" in done.stdout
        assert other.name not in done.stdout
        assert traces(name) == []
        assert ssh(other, "vhost1", "hostname").stdout == "vhost1\n"


@pytest.mark.parametrize(
    ("hosts", "rate", "message"),
    [
        (0, None, "hosts is 0\n  What to do: ask for 1 to 200 hosts: they share one /24"),
        (
            2,
            "fast",
            "'fast' is no rate\n  What to do: write a number and its unit, such as"
            ' "1gbit" or "100mbit"',
        ),
        (
            2,
            "0mbit",
            "'0mbit' is no rate\n  What to do: write a number and its unit, such as"
            ' "1gbit" or "100mbit"',
        ),
    ],
)
def test_what_makes_no_sense_is_refused(hosts: int, rate: str | None, message: str) -> None:
    with pytest.raises(VirtualClusterError) as raised:
        VirtualCluster(hosts, rate)
    assert str(raised.value) == message


@needs_cluster
def test_hosts_without_sshd_run_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    which = namespaces.which
    absent = ("ssh", "sshd", "ssh-keygen")
    monkeypatch.setattr(namespaces, "which", lambda p: None if p in absent else which(p))
    with VirtualCluster(2, "100mbit", sshd=False) as cluster:
        assert output(cluster, "vhost2", "hostname") == "vhost2"
        assert "vhost1" in output(cluster, "vhost2", "getent", "hosts", "vhost1")
        assert cluster.processes("vhost1") == {}
        name = cluster.name
    assert traces(name) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as the message for others comes first")
def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ip", "tc", "unshare", "nsenter", "ssh", "ssh-keygen"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(namespaces, "ADMINISTRATION", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VirtualClusterError) as raised:
        VirtualCluster(2)
    assert str(raised.value) == (
        "a virtual cluster needs sshd\n  What to do: apt-get install openssh-server"
    )


def test_rates_are_read() -> None:
    assert namespaces.rate_bits("1gbit") == 10**9
    assert namespaces.rate_bits("1.5mbit") == 1_500_000
