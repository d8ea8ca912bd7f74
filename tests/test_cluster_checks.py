"""What is found before anything is started on several hosts (RELIABILITY.md 13-36)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clusters import PROLOGUE, Site, make_cluster

from benchmarks.virtual_cluster import VirtualCluster

OTHER = "{address: vhost1, cpus: 1}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    yield from make_cluster()


@pytest.fixture
def site(cluster: VirtualCluster, tmp_path: Path) -> Iterator[Site]:
    made = Site(cluster, tmp_path)
    yield made
    made.close()


def test_hosts_that_are_ready(site: Site) -> None:
    (site.directory / "train.py").write_text("import helper\n")
    (site.directory / "helper.py").write_text("")
    run = site.check("train.py")
    assert run.end() == 0, run.text()
    for host, workers in (("vhost1", "1 worker"), ("vhost2", "2 workers")):
        run.wait_for(rf"^parallax: {host}: Python 3\..*, torch .* GB free, {workers}")
    assert run.err[-1] == "parallax: all 2 hosts are ready"
    run.assert_nothing_left()


def test_a_check_from_a_machine_that_is_none_of_the_hosts(site: Site) -> None:
    site.hosts("vhost2")
    run = site.check()
    assert run.end() == 0, run.text()
    assert run.err[-1] == "parallax: the host is ready"


def refused(site: Site) -> None:
    site.cluster.stop_sshd("vhost2")


def cut(site: Site) -> None:
    site.cluster.cut("vhost2")


def wrong_key(site: Site) -> None:
    key = site.directory / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    site.hide("vhost2", site.cluster.directory / "authorized_keys", f"{key}.pub")


def unknown_host_key(site: Site) -> None:
    site.hosts(OTHER, "{address: vhost2, ssh: {options: [UserKnownHostsFile=/dev/null]}}")


def changed_host_key(site: Site) -> None:
    known = (site.cluster.directory / "known_hosts").read_text().splitlines()
    keys = [line.split(maxsplit=1) for line in known]
    swapped = f"{keys[1][0]} {keys[0][1]}\n"
    (site.directory / "known").write_text(swapped)
    option = f"UserKnownHostsFile={site.directory / 'known'}"
    site.hosts(OTHER, f"{{address: vhost2, ssh: {{options: [{option}]}}}}")


def open_key(site: Site) -> None:
    key = site.directory / "key"
    shutil.copy(site.cluster.directory / "user_key", key)
    key.chmod(0o644)
    site.hide("vhost1", site.cluster.directory / "user_key", key)


def no_name(site: Site) -> None:
    site.hosts(OTHER, "no-such-host.invalid")


def no_python(site: Site) -> None:
    site.hosts(OTHER, "{address: vhost2, cpus: 1, ssh: {python: /no/such/python}}")


def bare_python(site: Site) -> None:
    shutil.copytree(Path(sys.base_prefix) / "bin", site.directory / "bin", symlinks=True)
    wrapper = site.directory / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {Path(sys.executable).resolve()} -S "$@"\n')
    wrapper.chmod(0o755)
    site.hosts(OTHER, f"{{address: vhost2, cpus: 1, ssh: {{python: {wrapper}}}}}")


def other_torch(site: Site) -> None:
    info = site.directory / "other" / "torch-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    wrapper = site.directory / "python"
    path = f"PYTHONPATH={info.parent}"
    wrapper.write_text(f'#!/bin/sh\n{path} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    site.hosts(OTHER, f"{{address: vhost2, cpus: 1, ssh: {{python: {wrapper}}}}}")


def other_code(site: Site) -> None:
    (site.directory / "other.py").write_text("rate = 2\n")
    site.hide("vhost2", site.directory / "helper.py", site.directory / "other.py")


def no_code(site: Site) -> None:
    (site.directory / "empty").mkdir()
    (site.directory / "there").mkdir()
    (site.directory / "train.py").write_text("import there.deep\n")
    (site.directory / "there" / "deep.py").write_text("")
    site.hide("vhost2", site.directory / "there", site.directory / "empty")


def no_directory(site: Site) -> None:
    site.hosts(OTHER, "{address: vhost2, cpus: 1, ssh: {directory: /no/such/directory}}")


def code_elsewhere(site: Site) -> None:
    (site.directory / "copy").mkdir()
    (site.directory / "copy" / "train.py").write_text("import helper\n")
    directory = site.directory / "copy"
    site.hosts(OTHER, f"{{address: vhost2, cpus: 1, ssh: {{directory: {directory}}}}}")


def no_devices(site: Site) -> None:
    site.hosts("{address: vhost1, devices: [0]}", "{address: vhost2, devices: [0, 5]}")


def same_machine(site: Site) -> None:
    site.hosts("{address: vhost2}", f"{{address: {site.cluster.hosts[1].address}}}")


def interface(site: Site) -> None:
    variable = "{GLOO_SOCKET_IFNAME: eth7}"
    site.hosts(OTHER, f"{{address: vhost2, ssh: {{environment: {variable}}}}}")


PROBLEMS: dict[str, tuple[Callable[[Site], None], tuple[str, ...]]] = {
    "refused": (refused, ("vhost2 refused the connection: no sshd", "start sshd there")),
    "cut": (cut, ("vhost2 ", "is unreachable|did not answer in time", "ssh vhost2 true")),
    "wrong key": (wrong_key, ("vhost2 denied permission to your account", "ssh-copy-id")),
    "unknown host key": (unknown_host_key, ("the host key of vhost2 is not known", "accept it")),
    "changed host key": (changed_host_key, ("host key of vhost2 has changed", "ssh-keygen -R")),
    "open key": (open_key, ("key for vhost2 can be read by others", "chmod 600")),
    "no name": (no_name, ("the name no-such-host.invalid does not resolve", "/etc/hosts")),
    "no python": (no_python, ("vhost2 has no Python at /no/such/python", "ssh: python")),
    "bare python": (bare_python, ("vhost2: its Python .* cannot import parallax", "pip install")),
    "other torch": (
        other_torch,
        ("vhost2 has other versions .*: torch 9.9 instead of 2", "9.9 <<<"),
    ),
    "other code": (other_code, ("vhost2 has different code: .*helper.py", "copy the same version")),
    "no code": (no_code, ("vhost2 has no .*there/deep.py", "same path on every host")),
    "no directory": (no_directory, ("vhost2 has no directory /no/such/directory", "same path")),
    "code elsewhere": (code_elsewhere, ("vhost2 has no [^ ]*/copy/helper.py[.]$", "same path")),
    "no devices": (no_devices, ("vhost2 has no CUDA devices, but 0, 5 was asked for", "cpus: N")),
    "same machine": (same_machine, ("and vhost2 are the same machine", "on one line")),
    "interface": (interface, ("vhost2 has no network interface 'eth7'", "it has .*eth0", "unset")),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_host_that_cannot_take_part(site: Site, name: str) -> None:
    prepare, patterns = PROBLEMS[name]
    (site.directory / "train.py").write_text("import helper\n")
    (site.directory / "helper.py").write_text("rate = 1\n")
    prepare(site)
    try:
        run = site.check("train.py")
        assert run.end() == 3, run.text()
        for pattern in patterns:
            run.wait_for(pattern)
        assert any(
            line.startswith("error: LaunchError: The hosts of hosts.yml") for line in run.err
        )
        assert not any("Traceback" in line for line in run.err)
        site.cluster.heal("vhost2")
        run.assert_nothing_left()
    finally:
        if prepare is refused:
            site.cluster.start_sshd("vhost2")


def test_all_problems_are_named_at_once(site: Site) -> None:
    key = "ssh: {python: /no/such/python}"
    site.hosts(OTHER, f"{{address: vhost2, cpus: 1, {key}}}", "nowhere.invalid")
    run = site.launch("start()\n")
    assert run.end() == 3, run.text()
    run.wait_for("cannot run this, for 2 reasons:")
    run.wait_for("  - vhost2 has no Python at /no/such/python")
    run.wait_for("  - the name nowhere.invalid does not resolve")
    run.assert_nothing_left()


def test_a_login_shell_that_prints(site: Site) -> None:
    if not (Path.home() / ".bashrc").exists():
        pytest.skip("there is no ~/.bashrc that could be hidden by another")
    noise = site.directory / "bashrc"
    noise.write_text("echo Welcome; echo $'\\x00\\x01'; printf 'no line end'\n")
    site.hide("vhost2", Path.home() / ".bashrc", noise)
    run = site.check()
    assert run.end() == 0, run.text()
    run.wait_for(r"^parallax: vhost2: Python .* \(it printed 'no line end' on login\)")
    noise.write_text("echo Go away; exit 1\n")
    run = site.check()
    assert run.end() == 3, run.text()
    run.wait_for(r"the agent on vhost2 ended with status 1 .*printed 'Go away' on login")


@pytest.mark.parametrize(
    ("entries", "sentences"),
    [
        (("a.invalid", "b.invalid"), ("which is not this one", "on one of the file's hosts")),
        (
            ("{address: vhost1}", "{address: vhost2, chief: true}"),
            ("hosts.yml:3: the chief is 'vhost2', and this machine is 'vhost1'", "on the chief"),
        ),
        (
            ("{address: vhost1}", "{address: vhost2, ssh: {key: /no/key}}"),
            ("hosts.yml:3: the key '/no/key' of 'vhost2' is no file", "correct `ssh: key`"),
        ),
    ],
)
def test_what_is_found_without_ssh(
    site: Site, entries: tuple[str, ...], sentences: tuple[str, ...]
) -> None:
    site.hosts(*entries)
    run = site.launch("try:\n    start()\nexcept LaunchError as error:\n    print(error)\n")
    assert run.end() == 0, run.text()
    assert [s for s in sentences if s not in run.text()] == []


def test_prologue_is_light() -> None:
    """The faults' tests start workers without torch, so that they take seconds."""
    code = PROLOGUE + "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
