"""Runs on several hosts: what workers get, how they train, and how every fault ends them.

The hosts are namespaces with an sshd each (``benchmarks/virtual_cluster.py``); ssh, the agents,
torchrun and the faults are real.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import SECONDS, ClusterRun, Site, make_cluster

from benchmarks.virtual_cluster import VirtualCluster

TELL = """
env = start()
print("told", json.dumps({"rank": env.rank, "world": env.world_size, "local": env.local_rank,
    "hosts": int(os.environ["GROUP_WORLD_SIZE"]), "arguments": sys.argv[1:], "cwd": os.getcwd(),
    "node": os.uname().nodename, "address": os.environ["MASTER_ADDR"], "gloo":
    os.environ["GLOO_SOCKET_IFNAME"], "cuda": os.environ["CUDA_VISIBLE_DEVICES"],
    "mine": os.environ.get("MINE"), "seed": os.environ["PARALLAX_SEED"]}))
"""
TRAIN = """
import sys, torch, parallax
from torch import nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
words, labels = torch.randint(50, (48, 4)), torch.randint(5, (48,))
model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters())

def train_step(words, labels):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(words), labels)
    loss.backward()
    optimizer.step()
    return loss

resources = sys.argv[1] if len(sys.argv) > 1 else None
config = parallax.Config(workers=1, redirect_path=None if resources is None else "logs")
runner = parallax.get_runner(train_step, resource_info=resources, config=config)
shard, shards = runner.worker_id, runner.num_workers
for step in range(4):
    batch = slice(step * 12, step * 12 + 12)
    runner.run(words[batch][shard::shards], labels[batch][shard::shards])
state = runner.state_dict()["model"]
if runner.worker_id == 0:
    print("sum", sum(float(value.double().sum()) for value in state.values()).hex())
    torch.save(state, "alone.pt" if resources is None else "many.pt")
"""
SLURM = """
import os, torch, parallax

model = torch.nn.Linear(1, 1, bias=False)
with torch.no_grad():
    model.weight.zero_()
optimizer = torch.optim.SGD(model.parameters(), 1.0)

def step(x):
    optimizer.zero_grad()
    loss = -model(x).mean()
    loss.backward()
    optimizer.step()
    return loss

runner = parallax.get_runner(step)
runner.run(torch.full((1, 1), 2.0 + 2 * runner.worker_id))
print(f"worker {runner.worker_id} of {runner.num_workers} by {os.environ['GLOO_SOCKET_IFNAME']}:",
      float(model.weight))
"""
# Workers that wait for ever, each in its own way: a fault has to end them all.
WAITING = """
env = start()
print("ready", env.rank, os.getpid(), flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    yield from make_cluster()


@pytest.fixture
def site(cluster: VirtualCluster, tmp_path: Path) -> Iterator[Site]:
    made = Site(cluster, tmp_path)
    yield made
    made.close()


def waiting(site: Site, then: str = "time.sleep(1000)\n") -> ClusterRun:
    run = site.launch(WAITING + then)
    run.wait_for(r"\] ready", times=3)
    return run


def ended(run: ClusterRun, status: int, *last: str, since: float) -> None:
    """The run ends in time with a status, the last lines say why, and nothing is left."""
    assert run.end(SECONDS + 10) == status, run.text()
    assert time.monotonic() - since < SECONDS
    tail = "\n".join(run.err[-2:])
    for pattern in last:
        assert re.search(pattern, tail), f"{pattern!r} is not in the last lines of\n{run.text()}"
    run.assert_nothing_left()


def listening(cluster: VirtualCluster, host: str) -> set[str]:
    """Addresses on which a host listens, but for its sshd."""
    tables = ["/proc/self/net/tcp", "/proc/self/net/tcp6"]
    process = cluster.popen(host, ["cat", *tables], stdout=subprocess.PIPE, text=True)
    text, _ = process.communicate(timeout=20)
    rows = [line.split() for line in text.splitlines()]
    found = [row[1].split(":") for row in rows if len(row) > 9 and row[3] == "0A"]
    return {
        ".".join(str(octet) for octet in reversed(bytes.fromhex(address)))
        for address, port in found
        if int(port, 16) != 22
    }


def test_what_workers_get(site: Site) -> None:
    secret = "5ecret-of-this-test"
    ssh = f"ssh: {{environment: {{MINE: 'a $(b) \"c\" {secret}'}}}}"
    site.hosts(f"{{address: vhost2, cpus: 2, {ssh}}}", "{address: vhost1, cpus: 1}")
    arguments = ["a b", "$(touch x)", "'\"", "new\nline", "ünï", "${local_rank}", ""]
    run = site.launch(TELL + 'wait_for("go")\n', *arguments)
    told = [json.loads(m.string.partition("told ")[2]) for m in run.wait_for(r"\] told", times=3)]
    told.sort(key=lambda worker: worker["rank"])
    # Nobody can read on a command line what is meant for the workers.
    lines = [line for host in run.left().values() for line in host.values()]
    assert any("sshd" in line for line in lines)
    assert not any(secret in line for line in lines)
    # The store can be reached at one address only, not at every one that the host has.
    assert listening(site.cluster, "vhost1") == {site.cluster.hosts[0].address}
    assert listening(site.cluster, "vhost2") == set()
    (site.directory / "go").touch()
    assert run.end() == 0, run.text()
    # Ranks begin where the script was started, whatever the file's order.
    assert [worker["node"] for worker in told] == ["vhost1", "vhost2", "vhost2"]
    assert [worker["local"] for worker in told] == [0, 0, 1]
    assert {worker["world"] for worker in told} == {3}
    assert {worker["hosts"] for worker in told} == {2}
    assert all(worker["arguments"] == arguments for worker in told)
    assert {worker["cwd"] for worker in told} == {str(site.directory)}
    assert {worker["gloo"] for worker in told} == {"eth0"}
    assert {worker["cuda"] for worker in told} == {""}
    assert {worker["address"] for worker in told} == {site.cluster.hosts[0].address}
    assert [worker["mine"] for worker in told][1:] == [f'a $(b) "c" {secret}'] * 2
    assert len({worker["seed"] for worker in told}) == 1
    assert not (site.directory / "x").exists()
    for rank, host in enumerate(("vhost1", "vhost2", "vhost2")):
        run.wait_for(rf"^\[{host} worker {rank}\] told")
    run.wait_for(r"starting 3 workers on 2 hosts \(vhost1 1, vhost2 2\); hosts run different")
    run.assert_nothing_left()


@pytest.mark.long
def test_training_gives_the_numbers_of_one_worker(site: Site) -> None:
    alone = site.launch(TRAIN, prologue="")
    assert alone.end() == 0, alone.text()
    run = site.launch(TRAIN, "hosts.yml", prologue="")
    assert run.end() == 0, run.text()
    values = [float.fromhex(r.wait_for(r"sum (\S+)")[0][1]) for r in (alone, run)]
    assert values[0] == pytest.approx(values[1], rel=1e-10)
    saved = sorted(path.name for path in (site.directory / "logs").iterdir())
    assert saved == [f"worker-{rank}.{kind}" for rank in range(3) for kind in ("err", "out")]
    assert (site.directory / "logs" / "worker-0.out").read_text().startswith("sum ")
    run.assert_nothing_left()


@pytest.mark.long
def test_parallax_run_and_ipv6(site: Site) -> None:
    addresses = [host.address6 for host in site.cluster.hosts]
    (site.directory / "six").write_text(f"[{addresses[0]}]: cpus=1\n{addresses[1]}: cpus=1\n")
    (site.directory / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        'dist.init_process_group("gloo")\nx = torch.ones(3)\ndist.all_reduce(x)\n'
        "import sys; print('sum', x.tolist(), sys.argv[1:])\n"
        "dist.destroy_process_group()\n"  # else Gloo's threads may abort it
    )
    command = ("-m", "parallax", "run", "six", "--", "train.py", "--rate", "2")
    run = site.run(sys.executable, *command)
    assert run.end() == 0, run.text()
    run.wait_for(rf"^\[{addresses[1]} worker 1\] sum \[2.0, 2.0, 2.0\] \['--rate', '2'\]")
    run.assert_nothing_left()


@pytest.mark.long
def test_slurm_without_ssh(site: Site) -> None:
    """srun's variables are enough, also where a host's own name stands for 127.0.1.1."""
    names = {host.name: host.address for host in site.cluster.hosts}
    (site.directory / "train.py").write_text(SLURM)
    runs = []
    for rank, own in enumerate(names):
        known = {**names, own: "127.0.1.1", "localhost": "127.0.0.1"}
        lines = "".join(f"{address} {name}\n" for name, address in known.items())
        (site.directory / f"hosts-{own}").write_text(lines)
        site.hide(own, "/etc/hosts", site.directory / f"hosts-{own}")
        job = {"PROCID": rank, "NTASKS": 2, "LOCALID": 0, "NODEID": rank, "STEP_ID": 0}
        job |= {"JOB_ID": 17, "JOB_NODELIST": "vhost[1-2]", "STEP_TASKS_PER_NODE": "1(x2)"}
        variables = [f"SLURM_{name}={value}" for name, value in job.items()]
        runs.append(site.run("env", *variables, sys.executable, "train.py", host=own))
    for rank, run in enumerate(runs):
        assert run.end() == 0, run.text()
        run.wait_for(rf"^worker {rank} of 2 by eth0: 3.0$")
    runs[0].assert_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize(
    ("failure", "status", "last"),
    [
        ("1 / 0", 1, "failed with exit status 1: ZeroDivisionError: division by zero"),
        (
            'raise DataError("the file is bad.", hint="mend it.")',
            5,
            "failed with exit status 5: DataError: the file is bad.",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, r"was killed by signal 9 \(SIGKILL\)"),
    ],
)
def test_a_worker_that_fails(site: Site, failure: str, status: int, last: str) -> None:
    run = waiting(
        site,
        f"""
if env.rank == 2:
    wait_for("go")
    {failure}
# One notices by itself, as if its connection were lost; the other one has to be told.
if env.rank == 0:
    wait_for("go")
    raise PeerError("worker 2 no longer answers.")
time.sleep(1000)
""",
    )
    begun = time.monotonic()
    (site.directory / "go").touch()
    ended(run, status, f"parallax: worker 2 on vhost2 {last}", since=begun)
    if "0" in failure:
        assert run.err[-2] == "[vhost2 worker 2] ZeroDivisionError: division by zero"


@pytest.mark.long
def test_a_link_that_is_cut(site: Site) -> None:
    run = waiting(site)
    begun = time.monotonic()
    site.cluster.cut("vhost2")
    ended(
        run,
        3,
        "parallax: vhost2 (has not been heard of for 1|was lost).*; workers 1 to 2 ran there",
        "vhost2 did not confirm it|was lost",
        since=begun,
    )


@pytest.mark.long
def test_a_short_cut_is_survived(site: Site) -> None:
    run = waiting(site, 'wait_for("go")\n')
    site.cluster.cut("vhost2")
    time.sleep(2)  # how long the cut lasts, not a wait for something
    site.cluster.heal("vhost2")
    (site.directory / "go").touch()
    assert run.end() == 0, run.text()
    run.assert_nothing_left()


@pytest.mark.long
def test_a_host_that_dies(site: Site) -> None:
    run = waiting(site)
    begun = time.monotonic()
    site.cluster.kill("vhost2")
    try:
        ended(run, 3, "parallax: vhost2 was lost: .*; workers 1 to 2 ran there", since=begun)
    finally:
        site.cluster.start_sshd("vhost2")


@pytest.mark.long
@pytest.mark.parametrize("victim", ["host agent", "torchrun's agent"])
def test_an_agent_that_dies(site: Site, victim: str) -> None:
    run = waiting(site)
    needle = "-c import sys; sys.path" if victim == "host agent" else "agent_start.py --parent"
    pids = [pid for pid, line in run.left()["vhost2"].items() if needle in line]
    assert len(pids) == 1, run.left()
    begun = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    said = "vhost2 was lost" if victim == "host agent" else "vhost2: torchrun's agent ended"
    status = 3 if victim == "host agent" else 137
    ended(run, status, f"parallax: {said}", since=begun)


@pytest.mark.long
def test_ctrl_c(site: Site) -> None:
    run = waiting(site)
    # Ctrl-Z does nothing: a launcher that is stopped would be taken for dead.
    os.killpg(run.process.pid, signal.SIGTSTP)
    begun = time.monotonic()
    run.interrupt()
    ended(run, 130, "parallax: stopped by SIGINT; no worker is left", since=begun)
    assert not any("parallax/cluster" in line for line in run.err)


@pytest.mark.long
def test_ctrl_c_twice(site: Site) -> None:
    run = waiting(
        site,
        "signal.signal(signal.SIGINT, lambda *_: print('busy'))\nprint('deaf')\n"
        "while True:\n    time.sleep(0.1)\n",
    )
    run.wait_for("deaf", times=3)
    begun = time.monotonic()
    run.interrupt()
    run.wait_for("busy", times=3)
    run.interrupt()
    ended(run, 130, "parallax: stopped by SIGINT", since=begun)


def test_ctrl_c_during_the_checks(site: Site) -> None:
    site.cluster.cut("vhost2")
    run = site.launch("start()\n")
    run.wait_for("parallax: vhost1: Python")
    begun = time.monotonic()
    run.interrupt()
    assert run.end() == 130, run.text()
    assert time.monotonic() - begun < SECONDS
    assert "parallax: stopped by SIGINT; nothing was started" in run.err[-1]
    site.cluster.heal("vhost2")
    run.assert_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("link", ["up", "cut"])
def test_a_launcher_that_dies(site: Site, link: str) -> None:
    run = waiting(site)
    begun = time.monotonic()
    if link == "cut":
        # Nothing tells the host: it has to miss the launcher by itself.
        site.cluster.cut("vhost2")
    run.process.kill()
    assert run.end() == 137
    run.assert_nothing_left()
    assert time.monotonic() - begun < SECONDS


@pytest.mark.long
def test_a_full_disk_for_logs(site: Site) -> None:
    (site.directory / "logs").mkdir()
    site.small_disk("vhost1", site.directory / "logs", "64k")
    run = site.launch(
        'env = start("logs")\nfor at in range(4000):\n    print("line", at, "x" * 60)\n'
    )
    assert run.end() == 0, run.text()[-3000:]
    run.wait_for(r"\[vhost\d worker \d\] its output is no longer saved in .*/logs: No space left")
    shown = [line for line in run.out if line.startswith("[vhost2 worker 2] line ")]
    assert len(shown) == 4000
    assert f"line 3999 {'x' * 60}" in shown[-1]
    run.assert_nothing_left()


@pytest.mark.long
def test_a_firewall_between_the_workers(site: Site) -> None:
    chain = "type filter hook input priority 0; tcp flags & (syn | ack) == syn drop;"
    rules = f"table inet t {{ chain c {{ {chain} }}; }}"
    nft = site.cluster.popen("vhost1", ["nft", rules])
    if nft.wait(20) != 0:
        pytest.skip("nftables is not installed")
    try:
        run = site.launch("start()\n")
        begun = time.monotonic()
        assert run.end() == 3, run.text()
        assert re.search(r"vhost2: .*the chief cannot be reached at .* \(no answer\)", run.text())
        assert time.monotonic() - begun < 2 * SECONDS
        run.assert_nothing_left()
    finally:
        site.cluster.popen("vhost1", ["nft", "flush ruleset"]).wait(20)
