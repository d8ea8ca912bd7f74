"""Workers that Slurm or Kubernetes started know who they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.cluster.environment import (
    WorkerEnvironment,
    refuse_nested_launch,
    worker_environment,
)
from parallax.cluster.schedulers import first_host
from parallax.errors import LaunchError

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[003-004],gpu9",
    "SLURM_STEP_TASKS_PER_NODE": "4,2(x2)",
}


def changed(**changes: str | None) -> dict[str, str]:
    return {name: value for name, value in {**SLURM, **changes}.items() if value is not None}


def test_slurm() -> None:
    expected = WorkerEnvironment(5, 8, 1, 2, "gpu003", 24711, 0, launched=True)
    assert worker_environment(SLURM) == expected
    other = worker_environment(changed(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0"))
    assert (other.master_addr, other.master_port) == ("gpu003", 24711)
    assert (other.rank, other.local_rank, other.local_world_size) == (0, 0, 4)


def test_slurm_says_the_least() -> None:
    least = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    least |= {"SLURM_JOB_NODELIST": "a,b", "SLURM_NTASKS_PER_NODE": "1"}
    worker = worker_environment(least)
    assert (worker.rank, worker.world_size, worker.local_world_size) == (1, 2, 1)
    assert worker.master_addr == "a"


def test_slurm_gives_way_to_torchrun() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "1"}
    assert worker_environment({**SLURM, **torchrun}).world_size == 1
    named = worker_environment(changed(MASTER_ADDR="10.0.0.9", MASTER_PORT="1234"))
    assert (named.master_addr, named.master_port) == ("10.0.0.9", 1234)
    assert worker_environment(changed(SLURM_STEP_RESV_PORTS="12000-12003")).master_port == 12000


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},  # the batch script
        {"SLURM_STEP_ID": "4294967291"},  # the batch script, in other versions
        {"SLURM_STEP_ID": "4294967290"},  # a shell of salloc
        {"SLURM_NTASKS": "1"},
        {"SLURM_PROCID": None},
    ],
)
def test_what_slurm_started_but_is_no_worker(changes: dict[str, str | None]) -> None:
    assert not worker_environment(changed(**changes)).launched


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"SLURM_PROCID": "x"}, "RANK is 'x', which is no integer"),
        ({"SLURM_PROCID": "8"}, "RANK is 8 but WORLD_SIZE is 8"),
        ({"SLURM_JOB_NODELIST": None}, "MASTER_ADDR is not set, but WORLD_SIZE=8"),
        ({"SLURM_LOCALID": None}, "LOCAL_RANK not set, but WORLD_SIZE=8"),
        ({"SLURM_STEP_TASKS_PER_NODE": "?"}, "LOCAL_WORLD_SIZE not set, but WORLD_SIZE=8"),
    ],
)
def test_contradictions_of_slurm(changes: dict[str, str | None], sentence: str) -> None:
    with pytest.raises(LaunchError) as caught:
        worker_environment(changed(**changes))
    assert sentence in str(caught.value)
    assert "what Slurm's or Kubernetes' variables say" in str(caught.value)


def test_a_slurm_worker_starts_no_workers() -> None:
    with pytest.raises(
        LaunchError, match=r"torchrun or another launcher started \(RANK=5, WORLD_SI"
    ):
        refuse_nested_launch(SLURM)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[003-010,12],login1", "gpu003"),
        ("gpu[12,003]", "gpu12"),
        ("rack[1-2]node[7-9]-ib,x", "rack1node7-ib"),
        ("n01.cluster,n02", "n01.cluster"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "RANK": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}


def test_kubernetes_runs_one_worker_in_a_pod() -> None:
    expected = WorkerEnvironment(2, 3, 0, 1, "job-master-0", 23456, 0, launched=True)
    assert worker_environment(POD) == expected
    job = {name: value for name, value in POD.items() if name != "RANK"}
    assert worker_environment({**job, "JOB_COMPLETION_INDEX": "2"}) == expected
    two = worker_environment({**POD, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert (two.local_rank, two.local_world_size) == (1, 2)
    alone = worker_environment({**POD, "MASTER_ADDR": "127.0.0.1"})
    assert (alone.local_rank, alone.local_world_size) == (2, 3)


@given(st.dictionaries(st.sampled_from([*SLURM, *POD]), st.text(max_size=6)))
def test_any_environment_is_a_valid_worker_or_a_launch_error(variables: dict[str, str]) -> None:
    try:
        worker = worker_environment(variables)
    except LaunchError:
        return
    assert 0 <= worker.rank < worker.world_size
