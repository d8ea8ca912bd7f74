"""A strategy by name, by object and as a file that a person reads, edits, compares and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import strategies
import torch
from errors_help import raised
from pool import Pool

from parallax import cli
from parallax.config import Config
from parallax.errors import ConfigError, StrategyError
from parallax.graph.analysis.variables import Variable
from parallax.strategy.builders import BUILDERS, StrategyBuilder, builder_names, find_builder
from parallax.strategy.compare import differences, shown
from parallax.strategy.data import Strategy, VariableStrategy
from parallax.strategy.verify import verify

CASE = ("sparse", "adam", "clip_norm")
VARIABLES = [
    Variable("table", (20, 4), torch.float32, True, lookups=("embedding",), sparse=True),
    Variable("w", (6, 4), torch.float32, True),
    Variable("idle", (3,), torch.float32, False),
]


def changed(strategy: Strategy, name: str, **fields: Any) -> Strategy:
    choice = msgspec.structs.replace(strategy.variables[name], **fields)
    return msgspec.structs.replace(strategy, variables={**strategy.variables, name: choice})


# -- Choosing one ---------------------------------------------------------------------------------


def test_a_builder_has_its_name_in_any_case() -> None:
    assert Config().run_option == "HYBRID"
    assert Config(strategy="hybrid").strategy == "HYBRID"
    assert Config(strategy="ps").run_option is None
    assert type(find_builder("hYbRiD")) is BUILDERS["HYBRID"]
    assert all(find_builder(name).title == name for name in builder_names())


CONFLICTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "both": (
        {"run_option": "PS", "strategy": "AR"},
        ("run_option='PS' and strategy='AR' both say", "run_option is the short form"),
    ),
    "near": ({"strategy": "hybird"}, ("no strategy builder 'hybird'", "did you mean 'HYBRID'?")),
    "far": ({"strategy": "zzz"}, ("no strategy builder 'zzz'", "There are HYBRID, PS, AR")),
    "class": ({"strategy": strategies.Failing}, ("the class Failing", "pass a builder: Failing()")),
    "kind": ({"strategy": 3}, ("strategy must be a builder, its name", "found 3")),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_a_wrong_choice_is_named(name: str) -> None:
    settings, fragments = CONFLICTS[name]
    raised(lambda: Config(**settings), ConfigError, *fragments)


def offer(place: Path, name: str, target: str) -> None:
    """Installs a package that offers a builder."""
    about = place / "others-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[parallax.builders]\n{name} = {target}\n")


def test_other_packages_offer_builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    offer(tmp_path, "failing", "strategies:Failing")
    assert "failing" in builder_names()
    assert isinstance(find_builder(str(Config(strategy="Failing").strategy)), strategies.Failing)
    offer(tmp_path, "absent", "nowhere:Builder")
    raised(lambda: find_builder("absent"), ConfigError, "nowhere:Builder", "cannot be imported")
    offer(tmp_path, "odd", "strategies:built")
    raised(lambda: find_builder("odd"), ConfigError, "strategies:built", "is no strategy builder")
    offer(tmp_path, "PS", "strategies:Failing")
    raised(lambda: find_builder("PS"), ConfigError, "one of parallax's own", "strategies:Failing")


# -- Running one ----------------------------------------------------------------------------------


def test_an_edited_file_is_run_as_it_is(pool: Pool, tmp_path: Path) -> None:
    dump = {"strategy": "HYBRID", "dump_dir": str(tmp_path)}
    found = pool.run(2, strategies.trained, dump, CASE)
    assert len({one["strategy"] for one in found}) == 1
    path = tmp_path / "strategy.json"
    made = Strategy.load(path)
    assert made == Strategy.from_json(found[0]["strategy"])

    edited = json.loads(path.read_text())
    (table,) = (name for name in edited["variables"] if name.endswith("table.weight"))
    (weight,) = (name for name in edited["variables"] if name.endswith("hidden.weight"))
    edited["variables"][table] = {"synchronizer": "allgather", "group": 5, "why": "by hand"}
    edited["variables"][weight].update(
        synchronizer="owner", partition="block", owners=[1, 0], group=7
    )
    path.write_text(json.dumps(edited))
    for one in pool.run(2, strategies.trained, {"strategy": str(path)}, CASE):
        ran = Strategy.from_json(one["strategy"])
        assert ran == Strategy.load(path)
        assert ran.variables[table] == VariableStrategy("allgather", group=5, why="by hand")
        assert one["difference"] < 1e-10
        assert "strategy.json on 2 workers" in one["title"]
    kinds = {difference.field for difference in differences(made, Strategy.load(path))}
    assert kinds == {"synchronizer", "partition", "owners", "group"}


def test_all_workers_hear_why_there_is_no_strategy(pool: Pool, tmp_path: Path) -> None:
    chief, other = pool.run(2, strategies.failed, {"strategy": strategies.Failing()}, CASE)
    assert chief == ("ZeroDivisionError", "no bandwidth")
    assert other[0] == "StrategyError"
    assert "Worker 0 could not make a strategy: ZeroDivisionError: no bandwidth" in other[1]
    absent = {"strategy": str(tmp_path / "absent.json")}
    for kind, text in pool.run(2, strategies.failed, absent, CASE):
        assert kind == "StrategyError"
        assert "absent.json' cannot be read: No such file" in text
    saved = tmp_path / "strategy.json"
    strategies.built("HYBRID", VARIABLES, 3).save(saved)
    for kind, text in pool.run(2, strategies.failed, {"strategy": str(saved)}, CASE):
        assert kind == "StrategyError"
        assert "it is for 3 workers, there are 2 (replicas: " in text
        assert "no variable 'table'" in text


# -- Reading one ----------------------------------------------------------------------------------


def test_a_file_is_short_and_survives(tmp_path: Path) -> None:
    strategy = strategies.built("HYBRID", VARIABLES, 2)
    strategy.save(tmp_path / "s.json")
    assert Strategy.load(tmp_path / "s.json") == strategy
    entries = json.loads((tmp_path / "s.json").read_text())
    assert entries["variables"]["w"] == {"synchronizer": "allreduce", "why": "dense"}
    assert entries["model"]["table"] == "float32 20×4"


def test_another_model_is_refused_with_what_differs() -> None:
    strategy = strategies.built("HYBRID", VARIABLES, 2)
    other = [msgspec_free(VARIABLES[0], (21, 4)), *VARIABLES[1:]]
    raised(
        lambda: verify(strategy, other, 2),
        StrategyError,
        "shapes or dtypes of the variables differ",
        "'table' is float32 21×4, and was float32 20×4",
    )
    odd = msgspec.structs.replace(strategy, fingerprint="0" * 16)
    raised(lambda: verify(odd, VARIABLES, 2), StrategyError, "variables in another order, or edite")


def msgspec_free(variable: Variable, shape: tuple[int, ...]) -> Variable:
    return Variable(variable.name, shape, variable.dtype, True, variable.lookups, sparse=True)


def test_a_wrong_entry_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    text = strategies.built("HYBRID", VARIABLES, 2).to_json().decode()
    path.write_text(text.replace('"owners": [', '"owners": "both", "x": ['))
    raised(
        lambda: Strategy.load(path),
        StrategyError,
        "s.json: This is no strategy: 'table': Expected `array`, got `str`",
        ".owners",
    )


def test_one_is_shown_and_two_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = strategies.built("HYBRID", VARIABLES, 2)
    other = changed(one, "w", synchronizer="owner", owners=(1,), why="another reason")
    assert [str(difference) for difference in differences(one, other)] == [
        "w: synchronizer allreduce → owner",
        "w: owners none → 1",
    ]
    assert differences(one, changed(one, "w", why="another reason")) == []
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    one.save(a)
    other.save(b)
    assert cli.main(["strategy", "show", str(a)]) == 0
    out = capsys.readouterr().out
    assert out.rstrip() == shown(one)
    for text in ("for 2 workers", "1 rows, 1 allreduce, 1 none", "float32 20×4", "0-1", "cyclic"):
        assert text in out
    assert cli.main(["strategy", "diff", str(a), str(b)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{a} → {b}: 1 of 3 variables differ",
        "w",
        "  synchronizer: allreduce → owner",
        "  owners: none → 1",
    ]
    assert cli.main(["strategy", "diff", str(a), str(a)]) == 0
    assert "decide the same" in capsys.readouterr().out
    assert cli.main(["strategy", "show", str(tmp_path / "absent.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert cli.main(["strategy", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(builder_names())
    assert all(len(line.split()) > 3 for line in listed)


def test_every_builder_says_what_it_does() -> None:
    for name, builder in BUILDERS.items():
        assert issubclass(builder, StrategyBuilder)
        assert builder.name == name
        assert builder.__doc__
