"""The paper's tables: their parts, and small ones on a virtual cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import by_host
import msgspec
import pytest
from pool import HOSTS, Pool

from benchmarks import paper_tables
from benchmarks.comparison.report import Comparison, Row
from benchmarks.comparison.values import Turn
from benchmarks.namespaces import missing_requirement
from benchmarks.paper_tables import AR, CASES, MODELS, PS
from benchmarks.peers.systems import SYSTEMS, WHOLE
from benchmarks.virtual_cluster import VirtualClusterError

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
ROOT = Path(__file__).parents[1]
MISSING = missing_requirement()


def comparison(workload: str, **seconds: tuple[float, ...]) -> Comparison:
    names = {"ps": PS, "ar": AR} | {case.strip("+").lower(): one for case, one in CASES.items()}
    turns = [
        Turn(names[name], number, each, each, 2e6, 3e6)
        for name, times in seconds.items()
        for number, each in enumerate(times)
    ]
    rows = [Row(names[name], sent_bytes=2.5e6) for name in seconds]
    return Comparison(workload, 4, 2, "100mbit", rows, 0.1, 2e6, 0.016, 0.5, [turns])


def test_tables_set_our_ratios_beside_the_paper() -> None:
    dense = comparison("paper-resnet", ps=(4.0, 1.0, 2.0), ar=(2.0, 0.5, 1.0))
    sparse = comparison(
        "paper-lm",
        ps=(1.0, 1.0),
        ar=(3.0, 3.0),
        base=(1.0, 1.0),
        hyb=(0.5, 0.5),
        la=(0.4, 0.4),
        opau=(0.32, 0.32),
        opsw=(0.3125, 0.3125),
        dh=(0.25, 0.25),
    )
    text = paper_tables.tables([MODELS["resnet"], MODELS["lm"]], [dense, sparse], quick=True)
    lines = text.splitlines()
    assert lines[0].startswith("4 hosts x 2, 100mbit")
    # Eight workers with two images each: 16 images in 2 and in 1 seconds.
    assert lines[4].startswith("| ResNet | 0.0")
    assert lines[4].endswith(
        "| 8 images/s | 16 | 0.50 (0.50 - 0.50) | 26 / 0 / 0 | 6.0k | 8.1k | 0.74 |"
    )
    assert "3.00 (3.00 - 3.00) | 9 / 814 / 6.5 | 101.2k | 39.0k | 2.59 |" in lines[5]
    assert lines[7:] == [
        "| table 4 | BASE | +HYB | +LA | +OPAU | +OPSW | +DH |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| LM: words/s | 640 | 1,280 | 1,600 | 2,000 | 2,048 | 2,560 |",
        "| LM: of BASE | 1.00 | 2.00 (2.00 - 2.00) | 2.50 (2.50 - 2.50) | 3.12 (3.12 - 3.12) "
        "| 3.20 (3.20 - 3.20) | 4.00 (4.00 - 4.00) |",
        "| LM: MB sent by a host | 2.50 | 2.50 | 2.50 | 2.50 | 2.50 | 2.50 |",
        "| LM: paper, words/s | 101k | 112k | 251k | 259k | 276k | - |",
        "| LM: paper, of BASE | 1.00 | 1.11 | 2.49 | 2.56 | 2.73 | - |",
        "",
        *paper_tables.NOTES.splitlines(),
    ]


def test_systems_that_did_not_meet_have_no_ratio() -> None:
    result = comparison("paper-resnet", ps=(1.0,))
    failed = msgspec.structs.replace(result, rows=[Row(AR, failure="did not end within 9 s")])
    with pytest.raises(VirtualClusterError, match=f"{AR}: did not end within 9 s"):
        paper_tables.tables([MODELS["resnet"]], [failed], quick=True)


def test_parameters_are_counted_as_in_the_paper() -> None:
    dense, sparse, touched = paper_tables.parameters("paper-resnet", quick=True)
    assert (dense > 0, sparse, touched) == (True, 0, 0)
    dense, sparse, touched = paper_tables.parameters("paper-lm", quick=False)
    assert sparse == pytest.approx(20_000 * (256 + 128 + 1) / 1e6)
    # The paper's touches 0.72 parameters of its tables for each dense one, its translator 0.07.
    assert 0.4 < touched / dense < 0.9
    dense, sparse, touched = paper_tables.parameters("paper-nmt", quick=False)
    assert 0.05 < touched / dense < 0.15


def test_parts_of_parallax_are_compared_when_asked_for() -> None:
    assert not {PS, AR, *CASES.values()} & set(WHOLE)
    assert set(WHOLE) < set(SYSTEMS)


@pytest.mark.parametrize(
    ("system", "rows", "dense"),
    [
        (CASES["+HYB"], "flat", "flat"),
        (CASES["+LA"], "hosts", "flat"),
        (CASES["+OPAU"], "hosts", "flat"),
        (CASES["+OPSW"], "hosts", "flat"),
        (CASES["+DH"], "hosts", "hosts"),
    ],
)
def test_each_case_has_its_levels(pool: Pool, system: str, rows: str, dense: str) -> None:
    _, levels, *_ = SYSTEMS[system].option.split("/")
    for found in pool.run(HOSTS[0], by_host.levels_of_case, levels):
        assert found == {"rows": rows, "allreduce": dense}


@pytest.mark.parametrize("builder", ["PS", "HYBRID"])
def test_placement_changes_bytes_and_no_numbers(pool: Pool, builder: str) -> None:
    """What +OPAU and +OPSW spare, of a model that casts its rows and clips all gradients."""

    def of(place: str) -> tuple[list[list[float]], dict[str, float]]:
        found = pool.run(2, by_host.placement_of_case, builder, place)
        names = {name for _, sent in found for name in sent}
        together = {name: sum(sent.get(name, 0.0) for _, sent in found) for name in names}
        return [losses for losses, _ in found], together

    losses, placed = of("")
    losses_pulled, pulled = of("pulled")
    losses_unplaced, unplaced = of("unplaced")
    assert losses == losses_pulled == losses_unplaced
    assert not {"rows: aggregated", "dense: aggregated"} & set(placed)
    assert pulled == placed | {"rows: pull": 2 * placed["rows: pull"]}
    extra = {"rows: aggregated"} | ({"dense: aggregated"} if builder == "PS" else set())
    assert {name: count for name, count in unplaced.items() if name not in extra} == pulled
    assert unplaced["rows: aggregated"] > 0
    if builder == "PS":
        # A sum of gradients is as large as the values that come after it, and sizes are told.
        assert unplaced["dense: aggregated"] >= placed["dense: pull"]


@pytest.mark.long
@pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
def test_small_tables_are_made(tmp_path: Path) -> None:
    file, text = tmp_path / "figures.json", tmp_path / "tables.md"
    command = [sys.executable, "-m", "benchmarks.paper_tables", "--quick", "--hosts", "2"]
    command += ["--rounds", "3", "--model", "lm", "--json", str(file), "--markdown", str(text)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = msgspec.json.decode(file.read_bytes(), type=list[Comparison])
    rows = {row.system: row for row in result.rows}
    assert [row.failure for row in result.rows] == [""] * len(rows)
    # A ring crosses to each other host once, pushes to owners once for each worker.
    assert rows[CASES["+HYB"]].sent_bytes < rows[CASES["BASE"]].sent_bytes
    # Aggregated gradients go to all workers before their operations are placed.
    assert rows[CASES["+OPAU"]].sent_bytes < rows[CASES["+LA"]].sent_bytes
    assert rows[PS].sent_bytes < rows[CASES["BASE"]].sent_bytes
    assert text.read_text() in done.stdout
    assert "| LM: of BASE | 1.00 |" in done.stdout
