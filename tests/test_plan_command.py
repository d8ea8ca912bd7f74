"""``parallax plan``: a script's plan for hosts that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import worlds
from errors_help import raised
from launching import ROOT
from test_cli import start

from parallax import api, cli
from parallax.cluster.environment import PLAN_VARIABLE, worker_environment
from parallax.cluster.network import Level
from parallax.cluster.planned import MESSAGE_SECONDS, PlannedCluster, plan_cluster
from parallax.cluster.resources import read_resources
from parallax.errors import LaunchError
from parallax.graph.analysis.variables import Variable
from parallax.runtime.plan import Plan
from parallax.strategy.builders.common import OwnerQueue
from parallax.strategy.data import Strategy, VariableStrategy
from parallax.strategy.layout import RowLayout

MODEL = """
import os, sys, torch, parallax
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(5000, 8), nn.Flatten(), nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters())
first = [parameter.detach().clone() for parameter in model.parameters()]

def step(words, labels):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(words), labels)
    loss.backward()
    optimizer.step()
    return loss

words, labels = torch.randint(5000, (64000, 4)), torch.randint(5, (64000,))
data = torch.utils.data.TensorDataset(words, labels)
"""
TRAIN = (
    MODEL
    + """
print("arguments", sys.argv)
loader = parallax.shard(torch.utils.data.DataLoader(data, batch_size=4))
option = os.environ.get("OPTION", "HYBRID")
runner = parallax.get_runner(step, resource_info="absent.txt", config={"run_option": option})
print("worker", runner.worker_id, "of", runner.num_workers, parallax.shard_id(), "of",
      parallax.num_shards())
try:
    for batch in loader:
        runner.run(*batch)
except Exception:
    print("an error")
finally:
    print("ends", all(map(torch.equal, first, model.parameters())), len(optimizer.state))
print("trained")
"""
)
TWO = "10.0.0.1: cpus=2\n10.0.0.2: cpus=2\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a resource file, and an environment without a launcher."""
    for name in worlds.NAMES:
        monkeypatch.delenv(name, raising=False)
    # The command hides devices where hosts have none.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text(TWO)
    return tmp_path


def plan(place: Path, script: str, *arguments: str, hosts: str = TWO) -> int:
    (place / "hosts").write_text(hosts)
    (place / "train.py").write_text(script)
    return cli.main(["plan", "train.py", *arguments, "--resource-info", "hosts"])


def test_a_plan(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = list(sys.path)
    assert plan(place, TRAIN, "--rate", "2") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[:3] == [
        "arguments ['train.py', '--rate', '2']",
        "worker 0 of 4 0 of 4",
        "ends True 0",  # nothing was trained
    ]
    assert lines[3].startswith("HYBRID on 4 workers, ")
    (table,) = [line for line in lines if "0.weight" in line]
    assert [word in table for word in ("5000×8", "sparse", "0.0032", "all, row mod")] == [True] * 4
    assert "network: 938 MB/s from each worker, 0.09 ms; messages of a step, predicted:" in out
    assert "planned for 4 workers on 2 hosts of hosts, from a first batch of 4 rows a worker" in out
    assert lines[-1] == (
        "assumed, as the file does not say it: bandwidth 10 Gbit/s of all hosts; latency 50 us of "
        "all hosts; inside_bandwidth 12 Gbit/s a worker of all hosts; inside_latency 50 us of all "
        "hosts (`parallax probe` measures)"
    )
    assert err == ""
    assert not {*worlds.NAMES, PLAN_VARIABLE} & set(os.environ)
    assert sys.path == path
    assert sorted(p.name for p in place.iterdir()) == ["hosts", "train.py"]


@pytest.mark.parametrize("option", ["HYBRID", "PS", "AR"])
def test_a_plan_for_a_thousand_hosts(
    option: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTION", option)
    names = [f"10.1.{n // 200}.{n % 200}" for n in range(1000)]
    hosts = "bandwidth: 100 Gbit/s\nhosts:\n" + "".join(
        f"- {{address: {name}, devices: [0,1,2,3,4,5,6,7]}}\n" for name in names
    )
    assert plan(place, TRAIN, hosts=hosts) == 0
    out = capsys.readouterr().out
    assert f"{option} on 8000 workers" in out
    assert "planned for 8,000 workers on 1,000 hosts of hosts, from a first batch of 4 rows" in out
    assert "all, row mod" in out or option == "AR"
    assert "latency 50 us of all hosts" in out
    assert "bandwidth 10 Gbit/s" not in out
    assert max(map(len, out.splitlines()[3:-2])) <= 160


def test_a_module_and_other_orders(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "pack").mkdir()
    (place / "pack" / "__main__.py").write_text("from pack.other import *\n" + TRAIN)
    (place / "pack" / "other.py").write_text("VALUE = 3\n")
    file = ["--resource-info", "hosts"]
    # What follows the script is its own where the file was named before.
    assert cli.main(["plan", *file, "--", "-m", "pack", "--resource-info", "own"]) == 0
    assert "__main__.py', '--resource-info', 'own']" in capsys.readouterr().out
    assert cli.main(["plan", "--", "-m", "pack", "-x", "--resource-info=hosts"]) == 0
    assert "__main__.py', '-x']" in capsys.readouterr().out


def test_one_worker_and_a_host_like_this_one(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(place, TRAIN, hosts="10.0.0.1: 3\n") == 0
    out = capsys.readouterr().out
    assert "HYBRID on 1 worker, 0 B sent" in out
    assert "planned for 1 worker on 1 host of hosts" in out
    assert "assumed" not in out
    assert plan(place, TRAIN, hosts="10.0.0.1\n") == 0
    assert "2 workers on 10.0.0.1 (as on this machine)" in capsys.readouterr().out


def test_the_command_starts_nothing_and_needs_no_devices(place: Path) -> None:
    """A new process, as a user starts it; it forks no other."""
    (place / "train.py").write_text(TRAIN)
    (place / "hosts").write_text("10.0.0.1: 0,1\n10.0.0.2: 0,1\n")
    code = (
        "import sys, os\n"
        "def heed(event, args):\n"
        "    if event in ('os.fork', 'os.exec', 'os.posix_spawn', 'subprocess.Popen',\n"
        "                 'socket.connect', 'socket.getaddrinfo'):\n"
        "        print('event', event, args, file=sys.stderr)\n"
        "import torch\n"  # which may ask the system who it is
        "sys.addaudithook(heed)\n"
        "from parallax.cli import main\n"
        "sys.exit(main(['plan', 'train.py', '--resource-info', 'hosts']))\n"
    )
    variables = {k: v for k, v in os.environ.items() if k not in worlds.NAMES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "planned for 4 workers on 2 hosts" in done.stdout


def test_a_script_that_goes_on_is_ended(place: Path) -> None:
    script = (
        MODEL
        + """
runner = parallax.get_runner(step)
for at in range(5):
    try:
        runner.run(words[:4], labels[:4])
    except BaseException as error:
        print("caught", type(error).__name__, flush=True)
print("trained")
"""
    )
    (place / "train.py").write_text(script)
    done = start(place, "plan", "train.py", "--resource-info", "hosts")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("caught PlanMade\nHYBRID on 4 workers")
    assert "trained" not in done.stdout


def test_what_a_script_saves_at_its_end(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        MODEL
        + """
runner = parallax.get_runner(step)
torch.save(runner.state_dict(), "before.pt")
try:
    runner.run(words[:4], labels[:4])
finally:
    torch.save({}, "after.pt") if runner.state_dict() else None
"""
    )
    (place / "train.py").write_text(script)
    done = start(place, "plan", "train.py", "--resource-info", "hosts")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("HYBRID on 4 workers")
    assert sorted(p.name for p in place.iterdir()) == ["before.pt", "hosts", "train.py"]


PROBLEMS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "no runner": (
        "print('hello')",
        3,
        ("PlanError: The script ended without a call of parallax.get_runner().", "get_runner("),
    ),
    "no step": (
        MODEL + "runner = parallax.get_runner(step)\n",
        3,
        (
            "PlanError: The script ended without a step: it never called run() of its runner.",
            "What to do: ",
            "a batch for each of 4 workers",
        ),
    ),
    "an exit": (
        MODEL + "runner = parallax.get_runner(step)\nsys.exit(7)\n",
        3,
        ("PlanError: The script ended with exit status 7 before its first step.", "its arguments"),
    ),
    "a failure": (
        "def read(x):\n    raise ValueError(f'no {x}')\nread('data')\n",
        3,
        (
            'Traceback (most recent call last):\n  File "',
            'train.py", line 3, in <module>',
            "PlanError: The script failed before its first step: ValueError: no data",
            "What to do: see that it runs by itself",
            "as worker 0 of 4, alone",
        ),
    ),
    "no Python": (
        "x = = 3\n",
        3,
        ("SyntaxError: ", "PlanError: The script failed before its first step: SyntaxError: "),
    ),
    "other workers": (
        "import torch.distributed as d\nd.init_process_group('gloo')\n",
        3,
        ("PlanError: The script failed before its first step: ValueError: ", "MASTER_ADDR"),
    ),
    "another process": (
        MODEL + "from parallax.runtime import planning\nplanning.stop_planning()\n"
        "os.environ.update(RANK='0', WORLD_SIZE='4', LOCAL_RANK='0', LOCAL_WORLD_SIZE='4',"
        " PARALLAX_PLAN='1')\nparallax.get_runner(step)\n",
        3,
        ("LaunchError: This process was started by a script of which `parallax plan`", "own proc"),
    ),
    "a step that cannot be captured": (
        MODEL + "def wrong(words):\n    if model(words).sum() > 0: print()\n"
        "parallax.get_runner(wrong, model=model, optimizer=optimizer).run(words[:2])\n",
        4,
        ("DataDependentError: Python control flow", "train.py:"),
    ),
    "too little data": (
        MODEL + "loader = parallax.shard(torch.utils.data.DataLoader(list(range(3))))\n"
        "runner = parallax.get_runner(step)\nfor x in loader: runner.run(x)\n",
        5,
        ("ShardError: ", "fewer than the 4 workers"),
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_script_that_gives_no_plan(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, status, sentences = PROBLEMS[name]
    try:
        assert plan(place, script) == status
    finally:
        for variable in (*worlds.NAMES, PLAN_VARIABLE):
            os.environ.pop(variable, None)
    said = capsys.readouterr().err
    assert [sentence for sentence in sentences if sentence not in said] == [], said
    assert "runpy" not in said
    assert "commands/plan.py" not in said


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (["train.py"], ("ConfigError: --resource-info FILE is missing", "parallax plan train.py")),
        (["train.py", "--resource-info"], ("ConfigError: --resource-info FILE is missing",)),
        (["absent.py", "--resource-info", "hosts"], ("The script 'absent.py' is no file.",)),
        (["--resource-info", "hosts", "--", "-m", "absent"], ("The module 'absent' is not found",)),
        (["train.py", "--resource-info", "absent"], ("resource_info 'absent' is no file",)),
        (["train.py", "--resource-info", "bad"], ("bad:1: ",)),
    ],
)
def test_a_wrong_command_line(
    arguments: list[str],
    sentences: tuple[str, ...],
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (place / "train.py").write_text("raise SystemError")
    (place / "bad").write_text("a: all\n")
    assert cli.main(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert [sentence for sentence in sentences if sentence not in said] == [], said


def test_a_worker_makes_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    raised(
        lambda: cli.find_commands()["plan"].run(None),  # type: ignore[arg-type]
        LaunchError,
        "already a worker",
    )


# -- The cluster of a file ------------------------------------------------------------------------


def cluster(place: Path, text: str, usual: int = 2) -> PlannedCluster:
    (place / "hosts.yml").write_text(text)
    return plan_cluster(read_resources("hosts.yml"), usual)


def test_a_network_of_single_workers(place: Path) -> None:
    text = "bandwidth: 800 Mbit/s\nlatency: 1 ms\nhosts: [a, {address: b, bandwidth: 80 Mbit/s}]\n"
    found = cluster(place, text, 1)
    assert found.counts == (1, 1)
    # The slower link is waited for.
    assert found.network.whole == Level(2, 1e7, 1e-3)
    assert found.network.host is None
    assert found.assumed == ("1 worker on all hosts (as on this machine)",)


def test_a_network_of_two_levels(place: Path) -> None:
    text = (
        "bandwidth: 800 Mbit/s\nlatency: 1 ms\ninside_bandwidth: 8 Gbit/s\ninside_latency: 10 us\n"
        "hosts: [{address: a, cpus: 2}, {address: b, cpus: 2}]\n"
    )
    network = cluster(place, text).network
    # Of three bytes that a worker sends two cross, and its host's link carries four.
    assert network.whole == Level(4, pytest.approx(1e8 * 3 / 4), 1e-3 + 2 * MESSAGE_SECONDS)
    assert network.host == Level(2, 5e8, 1e-5)
    assert network.rail == Level(2, 5e7, 1e-3)
    assert cluster(place, text).assumed == ()
    assert cluster(place, text).on_cpu


def test_what_is_assumed_inside_hosts(place: Path) -> None:
    found = cluster(place, "hosts: [{address: a, cpus: 2}]\n")
    assert found.network.whole == Level(2, 1.5e9, 50e-6)
    assert found.assumed == (
        "inside_bandwidth 12 Gbit/s a worker of a",
        "inside_latency 50 us of a",
    )
    found = cluster(place, "hosts: [{address: a, devices: [0, 1]}, {address: b, devices: [3]}]\n")
    assert "inside_bandwidth 160 Gbit/s a worker of a" in found.assumed
    assert "bandwidth 10 Gbit/s of all hosts" in found.assumed


def test_links_of_pairs(place: Path) -> None:
    text = "bandwidth: 800 Mbit/s\nlatency: 1 ms\nhosts: [a, b, c]\nlinks:\n"
    slow = text + "- {between: [a, b], bandwidth: 80 Mbit/s, latency: 5 ms}\n"
    network = cluster(place, slow, 1).network
    # Half of what a worker sends goes over it.
    assert network.whole == Level(3, 2e7, 5e-3 + MESSAGE_SECONDS)
    fast = text + "".join(
        f"- {{between: [{pair}], bandwidth: 8 Gbit/s}}\n" for pair in ("a, b", "b, c", "a, c")
    )
    assert cluster(place, fast, 1).network.whole.bandwidth == 2e9


def test_unequal_hosts_have_one_level_and_the_chief_is_first(place: Path) -> None:
    text = "hosts: [{address: a, cpus: 2}, {address: b, cpus: 3, chief: true}]\n"
    found = cluster(place, text)
    assert found.counts == (3, 2)
    assert found.network.host is None
    assert found.variables["LOCAL_WORLD_SIZE"] == "3"
    environment = worker_environment(found.variables)
    assert (environment.rank, environment.world_size, environment.master_addr) == (0, 5, None)


# -- What must stay quick with thousands of workers -----------------------------------------------


def test_owners_in_a_few_characters() -> None:
    variable = Variable("a", (64, 2), torch.float32, True)
    shown = {}
    for owners in ((3,), (0, 1, 2, 5), tuple(range(0, 20, 2)), tuple(range(64))):
        choice = VariableStrategy("owner", partition="block", owners=owners)
        table = str(Plan({"a": variable}, Strategy("", 64, {"a": choice}), 64, "PS"))
        (row,) = [line for line in table.splitlines() if "64×2" in line]
        shown[owners] = row.split("│")[6].strip()
    assert list(shown.values()) == [
        "3, blocks",
        "0-2,5, blocks",
        "0,2,4,6,… (10 workers), blocks",
        "all, blocks",
    ]


def test_ranges_are_those_of_each_worker() -> None:
    layout = RowLayout("block", 10, 5, (3, 0, 4))
    assert layout.ranges() == tuple(layout.range(worker) for worker in range(5))
    assert layout.ranges() == ((3, 6), (0, 0), (0, 0), (0, 3), (6, 10))


def test_owners_are_balanced() -> None:
    queue = OwnerQueue(3)
    assert [queue.next(size) for size in (5, 4, 1, 2, 2, 1)] == [0, 1, 2, 2, 2, 1]


def test_the_public_function_says_what_it_does() -> None:
    assert "parallax plan" in (api.get_runner.__doc__ or "")


def test_a_plan_of_another_strategy(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "hosts").write_text(TWO)
    (place / "train.py").write_text(TRAIN)
    command = ["plan", "--save", "made.json", "--resource-info", "hosts", "--strategy"]
    assert cli.main([*command, "ar", "train.py"]) == 0
    out = capsys.readouterr().out
    assert "AR on 4 workers" in out
    assert out.endswith("its strategy is in made.json\n")
    made = Strategy.load("made.json")
    assert {one.synchronizer for one in made.variables.values()} == {"allgather", "allreduce"}
    assert cli.main([*command, "made.json", "train.py"]) == 0
    assert "made.json on 4 workers" in capsys.readouterr().out
    assert Strategy.load("made.json") == made
    assert cli.main([*command, "arr", "train.py"]) == 2
    assert "did you mean 'AR'?" in capsys.readouterr().err
