"""Which worker a process is, from its environment variables (RELIABILITY.md rows 42 and 47)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.cluster.environment import (
    WorkerEnvironment,
    launch_seed,
    refuse_nested_launch,
    worker_environment,
)
from parallax.errors import LaunchError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def changed(**changes: str | None) -> dict[str, str]:
    merged = {**TORCHRUN, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def problem(variables: dict[str, str]) -> str:
    with pytest.raises(LaunchError) as caught:
        worker_environment(variables)
    return str(caught.value)


def test_unset_is_worker_zero_of_one() -> None:
    expected = WorkerEnvironment(0, 1, 0, 1, None, None, 0, launched=False)
    assert worker_environment({}) == expected
    assert worker_environment({"MASTER_ADDR": "left over", "MASTER_PORT": "x"}) == expected


def test_reads_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PARALLAX_LAUNCHED", *TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    assert not worker_environment().launched
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert worker_environment().rank == 3


def test_torchrun() -> None:
    expected = WorkerEnvironment(3, 4, 1, 2, "10.0.0.1", 29500, 2, launched=True)
    assert worker_environment(TORCHRUN) == expected
    assert worker_environment(changed(PARALLAX_LAUNCHED="17")) == expected


def test_one_worker_under_a_launcher_needs_no_address() -> None:
    expected = WorkerEnvironment(0, 1, 0, 1, None, None, 0, launched=True)
    assert worker_environment({"RANK": "0", "WORLD_SIZE": "1"}) == expected


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_local_variables_default_on_one_machine(address: str) -> None:
    variables = changed(LOCAL_RANK=None, LOCAL_WORLD_SIZE=None, MASTER_ADDR=address)
    worker = worker_environment(variables)
    assert (worker.local_rank, worker.local_world_size) == (3, 4)
    worker = worker_environment(changed(LOCAL_RANK=None, LOCAL_WORLD_SIZE="4"))
    assert (worker.local_rank, worker.local_world_size) == (3, 4)


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({"RANK": None}, ["RANK is not set, but WORLD_SIZE=4"]),
        ({"WORLD_SIZE": None}, ["WORLD_SIZE is not set, but RANK=3"]),
        ({"RANK": "three"}, ["RANK is 'three', which is no integer"]),
        ({"RANK": ""}, ["RANK is '', which is no integer"]),
        ({"RANK": "1_0"}, ["RANK is '1_0', which is no integer"]),
        ({"RANK": "9" * 5000}, ["which is no integer"]),
        ({"RANK": "4"}, ["RANK is 4 but WORLD_SIZE is 4: RANK must be less"]),
        ({"RANK": "-1"}, ["RANK is -1, which must be from 0"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE is 0, which must be from 1"]),
        ({"MASTER_ADDR": None}, ["MASTER_ADDR is not set, but WORLD_SIZE=4"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR is not set, but WORLD_SIZE=4"]),
        ({"MASTER_PORT": None}, ["MASTER_PORT is not set, but WORLD_SIZE=4"]),
        ({"MASTER_PORT": "0"}, ["MASTER_PORT is 0, which must be from 1 to 65535"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT is 70000, which must be from 1 to 65535"]),
        (
            {"LOCAL_RANK": None},
            ["LOCAL_RANK not set, but WORLD_SIZE=4 and MASTER_ADDR=10.0.0.1"],
        ),
        (
            {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "MASTER_ADDR": "node7"},
            ["LOCAL_RANK and LOCAL_WORLD_SIZE not set", "MASTER_ADDR=node7"],
        ),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK is 2 but LOCAL_WORLD_SIZE is 2"]),
        ({"LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE is 8 but WORLD_SIZE is 4"]),
        ({"RANK": "0"}, ["LOCAL_RANK is 1 but RANK is 0"]),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, ["TORCHELASTIC_RESTART_COUNT is 'x'"]),
        (
            {"RANK": "-2", "WORLD_SIZE": "x", "MASTER_PORT": "http"},
            ["RANK is -2", "WORLD_SIZE is 'x'", "MASTER_PORT is 'http'"],
        ),
    ],
)
def test_contradictions_name_variables_and_values(
    changes: dict[str, str | None], sentences: list[str]
) -> None:
    text = problem(changed(**changes))
    for sentence in sentences:
        assert sentence in text
    assert "What to do:" in text


def test_launched_without_a_rank() -> None:
    text = problem({"PARALLAX_LAUNCHED": "17"})
    assert "RANK is not set, but PARALLAX_LAUNCHED=17" in text
    assert "WORLD_SIZE is not set, but PARALLAX_LAUNCHED=17" in text


@given(st.dictionaries(st.sampled_from([*TORCHRUN, "PARALLAX_LAUNCHED"]), st.text(max_size=6)))
def test_any_environment_is_a_valid_worker_or_a_launch_error(variables: dict[str, str]) -> None:
    try:
        worker = worker_environment(variables)
    except LaunchError:
        return
    assert 0 <= worker.rank < worker.world_size
    assert 0 <= worker.local_rank < worker.local_world_size <= worker.world_size
    assert worker.world_size == 1 or (worker.master_addr and worker.master_port)


def test_seed() -> None:
    assert launch_seed({}) is None
    assert launch_seed({"PARALLAX_SEED": "12"}) == 12
    with pytest.raises(LaunchError, match="PARALLAX_SEED is 'abc', which is no integer"):
        launch_seed({"PARALLAX_SEED": "abc"})


def test_nested_launch_is_refused() -> None:
    refuse_nested_launch({"MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(LaunchError, match=r"that parallax started \(PARALLAX_LAUNCHED=17, RANK=0"):
        refuse_nested_launch({"PARALLAX_LAUNCHED": "17", "RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(LaunchError, match=r"torchrun or another launcher started \(RANK=0\)"):
        refuse_nested_launch({"RANK": "0"})
