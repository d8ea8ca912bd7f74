"""Parts of a run on several hosts that need no hosts: frames, commands, verdicts, files of code."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import ROOT

from parallax.cluster import wire
from parallax.cluster.agent_environment import travelling, worker_variables
from parallax.cluster.checks import find_problems, own_versions
from parallax.cluster.code_files import imported_files, module_files, script_files
from parallax.cluster.host_report import make_report
from parallax.cluster.spec import Host, Ssh
from parallax.cluster.ssh import agent_command, explain_end, ssh_command
from parallax.cluster.store_address import store_address
from parallax.cluster.verdict import Verdict
from parallax.errors import LaunchError

# -- Frames ---------------------------------------------------------------------------------------


def read_all(data: bytes) -> list[bytes]:
    async def read() -> list[bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        found = []
        while (body := await wire.read_frame(reader)) is not None:
            found.append(body)
        return found

    return asyncio.run(read())


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_output_arrives_as_it_was(pieces: list[bytes]) -> None:
    frames = b"".join(wire.frame(wire.Output(3, True, piece)) for piece in pieces)
    found = [wire.decode_from_agent(body) for body in read_all(frames)]
    assert found == [wire.Output(3, True, piece) for piece in pieces]
    assert [wire.decode_from_agent(body) for body in read_all(frames[:-1])] == found[:-1]


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    for decode in (wire.decode_from_agent, wire.decode_from_launcher):
        try:
            decode(data)
        except wire.WireError:
            continue
    try:
        read_all(data)
    except wire.WireError as error:
        assert "a message of" in str(error)  # noqa: PT017


def test_a_message_of_the_other_side_is_refused() -> None:
    with pytest.raises(wire.WireError, match="Invalid value 'Ended'"):
        wire.decode_from_launcher(wire.frame(wire.Ended(0, []))[4:])


# -- Commands -------------------------------------------------------------------------------------


def test_the_command_of_ssh() -> None:
    ssh = Ssh(user="bob", port=2222, key="~/k", options=("ConnectTimeout=3",))
    command = ssh_command(Host("node-5", ssh=ssh), "/opt/my python")
    assert command[:4] == ["ssh", "-T", "-o", "ConnectTimeout=3"]
    assert "BatchMode=yes" in command
    assert command[command.index("-l") + 1] == "bob"
    assert command[command.index("-p") + 1] == "2222"
    assert command[command.index("-i") + 1] == os.path.expanduser("~/k")
    assert command[-3:-1] == ["--", "node-5"]
    assert not any("StrictHostKeyChecking" in word for word in command)
    # What a login shell reads: one line in which only plain single quotes quote.
    assert shlex.split(command[-1])[:3] == ["exec", "/opt/my python", "-c"]
    program = agent_command("python")[2]
    assert not set(program) & set("'!\n\t")
    assert f"exec '/opt/my python' -c '{program}'" == command[-1]


def agent_says(order: dict[str, object], *options: str) -> wire.Trouble:
    """What the agent's program answers to an order that it cannot follow."""
    body = json.dumps(order).encode()
    program, *arguments = agent_command(sys.executable)
    said = subprocess.run(
        [program, *options, *arguments],
        input=wire.MAGIC + len(body).to_bytes(4, "big") + body,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert said.returncode == 3, said.stderr
    assert said.stdout.startswith(wire.MAGIC)
    [message] = read_all(said.stdout[len(wire.MAGIC) :])
    trouble = wire.decode_from_agent(message)
    assert isinstance(trouble, wire.Trouble)
    return trouble


def test_the_agents_program_says_what_is_missing() -> None:
    trouble = agent_says({"paths": ["/nowhere"]}, "-I", "-S")
    assert "cannot import parallax: No module named 'parallax'" in trouble.problem
    assert "pip install parallax" in trouble.hint


def test_an_agent_of_another_version() -> None:
    trouble = agent_says({"paths": [str(ROOT)], "new": 1})
    assert "does not understand the launcher's: Object missing required field" in trouble.problem
    assert "the same version of parallax" in trouble.hint


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("ssh: connect to host b port 22: Connection refused", "b refused the connection"),
        ("ssh: connect to host b port 22: No route to host", "b is unreachable"),
        ("ssh: connect to host b port 22: Connection timed out", "b did not answer in time"),
        ("bob@b: Permission denied (publickey).", "b denied permission to bob"),
        ("Host key verification failed.", "the host key of b is not known"),
        ("ssh: Could not resolve hostname b: Name or service not known", "the name b does not"),
        ("kex_exchange_identification: Connection closed by remote host", "b closed the conn"),
        ("something else", "ssh to b failed: something else"),
        ("", "ssh to b failed: ssh said nothing"),
    ],
)
def test_what_ssh_says_in_our_words(said: str, problem: str) -> None:
    host = Host("b", ssh=Ssh(user="bob", port=7))
    found, hint = explain_end(host, "/py", 255, said + "\n")
    assert found.startswith(problem)
    assert hint
    assert not [word for word in ("{attempt", "{host", "{user}") if word in found + hint]


# -- Who failed first -----------------------------------------------------------------------------


def ended(*ends: tuple[int, int, bool], signal: int = 0) -> wire.Ended:
    status = 1 if any(end[1] for end in ends) else 0
    return wire.Ended(status, [wire.WorkerEnded(*end) for end in ends], signal)


def test_who_lost_its_peer_is_not_the_cause() -> None:
    verdict = Verdict()
    verdict.host_ended("a", ended((0, 3, False), (1, -15, True)))
    assert not verdict.known
    verdict.host_ended("b", ended((2, -9, False)))
    assert verdict.known
    assert verdict.first is not None
    assert (verdict.first.rank, verdict.first.host, verdict.first.status) == (2, "b", 137)


def test_who_is_stopped_is_not_the_cause() -> None:
    verdict = Verdict()
    verdict.host_ended("a", ended((0, 3, False)))
    verdict.stopping = True
    verdict.host_ended("b", ended((1, 1, False), signal=15))
    verdict.host_lost("c", "c was lost", "")
    assert verdict.first is not None
    assert (verdict.first.rank, verdict.first.status) == (0, 3)


def test_a_host_that_is_lost_is_a_cause() -> None:
    verdict = Verdict()
    verdict.host_ended("a", ended((0, 3, False)))
    verdict.host_lost("b", "b was lost", "look")
    assert verdict.first is not None
    assert (verdict.first.text, verdict.first.status, verdict.first.hint) == (
        "b was lost",
        3,
        "look",
    )


def test_all_well() -> None:
    verdict = Verdict()
    verdict.host_ended("a", ended((0, 0, False)))
    assert verdict.first is None
    verdict.host_ended("b", wire.Ended(3, [], 0, "The workers cannot be started: no memory."))
    assert verdict.first is not None
    assert verdict.first.text == "b: The workers cannot be started: no memory"


# -- The user's code ------------------------------------------------------------------------------


def test_files_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "train.py": "import os, torch, model\nfrom lib import deep, name\nimport lib.two.far\n",
        "model.py": "import helper\nimport model\n",
        "helper.py": "def broken(:\n",
        "unused.py": "",
        "lib/__init__.py": "name = 1\n",
        "lib/deep.py": "from . import near\nfrom .two import far\nfrom .. import nothing\n",
        "lib/near.py": "",
        "lib/two/__init__.py": "",
        "lib/two/far.py": "",
        "lib/other.py": "",
        "more/extra.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [os.path.relpath(p, tmp_path) for p in script_files(str(tmp_path / "train.py"))]
    assert found == sorted(set(files) - {"unused.py", "lib/other.py", "more/extra.py"})
    monkeypatch.chdir(tmp_path)
    assert [os.path.relpath(p, tmp_path) for p in module_files("lib.two.far")] == [
        "lib/__init__.py",
        "lib/two/__init__.py",
        "lib/two/far.py",
    ]
    assert module_files("lib.two") == module_files("lib.absent") == module_files("absent") == []
    (tmp_path / "unused.py").write_text("import extra, parallax, pytest\n")
    found = script_files(str(tmp_path / "unused.py"), [str(tmp_path / "more")])
    assert [Path(path).name for path in found] == ["extra.py", "unused.py"]


def test_files_of_this_process() -> None:
    found = imported_files()
    assert __file__ in found
    assert not [path for path in found if "site-packages" in path or "/parallax/cluster/" in path]


# -- Reports and environment ----------------------------------------------------------------------


def order(**changes: object) -> wire.Order:
    values: dict[str, object] = {
        "host": "a",
        "run_id": "r",
        "paths": [],
        "directory": "/",
        "command": [],
        "environment": {},
        "devices": None,
        "cpus": 2,
        "default_workers": 1,
        "code": {},
    }
    return wire.Order(**{**values, **changes})  # type: ignore[arg-type]


def test_a_report_of_this_machine(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = 1\n")
    report = make_report(order(code={str(script): "", "/no/file": ""}))
    assert (report.workers, report.problems) == (2, [])
    assert report.free_memory > 0
    assert len(report.code[str(script)]) == 64
    assert (
        find_problems({"a": report}, own_versions(), {"a": {str(script): report.code[str(script)]}})
        == []
    )
    [problem] = find_problems({"a": report}, own_versions(), {"a": {"/no/file": "1"}})
    assert problem.problem == "a has no /no/file"


def test_what_travels() -> None:
    mine = {
        "OMP_NUM_THREADS": "1",
        "PARALLAX_LOG_LEVEL": "DEBUG",
        "PYTHONPATH": f"lib{os.pathsep}/abs",
        "PATH": "/bin",
        "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "x",
        "CUDA_VISIBLE_DEVICES": "3",
        "TORCHELASTIC_RUN_ID": "old",
        "PARALLAX_LAUNCHED": "7",
    }
    assert travelling(mine, "/work") == {
        "OMP_NUM_THREADS": "1",
        "PARALLAX_LOG_LEVEL": "DEBUG",
        "PYTHONPATH": f"/work/lib{os.pathsep}/abs",
    }


def test_variables_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "here")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = worker_variables(order(devices=[2, 0], cpus=None, environment={"A": "b"}), "eth7")
    assert (found["CUDA_VISIBLE_DEVICES"], found["A"], found["MINE"]) == ("2,0", "b", "here")
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "eth7"
    chosen = worker_variables(order(environment={"GLOO_SOCKET_IFNAME": "ib0"}), "eth7")
    assert (chosen["GLOO_SOCKET_IFNAME"], chosen["CUDA_VISIBLE_DEVICES"]) == ("ib0", "")


def test_no_address_for_the_store() -> None:
    with pytest.raises(LaunchError, match="has no address that the other hosts could use"):
        store_address(Host("localhost"), [Host("127.0.0.1")], [""])
    assert store_address(Host("localhost"), [], []) == "127.0.0.1"
