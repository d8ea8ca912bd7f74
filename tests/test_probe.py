"""``parallax probe``: what it measures, and the resource file that it writes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import worlds
from clusters import Site, make_cluster
from test_cli import start

from benchmarks.virtual_cluster import VirtualCluster
from parallax import cli
from parallax.cluster.probed import HostFound, PairFound, ProbeFound, with_measured
from parallax.cluster.resources import read_resources
from parallax.cluster.spec import ClusterSpec, Host, Link, Ssh
from parallax.runtime.comm.world import single
from parallax.runtime.probe_hosts import MAX_ROUNDS, measure_hosts, rounds_of

LINK = 100e6 / 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    yield from make_cluster("100mbit")


@pytest.fixture
def site(cluster: VirtualCluster, tmp_path: Path) -> Iterator[Site]:
    made = Site(cluster, tmp_path)
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_shaped_link(site: Site, workers: int) -> None:
    site.hosts(f"{{address: vhost2, cpus: {workers}}}", f"{{address: vhost1, cpus: {workers}}}")
    probe = [sys.executable, "-m", "parallax", "probe", "--resource-info", "hosts.yml"]
    run = site.run(*probe, "-o", "measured.yml")
    assert run.end() == 0, run.text()
    assert run.out == []
    run.wait_for(rf"^\[vhost1 worker 0\] {workers} on the CPU; memory .* free, \d+")
    run.wait_for(rf"^\[vhost2 worker {workers}\] to vhost1: \d+\.?\d* Mbit/s, \d+")
    run.wait_for("parallax: written to measured.yml")
    spec = read_resources(site.directory / "measured.yml")
    # The same hosts in the same order, with what is needed to reach them.
    assert [host.address for host in spec.hosts] == ["vhost2", "vhost1"]
    assert all(host.ssh.environment for host in spec.hosts)
    for host in spec.hosts:
        assert host.cpus == workers
        assert host.bandwidth == pytest.approx(LINK, rel=0.15)
        assert host.latency is not None
        assert host.memory_bandwidth is not None
        assert host.memory_bandwidth > LINK
        assert host.free_memory is not None
        assert (host.inside_bandwidth is None) == (workers == 1)
    run.assert_nothing_left()
    names = {path.name for path in site.directory.iterdir()}
    assert names == {"hosts.yml", "measured.yml", "tmp"}


@pytest.mark.long
def test_a_host_that_cannot_take_part(site: Site) -> None:
    site.hosts("{address: vhost1, cpus: 1}", "{address: vhost2, cpus: 1}")
    site.cluster.stop_sshd("vhost2")
    try:
        probe = [sys.executable, "-m", "parallax", "probe", "--resource-info", "hosts.yml"]
        run = site.run(*probe, "-o", "measured.yml")
        assert run.end() == 3, run.text()
        assert "LaunchError: The hosts of hosts.yml cannot run this: vhost2" in run.text()
    finally:
        site.cluster.start_sshd("vhost2")
    run.assert_nothing_left()
    assert {path.name for path in site.directory.iterdir()} == {"hosts.yml", "tmp"}


@pytest.mark.long
def test_this_machine_as_a_new_user(tmp_path: Path) -> None:
    done = start(tmp_path, "probe")
    assert done.returncode == 0, done.stderr
    assert "[localhost worker 0] 2 on the CPU; memory " in done.stderr
    assert done.stdout.startswith("# Measured by parallax probe, 20")
    (tmp_path / "here.yml").write_text(done.stdout)
    (host,) = read_resources(tmp_path / "here.yml").hosts
    assert (host.address, host.cpus, host.bandwidth) == ("localhost", 2, None)
    assert host.inside_bandwidth is not None
    assert host.inside_latency is not None
    assert host.inside_bandwidth > 1e8
    # Nothing but the name is needed to measure again.
    again = start(tmp_path, "probe", "--resource-info", "here.yml", "-o", "here.yml")
    assert (again.returncode, again.stdout) == (0, ""), again.stderr
    (repeated,) = read_resources(tmp_path / "here.yml").hosts
    assert repeated.cpus == 2
    assert [path.name for path in tmp_path.iterdir()] == ["here.yml"]


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--resource-info", "absent"], 2, "ConfigError: resource_info 'absent' is no file"),
        (["-o", "absent/x.yml"], 2, "ConfigError: 'absent/x.yml' cannot be written: No such file"),
        (["-o", "."], 2, "ConfigError: '.' cannot be written: Is a directory."),
        (["--resource-info", "others"], 3, "LaunchError: others names the machine '10.255.255.1'"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    status: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in worlds.NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "others").write_text("10.255.255.1: cpus=1\n")
    assert cli.main(["probe", *arguments]) == status
    said = capsys.readouterr().err
    assert sentence in said
    assert "What to do: " in said
    assert [path.name for path in tmp_path.iterdir()] == ["others"]


def test_a_worker_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.main(["probe"]) == 3
    assert "LaunchError: This process is already a worker" in capsys.readouterr().err


def test_one_worker_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = measure_hosts(single(torch.device("cpu")), ["here"])
    (host,) = found.hosts
    assert (host.workers, host.cuda, host.inside_bandwidth) == (1, None, None)
    assert found.pairs == []
    assert host.memory_bandwidth > 1e8
    assert "1 on the CPU; memory " in capsys.readouterr().err


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 7, 8, 30, 1000])
def test_rounds(hosts: int) -> None:
    rounds = rounds_of(hosts)
    pairs = list(itertools.chain.from_iterable(rounds))
    assert len(set(pairs)) == len(pairs)
    assert all(one < other for one, other in pairs)
    for pairing in rounds:
        met = list(itertools.chain.from_iterable(pairing))
        assert len(set(met)) == len(met) >= hosts - 1
    if hosts <= MAX_ROUNDS:
        assert len(pairs) == hosts * (hosts - 1) // 2
    else:
        assert len(rounds) == MAX_ROUNDS


def test_the_file_of_what_was_measured() -> None:
    spec = ClusterSpec(
        (Host("a", chief=True, ssh=Ssh(user="me")), Host("b", (4,)), Host("c", cpus=1)),
        (Link(("a", "b"), 1.0), Link(("a", "d"), 2.0)),
    )
    found = ProbeFound(
        # In the order of workers: the chief's host, which is here the file's third, comes first.
        [
            HostFound(1, None, 5000, 1.2345e10),
            HostFound(2, "GPU", 6000, 2e10, device_memory=700, inside_bandwidth=3e9),
            HostFound(1, "GPU", 0, 2e10),
        ],
        [
            PairFound((0, 1), 1.0001e8, 1e-4),
            PairFound((0, 2), 1e7, 2e-3),
            PairFound((1, 2), 9e7, 1.1e-4),
        ],
    )
    measured = with_measured(spec, [2, 0, 1], found)
    assert measured.hosts == (
        Host(
            "a",
            (0, 1),
            chief=True,
            ssh=Ssh(user="me"),
            bandwidth=1e8,
            latency=1e-4,
            memory_bandwidth=2e10,
            inside_bandwidth=3e9,
            free_memory=6000,
            device_memory=700,
        ),
        Host("b", (4,), bandwidth=9e7, latency=1.1e-4, memory_bandwidth=2e10),
        Host(
            "c",
            cpus=1,
            bandwidth=1e8,
            latency=1e-4,
            memory_bandwidth=1.23e10,
            free_memory=5000,
        ),
    )
    # The pair that is slower than its hosts' links; and what was not measured stays.
    assert measured.links == (Link(("a", "d"), 2.0), Link(("c", "b"), 1e7, 2e-3))
