"""Settings and strategies that are wrong (RELIABILITY.md 98-104)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bad_steps
import pytest
import torch
from errors_help import alone, linear, raised, rows

import parallax.api
from parallax.config import Config
from parallax.errors import ConfigError, StrategyError
from parallax.graph.analysis.variables import Variable
from parallax.logs import configure_logging
from parallax.strategy.data import Strategy, VariableStrategy, fingerprint
from parallax.strategy.verify import verify

SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown": ({"worker": 2}, ("no setting 'worker' (did you mean 'workers'?)", "it has")),
    "far": ({"zzz": 2}, ("no setting 'zzz'; it has run_option",)),
    "two": ({"sead": 1, "run_options": "PS"}, ("'sead' (did you mean 'seed'?)", "'run_option'?")),
    "option": ({"run_option": "hybird"}, ('"HYBRID", "PS" or "AR"', 'did you mean "HYBRID"?')),
    "option kind": ({"run_option": 1}, ("found 1",)),
    "workers 0": ({"workers": 0}, ("workers must be an integer from 1 to 1024, found 0",)),
    "workers many": ({"workers": 10**6}, ("from 1 to 1024, found 1000000",)),
    "workers bool": ({"workers": True}, ("found True",)),
    "workers text": ({"workers": "2"}, ("found '2'",)),
    "seed": ({"seed": -1}, ("seed must be an integer from 0", "found -1")),
    "average": ({"average_dense": 1}, ("average_dense must be True or False, found 1",)),
    "average sparse": ({"average_sparse": "no"}, ("average_sparse", "found 'no'")),
    "redirect": ({"redirect_path": 3}, ("redirect_path must be a path, found 3",)),
    "dump": ({"dump_dir": __file__}, ("dump_dir must be a directory", "is a file")),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_setting_is_named(name: str) -> None:
    settings, fragments = SETTINGS[name]
    error = raised(lambda: Config(**settings), ConfigError, *fragments)
    assert error.exit_code == 2
    raised(lambda: Config.of(settings), ConfigError, *fragments)


def test_config_of_another_kind() -> None:
    raised(lambda: Config.of(3), ConfigError, "found int", "parallax.Config(run_option=")  # type: ignore[arg-type]


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLAX_LOG_LEVEL", "LOUD")
    raised(configure_logging, ConfigError, "PARALLAX_LOG_LEVEL is 'LOUD'", "use DEBUG, INFO")


def test_asynchronous_training_is_refused() -> None:
    raised(
        lambda: parallax.api.parallel_run(lambda x: x, None, sync=False),
        ConfigError,
        "(sync=False) is not offered",
        "use sync=True",
    )


# -- Strategies -----------------------------------------------------------------------------------

DENSE = Variable("dense", (4, 2), torch.float32, True)
TABLE = Variable("table", (9, 2), torch.float32, True, lookups=("embedding",), sparse=True)
WHOLE = Variable("whole", (9, 2), torch.float32, True, sparse=True, shard_obstacle="it is odd")
VARIABLES = [DENSE, TABLE, WHOLE]
GOOD = {
    "dense": VariableStrategy("allreduce"),
    "table": VariableStrategy("rows", "cyclic", (0, 1)),
    "whole": VariableStrategy("allgather"),
}


def strategy(**changes: VariableStrategy | None) -> Strategy:
    chosen = {**GOOD, **changes}
    kept = {name: choice for name, choice in chosen.items() if choice is not None}
    return Strategy(fingerprint(VARIABLES), 2, kept)


WRONG: dict[str, tuple[Strategy, int, tuple[str, ...]]] = {
    "workers": (strategy(), 3, ("it is for 2 workers, there are 3",)),
    "missing": (strategy(dense=None), 2, ("no decision for 'dense'",)),
    "unknown": (strategy(other=VariableStrategy("none")), 2, ("no variable 'other'",)),
    "fingerprint": (
        Strategy("0" * 16, 2, dict(GOOD)),
        2,
        ("shapes or dtypes of the variables differ",),
    ),
    "owner": (
        strategy(dense=VariableStrategy("owner", owners=(5,))),
        2,
        ("'dense': owners (5,) are not all among 2 workers",),
    ),
    "owner twice": (
        strategy(dense=VariableStrategy("owner", "block", (0, 0))),
        2,
        ("'dense': an owner is named twice",),
    ),
    "no owner": (strategy(dense=VariableStrategy("owner")), 2, ("'dense': it has no owner",)),
    "idle owner": (
        strategy(dense=VariableStrategy("allreduce", owners=(0,))),
        2,
        ("'dense': allreduce has no owners",),
    ),
    "dense rows": (
        strategy(dense=VariableStrategy("rows", "cyclic", (0, 1))),
        2,
        ("'dense': rows is for sparse variables",),
    ),
    "partition": (
        strategy(table=VariableStrategy("rows", "block", (0, 1))),
        2,
        ("'table': rows cannot use partition 'block'",),
    ),
    "obstacle": (
        strategy(whole=VariableStrategy("rows", "cyclic", (0, 1))),
        2,
        ("'whole': its update cannot be sharded: it is odd",),
    ),
    "synchroniser": (
        strategy(dense=VariableStrategy("gossip")),
        2,
        ("'dense': synchronizer 'gossip' is unknown (synchronizer: use one of none, rows, ",),
    ),
    "order": (
        strategy(dense=VariableStrategy("allreduce", reduction="ring", order=(0,))),
        2,
        ("'dense': order misses worker 1 (order: name all workers from 0 to 1)",),
    ),
    "order twice": (
        strategy(dense=VariableStrategy("allreduce", reduction="tree", order=(0, 1, 1))),
        2,
        ("'dense': order (0, 1, 1) is no order of 2 workers",),
    ),
    "order without a ring": (
        strategy(dense=VariableStrategy("allreduce", order=(1, 0))),
        2,
        ("'dense': order is for reductions 'ring', 'tree' and 'halving'",),
    ),
    "reduction": (
        strategy(dense=VariableStrategy("owner", owners=(0,), reduction="tree")),
        2,
        ("'dense': reduction 'tree' is for allreduce, not for owner",),
    ),
    "axis": (
        strategy(dense=VariableStrategy("owner", "block", (0, 1), axis=2)),
        2,
        ("'dense': axis 2 is missing: its shape is (4, 2) (axis: use 0 to 1)",),
    ),
    "short axis": (
        strategy(dense=VariableStrategy("scatter", "block", (0, 1, 2), axis=1)),
        3,
        ("'dense': it has 2 rows along axis 1, which cannot be cut in 3",),
    ),
    "axis of rows": (
        strategy(dense=VariableStrategy("owner", "block", (0, 1), axis=1)),
        2,
        ("'dense': its update works row by row, and cannot be cut along axis 1",),
    ),
    "shards": (
        strategy(dense=VariableStrategy("owner", "block", (0, 1), shards=(4, 4))),
        2,
        ("'dense': shards (4, 4) do not make up the 4 along axis 0",),
    ),
    "too many shards": (
        strategy(dense=VariableStrategy("owner", "block", (0, 1), shards=(1, 1, 2))),
        2,
        ("'dense': there are 3 sizes for 2 owners",),
    ),
    "memory": (
        strategy(dense=VariableStrategy("allreduce", memory="host")),
        2,
        ("'dense': allreduce has no shards that the host could keep",),
    ),
    "factors": (
        strategy(dense=VariableStrategy("factors")),
        2,
        ("'dense': factors sends factors, but its gradient is not a product of two",),
    ),
    "group": (
        strategy(
            dense=VariableStrategy("allreduce", group=1),
            whole=VariableStrategy("allreduce", average=False, group=1),
        ),
        2,
        ("'whole': group 1 mixes it with 'dense', of another average (group: ",),
    ),
    "late turn": (
        strategy(dense=VariableStrategy("allreduce", late_turn=-1)),
        2,
        ("'dense': late_turn -1 is negative (late_turn: use 0 or more)",),
    ),
    "staleness": (
        strategy(dense=VariableStrategy("allreduce", staleness=3)),
        2,
        ("'dense': staleness 3 is not supported (staleness: use 0)",),
    ),
    "none": (
        strategy(dense=VariableStrategy("none")),
        2,
        ("'dense': it receives a gradient but is not synchronised",),
    ),
    "several": (
        strategy(dense=None, table=VariableStrategy("none")),
        3,
        ("for 2 workers", "no decision for 'dense'", "'table': it receives a gradient"),
    ),
}


def test_a_good_strategy_fits_and_survives_json() -> None:
    verify(strategy(), VARIABLES, 2)
    assert Strategy.from_json(strategy().to_json()) == strategy()


@pytest.mark.parametrize("name", WRONG)
def test_a_strategy_that_does_not_fit_lists_every_problem(name: str) -> None:
    made, workers, fragments = WRONG[name]
    raised(lambda: verify(made, VARIABLES, workers), StrategyError, "does not fit", *fragments)


def test_shards_stay_in_the_memory_of_the_device() -> None:
    made = strategy(dense=VariableStrategy("owner", owners=(0,), memory="host"))
    verify(made, VARIABLES, 2)  # on CPUs it is the same memory
    raised(
        lambda: verify(made, VARIABLES, 2, device="cuda"),
        StrategyError,
        "'dense': workers compute on cuda, and their updates on shards do too",
        "(memory: use 'device')",
    )


def edited(**changes: Any) -> str:
    return json.dumps({**json.loads(strategy().to_json()), **changes})


TEXTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "not JSON": ("allreduce", ("This is no strategy", "malformed")),
    "truncated": (strategy().to_json()[:40], ("This is no strategy", "truncated")),
    "empty": ("", ("This is no strategy", "truncated")),
    "version": (edited(version=9), ("schema version 9; this parallax reads 2",)),
    "unknown field": (edited(colour=1), ("unknown field `colour`",)),
    "kind": (edited(replicas="2"), ("Expected `int`, got `str` - at `$.replicas`",)),
    "missing": ("{}", ("missing required field `fingerprint`",)),
    "partition": (
        edited(variables={"dense": {"synchronizer": "owner", "partition": "odd"}}),
        ("Invalid enum value 'odd'", "at `$.variables[...].partition`"),
    ),
    "owner": (
        edited(variables={"dense": {"synchronizer": "owner", "owners": [1.5]}}),
        ("Expected `int`, got `float`", ".owners[0]`"),
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_strategy_that_cannot_be_read_says_where(name: str) -> None:
    text, fragments = TEXTS[name]
    raised(lambda: Strategy.from_json(text), StrategyError, *fragments)


def test_the_plan_before_the_first_step() -> None:
    model, optimizer = linear()

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    runner = alone(step)
    raised(lambda: str(runner.plan), ConfigError, "There is no plan yet.", "first runner.run()")
    assert str(runner.graph) == "no step has run yet"
    runner.run(rows())
    assert "weight" in str(runner.plan)


@pytest.mark.parametrize("given", [4, ["localhost"]])
def test_a_resource_file_is_named(given: Any) -> None:
    case = lambda: parallax.api.get_runner(print, resource_info=given)  # noqa: E731
    raised(case, ConfigError, "resource_info names a file", 'resource_info="hosts.txt"')


def test_what_cannot_be_gone_through_is_refused() -> None:
    model, optimizer = linear()
    runner = alone(bad_steps.plain(model, optimizer))
    raised(lambda: runner.ahead(3), ConfigError, "goes through batches, found int")  # type: ignore[arg-type]


def test_a_strategy_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "strategy.json"
    raised(lambda: Strategy("", 1, {}).save(path), StrategyError, "cannot be written", "missing")


@pytest.mark.parametrize("settings", [{"run_option": 1}, {"compile": True}])
def test_no_name_is_suggested_for_what_is_none(settings: dict[str, Any]) -> None:
    error = raised(lambda: Config(**settings), ConfigError, "found")
    assert "did you mean" not in str(error)
