"""Workers as real processes: one that ends early or runs other code; one alone opens no socket."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pool import free_port
from worlds import NAMES, worker_variables

ROOT = Path(__file__).parents[1]

MODEL = """
import os, sys, torch
import parallax
rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(ids):
    optimizer.zero_grad()
    loss = model(ids).sum()
    loss.backward()
    optimizer.step()
    return loss
"""

SCRIPT = f"""{MODEL}
option = OPTION
runner = parallax.get_runner(step, config=parallax.Config(workers=1, run_option=option))
for number in range(STEPS):
    runner.run(torch.tensor([1, 2]))
files = [os.path.realpath(f"/proc/self/fd/{{f}}") for f in os.listdir("/proc/self/fd")]
sockets = [f for f in files if "socket" in f]
print("done", rank, len(sockets), torch.distributed.is_initialized())
"""


def script(path: Path, option: str = "'HYBRID'", steps: str = "2") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(SCRIPT.replace("OPTION", option).replace("STEPS", steps))
    return path


def run(scripts: list[Path]) -> list[tuple[int, str]]:
    """Run one worker per script to its end: status and output."""
    port = str(free_port())
    processes = []
    for rank, path in enumerate(scripts):
        environment = {k: v for k, v in os.environ.items() if k not in NAMES}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if len(scripts) > 1:
            environment |= {**worker_variables(rank, len(scripts)), "MASTER_PORT": port}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(path)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    return [(p.returncode, out) for p, out in zip(processes, outputs, strict=True)]


@pytest.mark.parametrize("early", ["1 if rank == 1 else 4", "0 if rank == 1 else 4"])
def test_workers_that_wait_for_one_that_ended_end_too(tmp_path: Path, early: str) -> None:
    path = script(tmp_path / "train.py", steps=early)
    (first, text), (second, other) = run([path, path])
    assert second == 0, other
    assert first != 0
    assert "PeerError" in text, text
    assert re.search("lost another worker|worker 1 has ended", text), text


CATCHING = """
def loss_of(ids, labels):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(ids), labels)
    loss.backward()
    optimizer.step()
    return loss
runner = parallax.get_runner(loss_of, config=parallax.Config(workers=1))
for number in range(4):
    labels = torch.tensor([0, 7 if rank == 1 and number == 1 else 1])
    try:
        runner.run(torch.tensor([1, 2]), labels)
        print("ran", number)
    except parallax.errors.ParallaxError as error:
        print("caught", number, type(error).__name__, error.problem)
runner.state_dict()
"""


def test_a_worker_whose_step_failed_within_does_not_go_on(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(MODEL.partition("def step")[0] + CATCHING)
    (first, text), (second, other) = run([path, path])
    assert "ran 0" in other
    assert re.search("caught 1 StepError An operation of the step failed: IndexError", other)
    for number in (2, 3):
        assert f"caught {number} StepError Worker 1 cannot go on: a step failed on it" in other
    assert second != 0  # its state is not to be had, either
    assert first != 0
    assert re.search("lost another worker|worker 1 has ended", text), text


def test_other_code_and_settings_are_named_on_every_worker(tmp_path: Path) -> None:
    own, other = script(tmp_path / "a" / "t.py"), script(tmp_path / "b" / "t.py", steps="3")
    for status, text in run([own, other]):
        assert status != 0
        assert "DisagreementError: Workers differ in code: worker 1 has file t.py" in text, text
        assert "start every worker with the same script" in text
    path = script(tmp_path / "train.py", option="'PS' if rank else 'HYBRID'")
    for status, text in run([path, path]):
        assert status != 0
        assert "worker 1 has run_option PS, worker 0 has run_option HYBRID" in text, text


def test_one_worker_opens_no_socket(tmp_path: Path) -> None:
    ((status, text),) = run([script(tmp_path / "train.py")])
    assert status == 0, text
    assert "done 0 0 False" in text


def test_workers_that_end_right_after_an_exchange(tmp_path: Path) -> None:
    """Gloo's threads hold buffers for a moment longer, and need the interpreter to let go."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from parallax.cluster.environment import worker_environment\n"
        "from parallax.runtime.comm.meeting import meet\n"
        "world = meet(worker_environment())\n"
        "sent, received, half = torch.zeros(1 << 24), torch.zeros(1 << 24), [1 << 23] * 2\n"
        "world.all_to_all(received, sent, half, half, 'rows').wait()\n"
    )
    for _ in range(3):
        for status, text in run([tmp_path / "train.py"] * 2):
            assert status == 0, text


def test_only_one_module_communicates() -> None:
    """Tensors of the user must not reach torch.distributed, which reads strided ones wrongly."""
    pattern = re.compile(
        r"(?<!world\.)\b(all_reduce|all_gather\w*|all_to_all\w*|broadcast\w*|reduce_scatter\w*"
        r"|scatter|gather|isend|irecv|send|recv|barrier)\b\(.*\bgroup\b|\bdist\.\w+\(|torch\.distributed\.\w+\("
    )
    users = set()
    for path in (ROOT / "parallax").rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if pattern.search(line) and not line.strip().startswith("#"):
                users.add(str(path.relative_to(ROOT)))
    comm = ROOT / "parallax/runtime/comm"
    makers = {
        "meeting.py": {
            "init_process_group",
            "is_initialized",
            "get_rank",
            "get_world_size",
            "get_process_group_ranks",
        },
        "process_groups.py": {"new_group", "get_backend", "ProcessGroupGloo", "HashStore"},
    }
    assert users == {f"parallax/runtime/comm/{name}" for name in ("world.py", *makers)}
    source = (comm / "world.py").read_text(encoding="utf-8")
    assert "_object" not in source
    for name, wanted in makers.items():
        called = set(re.findall(r"\bdist\.(\w+)\(", (comm / name).read_text(encoding="utf-8")))
        assert called == wanted
    assert "pickle" not in re.sub(r'""".*?"""', "", source, flags=re.S)
