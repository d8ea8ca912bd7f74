"""The comparison of systems: its parts, and a small run of it on a virtual cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from benchmarks import builders, compare
from benchmarks.builders import AUTO
from benchmarks.comparison import drawing, report
from benchmarks.comparison.limits import Lookups, least_bytes, lookups_of_step
from benchmarks.comparison.report import Comparison, Row
from benchmarks.comparison.rounds import households
from benchmarks.comparison.values import Play, Trial, Turn
from benchmarks.dialogue import Asked, SilentError
from benchmarks.namespaces import missing_requirement
from benchmarks.peers.systems import CAPTURED, COMPUTATION, HYBRID, SYSTEMS
from benchmarks.workloads import QUICK, WORKLOADS, dlrm, make_step, table_rows

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
ROOT = Path(__file__).parents[1]
MISSING = missing_requirement()


@pytest.mark.parametrize("name", QUICK)
def test_a_workload_trains(name: str) -> None:
    torch.manual_seed(0)
    training = QUICK[name]()
    model = training.model(False)
    before = [value.detach().clone() for value in model.parameters()]
    step = make_step(training, model, model, training.optimizer(model.parameters()))
    assert bool(step(*training.batch()).isfinite())
    pairs = zip(before, model.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in pairs)


def test_sizes_are_those_of_the_comparison() -> None:
    training = WORKLOADS["dlrm"]()
    torch.manual_seed(0)
    numbers, ids, clicks = training.batch()
    assert (len(ids), len(numbers), len(clicks)) == (26, 256, 256)
    assert sum(wanted.shape[1] for wanted in ids) == 117
    sizes = table_rows(26, 4_000_000)
    assert (sum(sizes), sizes) == (4_000_000, sorted(sizes))
    assert all(int(wanted.max()) < size for wanted, size in zip(ids, sizes, strict=True))
    tokens, _ = WORKLOADS["lm-50k"]().batch()
    assert tokens.shape == (32, 20)
    assert [SYSTEMS[name].fits(WORKLOADS["vgg"]()) for name in ("ddp", "ddp-sparse")] == [1, 0]


def test_lookups_are_seen_in_the_step() -> None:
    torch.manual_seed(0)
    training = QUICK["dlrm"]()
    model, batch = training.model(True), training.batch()
    seen = lookups_of_step(training, model, batch)
    assert list(seen) == list(training.tables)
    for lookups, ids in zip(seen.values(), batch[1], strict=True):
        assert lookups.ids.tolist() == ids.unique().tolist()
        assert (lookups.lookups, lookups.results) == (ids.numel(), len(ids))
    training = QUICK["lm-50k"]()
    tokens, targets = training.batch()
    seen = lookups_of_step(training, training.model(True), (tokens, targets))
    assert seen["embedding"].ids.tolist() == tokens.unique().tolist()
    assert seen["softmax_bias"].lookups == targets.numel() + 16


def test_least_bytes_take_the_cheapest_way_of_each_table() -> None:
    training = dlrm(tables=3, rows=10_000, features=8, lookups=6, batch=4, hidden=(8,))
    model = training.model(False)
    small, middle, large = (len(model.get_parameter(f"{name}.weight")) for name in training.tables)
    some = torch.arange(large // 2)
    few = torch.arange(3)
    worker = {
        "tables.0": Lookups(torch.arange(small), 10**6, 10**6),  # AllReduce
        "tables.1": Lookups(some[: middle // 4], 50, 2),  # sums
        "tables.2": Lookups(few, 50, 50),  # rows, the same of both workers of a host
    }
    other = {**worker, "tables.2": Lookups(few + 1, 50, 50)}
    dense = sum(
        value.numel() * 4 for name, value in model.named_parameters() if "tables" not in name
    )
    ways = 2 * small * 32 + (100 * 4 + 4 * 2 * 32) + 4 * (4 + 2 * 32)
    assert least_bytes(training, model, [[worker, other]] * 2) == (2 * dense + ways) / 2
    assert least_bytes(training, model, [[worker, other]]) == 0


def turns(system: str, *seconds: float) -> list[Turn]:
    return [Turn(system, number, each, each, 10.0, 20.0) for number, each in enumerate(seconds)]


def test_ratios_are_of_rounds_in_which_both_took_part() -> None:
    played = turns(HYBRID, 1.0, 2.0, 1.0, 1.0) + turns("ddp", 3.0, 6.0)
    played += turns(COMPUTATION, 0.5, 1.0, 0.5, 0.25)
    trial = Trial([0.5], 1.0, 1, 2, 3, 4.0)
    trials: dict[str, Trial | str] = {HYBRID: trial, "ddp": trial, "fsdp2": "did not end"}
    names = [HYBRID, "ddp", "fsdp2"]
    rows = {row.system: row for row in report.compare(names, trials, [played], {})}
    assert (rows["ddp"].ratio, rows["ddp"].seconds, rows["ddp"].rounds) == (3.0, 4.5, 2)
    assert rows["fsdp2"].failure == "did not end"
    _, lost, _ = report.compare(names, trials, [played], {"ddp": "worker 1 ended with 1"})
    assert (lost.failure, lost.peak_bytes, lost.rounds) == ("worker 1 ended with 1", 3, 0)
    assert report.reached(played, wire=0.0) == 0.5
    assert report.reached(played, wire=0.8) == pytest.approx(0.8)


def test_builders_far_from_hybrid_take_no_turns() -> None:
    times = {HYBRID: 1.0, COMPUTATION: 0.1, AUTO: 1.4, "parallax-ps": 1.6}
    trials: dict[str, Trial | str] = {
        name: Trial([0.5], seconds, 1, 2, 3, 4.0) for name, seconds in times.items()
    }
    fit = {name: trial for name, trial in trials.items() if isinstance(trial, Trial)}
    playing = list(compare._near(fit))
    assert playing == [HYBRID, COMPUTATION, AUTO]


def test_turns_of_one_strategy_are_put_together() -> None:
    other, tried = "parallax-horovod", "parallax-ps"
    times = {HYBRID: [1.0, 2.0], AUTO: [0.8, 1.6], other: [0.6, 1.5]}
    trial = Trial([0.5], 1.0, 1, 2, 3, 4.0)
    trials: dict[str, Trial | str] = {**dict.fromkeys(times, trial)}
    trials[tried] = msgspec.structs.replace(trial, seconds=1.6)
    played = [turn for name, seconds in times.items() for turn in turns(name, *seconds)]
    strategies = {HYBRID: "1f", AUTO: "1f", other: "2e"}
    played = [msgspec.structs.replace(t, strategy=strategies.get(t.system, "")) for t in played]
    rows = report.compare([*times, tried], trials, [played], {})
    result = Comparison("lm-50k", 4, 1, "1gbit", rows, turns=[played])
    # Rounds: 0.9 against 0.6, and 1.8 against 1.5.
    assert builders.table(result, AUTO) == (
        "**lm-50k: 4 hosts x 1, 1gbit.** parallax-auto takes 1.35 (1.20 - 1.50) of the time of the"
        " best other strategy, parallax-horovod's; it has the strategy of parallax-hybrid.\n"
        "\n"
        "| systems of one strategy | ms/step | of the fastest | MB sent |\n"
        "| --- | --- | --- | --- |\n"
        "| parallax-horovod | 1,050.0 | 1.00 | 0.00 |\n"
        "| parallax-hybrid, parallax-auto | 1,350.0 | 1.33 | 0.00 |\n"
        "| parallax-ps | 1,600.0 | 2.13 | tried only |\n"
    )


def test_a_table_says_what_failed_and_what_the_limit_is() -> None:
    row = Row(HYBRID, "", 0.2, 0.19, 0.05, 1.0, 1.0, 1.0, 3, 2.5e6, 3e6, 10**9, [0.5])
    failed = Row("fsdp2", "did not end within 9 s")
    result = Comparison("dlrm", 4, 1, "1gbit", [row, failed], 0.1, 2e6, 0.016, 0.5)
    assert report.markdown(result) == (
        "**dlrm: 4 hosts x 1, 1gbit.** Limit: max(computation 100 ms, 2.00 MB that must cross ="
        " 16 ms); parallax-hybrid reaches 50% of it.\n"
        "\n"
        "| system | ms/step | predicted | CPU ms | time / hybrid | quartiles | rounds | MB sent"
        " | MB most | peak MB |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| parallax-hybrid | 200.0 | 190.0 (-5%) | 50.0 | 1.00 | 1.00 - 1.00 | 3 | 2.50 | 3.00"
        " | 1,000 |\n"
        "| fsdp2 | fails | - | - | - | - | - | - | - | - |\n"
        "\n"
        "fsdp2: did not end within 9 s\n"
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.table(result))
    assert "did not end within 9 s" in console.export_text()


def test_a_plot_is_drawn_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        Row(HYBRID, "", 0.2, 0.19, 0.05, 1.0, 1.0, 1.0, 3, 2.5e6, 3e6, 10**9, [0.5]),
        Row("ddp", "", 0.5, 0.0, 0.1, 2.5, 2.25, 2.75, 3),
        Row("zero1", "", 1.0, 0.0, 0.0, 5.0),  # tried by itself only
        Row("fsdp2", "did not end within 9 s"),
    ]
    for number, rate in enumerate(("1gbit", "100mbit", None)):
        result = Comparison("dlrm", 4, 1, rate, rows, 0.1, 2e6, 0.016, 0.5)
        report.write_json([result], tmp_path / f"{number}.json")
    picture = tmp_path / "plot.svg"
    files = [str(tmp_path / f"{number}.json") for number in range(3)]
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(SystemExit):
            drawing.main([*files, "--output", str(picture)])
        assert "no plot: matplotlib is not installed" in capsys.readouterr().err
        return
    drawing.main([*files, "--output", str(picture)])
    drawn = picture.read_text(encoding="utf-8")
    assert "dlrm, 4 x 1, 100mbit: HYBRID 200 ms" in drawn
    assert drawn.count(">ddp<") == 3
    assert drawn.count(">2.50<") == 3
    assert "fsdp2" not in drawn


def test_systems_take_turns_together_as_far_as_memory_goes() -> None:
    peaks = {HYBRID: 3, "parallax-ps": 2, COMPUTATION: 2, "ddp": 5, "ddp-sparse": 3}
    # Each holds one less than its peak, and one of it is the process's own.
    fit = {name: Trial([], 1.0, 1, peak - 1, peak, 0.0) for name, peak in peaks.items()}
    # The first two share processes: 1 and 1, and 0 and 1, 1 and 3, 1 and 1; and one more at a peak.
    assert compare._groups(fit, 2, 2 * 10.0) == [list(peaks)]
    assert compare._groups(fit, 2, 2 * 9.0) == [list(peaks)[:-1], [HYBRID, "ddp-sparse"]]
    assert compare._groups(fit, 2, 2 * 7.0) == [
        [HYBRID, "parallax-ps", COMPUTATION],
        [HYBRID, "ddp"],
        [HYBRID, "ddp-sparse"],
    ]


def test_parallax_shares_processes_and_others_have_their_own() -> None:
    names = [HYBRID, COMPUTATION, CAPTURED, "ddp", "ddp-sparse", AUTO]
    assert households(names) == {
        "parallax": [HYBRID, CAPTURED, AUTO],
        COMPUTATION: [COMPUTATION],
        "ddp": ["ddp"],
        "ddp-sparse": ["ddp-sparse"],
    }


ANSWERING = """
from benchmarks.comparison.values import Play
from benchmarks.dialogue import Asker

asker = Asker()
print("what is printed is no answer")
asker.answer([1, 2])
while (question := asker.question(Play)) is not None:
    if not question.steps:
        raise ValueError("no steps")
    asker.answer({question.system: question.steps})
"""


def answering(directory: Path, text: str = ANSWERING) -> Asked:
    log, pipe = directory / "log", subprocess.PIPE
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", text], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=said
        )
    return Asked([process], [log])


def test_processes_answer_what_they_are_asked(tmp_path: Path) -> None:
    with contextlib.closing(answering(tmp_path)) as asked:
        assert asked.answer(list[int], 60.0) == [1, 2]
        assert asked.ask(Play("ddp", 0, 5), dict[str, int], 60.0) == {"ddp": 5}
        with pytest.raises(SilentError, match="did not answer within 0 s"):
            asked.answer(int, 0.01)
        assert asked.ask(Play("ddp", 1, 6), dict[str, int], 60.0) == {"ddp": 6}
        with pytest.raises(SilentError, match=r"^worker 0 ended with 1: ValueError: no steps$"):
            asked.ask(Play("ddp", 2, 0), int, 60.0)
        with pytest.raises(SilentError, match=r"^worker 0 ended with 1: ValueError: no steps$"):
            asked.ask(Play("ddp", 3, 1), int, 60.0)
    assert "what is printed is no answer" in (tmp_path / "log").read_text()


@pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
def test_without_a_base_there_is_no_comparison() -> None:
    command = [sys.executable, "-m", "benchmarks.compare", "--quick", "--hosts", "2"]
    command += ["--workload", "dlrm", "--limit", "0.01"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2
    assert done.stderr == (
        "dlrm: parallax-hybrid, with which all is compared, did not answer within 0 s\n"
        "  What to do: give it more time (--limit), or a machine with more free cores and memory\n"
    )


@pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
@pytest.mark.long
def test_a_small_comparison_gives_sane_numbers(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.compare", "--quick", "--hosts", "2"]
    command += ["--rate", "100mbit", "--workload", "dlrm", "--rounds", "3", "--json", str(file)]
    done = subprocess.run(
        [*command, "--system", "ddp-sparse"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = msgspec.json.decode(file.read_bytes(), type=list[Comparison])
    rows = {row.system: row for row in result.rows}
    assert list(rows) == [HYBRID, COMPUTATION, CAPTURED, "ddp-sparse"]
    assert [row.failure for row in result.rows] == ["", "", "", ""]
    # The same training: the same losses. Alone, each worker sees its own batches only.
    assert rows["ddp-sparse"].losses == pytest.approx(rows[HYBRID].losses, rel=1e-5)
    assert rows[COMPUTATION].losses[0] == pytest.approx(rows[HYBRID].losses[0], rel=1e-5)
    assert rows[COMPUTATION].losses[3] != pytest.approx(rows[HYBRID].losses[3], rel=1e-5)
    # What must cross does, in every system that trains together.
    assert 0 < result.cross_bytes < min(rows[HYBRID].sent_bytes, rows["ddp-sparse"].sent_bytes)
    assert rows[COMPUTATION].sent_bytes < rows[HYBRID].sent_bytes
    assert all(row.most_bytes >= row.sent_bytes for row in result.rows)
    assert all(row.cpu_seconds > 0 for row in result.rows)
    assert all(row.rounds == 3 and row.seconds > 0 for row in result.rows)
    assert all(row.peak_bytes > 10**8 for row in result.rows)
    assert (rows[HYBRID].ratio, rows[HYBRID].low, rows[HYBRID].high) == (1.0, 1.0, 1.0)
    assert result.wire == pytest.approx(result.cross_bytes * 8 / 100e6)
    assert result.share > 0
    assert result.captured_share > 0
    assert "parallax-hybrid reaches" in done.stdout
    assert "with its own computation." in " ".join(done.stdout.split())
