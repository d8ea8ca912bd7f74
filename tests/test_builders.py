"""Builders: what each decides, and that all give the numbers of one device."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import builders
import equality
import pytest
import torch
from errors_help import raised, warnings_of_parallax
from pool import Pool
from strategies import built
from test_golden_graphs import captured_with_state, text

from parallax.cluster.network import Level, Network
from parallax.errors import ConfigError
from parallax.graph.analysis.variables import Variable
from parallax.rewrite.pipeline import rewrite
from parallax.rewrite.timeline import timeline
from parallax.runtime.predictions.forecast import Forecast
from parallax.strategy.builders import BUILDERS, ClusterFacts, GraphFacts
from parallax.strategy.builders.all_reduce import AllReduce
from parallax.strategy.builders.auto import Auto, ways
from parallax.strategy.builders.common import OwnerQueue
from parallax.strategy.builders.encoded import Encoded
from parallax.strategy.builders.factors import Poseidon
from parallax.strategy.builders.horovod import Horovod
from parallax.strategy.builders.hybrid import Hybrid
from parallax.strategy.builders.parameter_server import BytePS
from parallax.strategy.cost import bytes_per_step
from parallax.strategy.data import Strategy, VariableStrategy
from parallax.strategy.messages import merge_messages
from parallax.strategy.timeline import Speed, StepTime, predict
from parallax.strategy.verify import verify

# SGD with momentum, and Adam behind a clipped norm, of a model with and without a table.
CASES = [("sparse", "momentum", "none"), ("several", "adam", "clip_norm")]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_every_builder_equals_one_device(pool: Pool, size: int) -> None:
    wanted = [(name, CASES[(i + size) % 2]) for i, name in enumerate(BUILDERS)]
    for found in pool.run(size, builders.compare, wanted):
        assert [(one["builder"], one["case"]) for one in found] == wanted
        assert [one for one in found if not one["difference"] < 1e-10] == []


# The long checks have each builder at one size, the exhaustive ones at all.
SIZES = (1, 2, 3, 4)
CELLS = [
    pytest.param(
        name,
        size,
        marks=pytest.mark.long if SIZES[place % 4] == size else pytest.mark.exhaustive,
    )
    for place, name in enumerate(BUILDERS)
    for size in SIZES
]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("name", "size"), CELLS)
def test_every_builder_with_every_optimizer(pool: Pool, name: str, size: int) -> None:
    # Each optimizer once; the model and what is between take turns.
    by_optimizer: dict[tuple[bool, str], list[builders.Case]] = {}
    for case in equality.all_cases():
        by_optimizer.setdefault((case[0] == "lazy", case[1]), []).append(case)
    turn = 5 * size + list(BUILDERS).index(name)
    cases = [found[(turn + i) % len(found)] for i, found in enumerate(by_optimizer.values())]
    for found in pool.run(size, builders.compare, [(name, case) for case in cases]):
        assert len(found) == len(cases)
        assert [one for one in found if not one["difference"] < 1e-10] == []


def dense(name: str, *shape: int) -> Variable:
    return Variable(name, shape, torch.float32, True)


TABLE = Variable("table", (100, 4), torch.float32, True, lookups=("embedding",), sparse=True)


def groups(strategy: Strategy) -> list[int]:
    return [choice.group for choice in strategy.variables.values()]


def owners(strategy: Strategy) -> list[tuple[int, ...]]:
    return [choice.owners for choice in strategy.variables.values()]


def test_all_reduce_counts_gradients_from_the_last() -> None:
    variables = [dense(str(index), 4) for index in range(5)]
    facts, cluster = GraphFacts.of([TABLE, *variables]), ClusterFacts(2)
    assert groups(AllReduce(2).build(facts, cluster)) == [4, 3, 2, 2, 1, 1]
    assert groups(AllReduce(1).build(facts, cluster)) == [6, 5, 4, 3, 2, 1]
    assert groups(AllReduce().build(facts, cluster)) == [2, 1, 1, 1, 1, 1]
    raised(lambda: AllReduce(0), ConfigError, "chunk must be at least 1, found 0")


def test_horovod_fills_its_buffer() -> None:
    variables = [dense("a", 10), dense("b", 30), dense("c", 100), dense("d", 5), dense("e", 6)]
    facts, cluster = GraphFacts.of(variables), ClusterFacts(2)
    assert groups(Horovod(160).build(facts, cluster)) == [3, 3, 2, 1, 1]
    assert groups(Horovod(0).build(facts, cluster)) == [5, 4, 3, 2, 1]
    raised(lambda: Horovod(-1), ConfigError, "fusion_bytes must not be negative, found -1")


def test_balanced_servers_fill_up() -> None:
    variables = [dense("a", 10), dense("b", 7), dense("c", 6), dense("d", 5), dense("e", 4)]
    assert owners(built("BalancedPS", variables, 2)) == [(0,), (1,), (1,), (0,), (1,)]


def test_partitioned_servers_take_the_smallest_divisor() -> None:
    variables = [dense("a", 9, 2), dense("b", 8, 2), dense("c", 7, 2), dense("d", 1)]
    # Largest first: 9 = 3·3 in three; 8 in two; 7 has no divisor up to 4.
    assert owners(built("PartitionedPS", variables, 4)) == [(0, 1, 2), (0, 3), (1,), (2,)]


def test_uneven_shards_fill_owners_up() -> None:
    table, large = dense("t", 1000, 2000), dense("large", 3000, 1000)
    odd, small = dense("odd", 1001, 3001), dense("small", 10)
    strategy = built("UnevenPS", [large, table, odd, small], 4)
    verify(strategy, [large, table, odd, small], 4)
    loads = [0.0] * 4
    for variable in (large, table, odd, small):
        choice = strategy.variables[variable.name]
        for owner, rows in zip(choice.owners, choice.shards or [variable.rows], strict=True):
            loads[owner] += variable.bytes * rows / variable.rows
    assert max(loads) - min(loads) < 2 * 3001 * 4 + 40  # a row or two
    assert sum(strategy.variables["odd"].shards) == 1001
    # A fourth worker that has enough already gets nothing.
    queue = OwnerQueue(3)
    queue.next(100)
    assert queue.filled(60, 6) == {1: 3, 2: 3}
    assert queue.filled(90, 9) == {1: 4, 2: 5}


def test_a_random_axis_is_cut_by_its_smallest_divisor() -> None:
    variables = [dense("a", 6, 35), dense("b", 1, 9), dense("c", 7, 1), dense("d", 17), dense("e")]
    strategy = built("RandomAxis", variables, 2)
    verify(strategy, variables, 2)
    assert strategy == built("RandomAxis", variables, 2)
    cut = {name: (one.axis, one.pieces) for name, one in strategy.variables.items()}
    assert cut["a"] in ((0, 2), (1, 5))
    assert {n: cut[n] for n in "bcde"} == {"b": (1, 3), "c": (0, 7), "d": (0, 1), "e": (0, 1)}
    axes = {built("RandomAxis", [dense(str(n), 4, 4)], 2).variables[str(n)].axis for n in range(20)}
    assert axes == {0, 1}


def test_parts_of_a_fixed_size() -> None:
    variables = [dense("a", 1000), dense("b", 500), dense("c", 100), dense("d", 2, 10_000)]
    strategy = BytePS(1000).build(GraphFacts.of(variables), ClusterFacts(3))
    # 80 parts but two rows; 4 and 2 parts; one.
    assert owners(strategy) == [(0, 1, 2), (0, 2), (2,), (0, 1)]
    assert strategy.variables["a"].why == "dense, in 4 parts of 0.001 MB"


def layer(name: str, m: int, n: int, samples: int) -> Variable:
    """The weight of a linear layer."""
    return replace(
        dense(name, m, n),
        factors=(("g", "x"),),
        factor_rows=samples,
        factor_widths=(m, n),
        factor_operations=2 * samples * m * n,
    )


def test_poseidon_chooses_as_its_algorithm_does() -> None:
    """The example of the thesis, section 3.3: batch 32, eight nodes; and its figure 3.4's trend."""
    eight = ClusterFacts(8)
    graph = GraphFacts.of([layer("fc", 4096, 4096, 32), dense("conv", 64, 3, 3, 3)])
    chosen = Poseidon().build(graph, eight).variables
    assert chosen["fc"].synchronizer == "factors"
    assert chosen["fc"].why == "3,670,016 values by factors, 58,720,256 by servers"
    assert (chosen["conv"].synchronizer, len(chosen["conv"].owners)) == ("owner", 1)
    # GoogLeNet's thin layer with a large batch on 16 nodes goes to servers (section 3.5.3).
    thin = GraphFacts.of([layer("fc", 1000, 1024, 128)])
    chosen = Poseidon().build(thin, ClusterFacts(16)).variables
    assert (chosen["fc"].synchronizer, len(chosen["fc"].owners)) == ("owner", 3)
    # Equal counts go by factors: 2K(P-1)(M+N) = 4MN(P-1)/P at K(M+N)P = 2MN.
    edge = [layer("fc", 64, 64, samples) for samples in (16, 17)]
    built_at = [Poseidon().build(GraphFacts.of([one]), ClusterFacts(4)) for one in edge]
    assert [s.variables["fc"].synchronizer for s in built_at] == ["factors", "owner"]


def test_project_adam_sends_factors_to_owners() -> None:
    graph = [layer("a", 100, 100, 4), dense("b", 50), layer("c", 90, 100, 4)]
    chosen = built("ProjectAdam", graph, 2).variables
    assert [one.synchronizer for one in chosen.values()] == ["factor_push", "owner", "factor_push"]
    assert [one.owners for one in chosen.values()] == [(0,), (1,), (1,)]


def test_the_rule_of_the_paper() -> None:
    chosen = built("Parallax", [TABLE, dense("w", 3, 4)], 2).variables
    assert [choice.synchronizer for choice in chosen.values()] == ["rows", "allreduce"]


# 1 MB a second, and 10 ms until an exchange of nothing is over.
SLOW = Network(Level(4, 1e6, 0.01))


def auto(variables: list[Variable], predict: Any = None) -> Strategy:
    return Auto().build(GraphFacts.of(variables, predict), ClusterFacts(4, network=SLOW))


def test_auto_takes_the_cheapest_way_and_says_what_it_costs() -> None:
    cold = replace(TABLE, shape=(100_000, 16), sparsity=0.01)
    hot = replace(TABLE, name="hot", shape=(50_000, 16), sparsity=1.0)
    strategy = auto([cold, hot, dense("w", 1000, 100)])
    chosen = strategy.variables
    kinds = {name: choice.synchronizer for name, choice in chosen.items()}
    assert kinds == {"table": "rows", "hot": "allreduce", "w": "allreduce"}
    # 3/4 of 1000 rows of 64 bytes both ways, and their ids; all 3/4 of 400 kB both ways.
    assert chosen["table"].why == "99 ms; allgather 216 ms"
    assert chosen["w"].why.startswith("600 ms; ")
    verify(strategy, [cold, hot, dense("w", 1000, 100)], 4)


# A hundred million operations a second: a product over 4 samples of 1,000 x 1,000 takes 80 ms.
SPEED = Speed(1e8, 1e9, 0.0)


def hybrid(
    variables: list[Variable], faster: float = 0.5, speed: Speed = SPEED, step: float = 1.0
) -> list[str]:
    """What HYBRID chooses, if a step with factors takes so much of the time of one without."""

    def predicted(strategy: Strategy) -> StepTime:
        kinds = {choice.synchronizer for choice in strategy.variables.values()}
        return StepTime(step * (faster if "factors" in kinds else 1.0), 0.0, 0.0)

    cluster = ClusterFacts(4, network=SLOW, speed=speed)
    built = Hybrid().build(GraphFacts.of(variables, predicted), cluster)
    return [choice.synchronizer for choice in built.variables.values()]


def test_hybrid_sends_factors_where_these_are_faster_with_all_products() -> None:
    small, large, thin = layer("a", 20, 30, 4), layer("b", 1000, 1000, 4), dense("c", 50)
    # 2,400 bytes to three others spare 1.2 of 3.6 ms; 96 kB spare 5.9 s, products take 0.24 s.
    assert hybrid([small, large, thin]) == ["factors", "factors", "allreduce"]
    # The same bytes, but 300 times the operations: a convolution over many pixels.
    heavy = replace(large, factor_operations=300 * large.factor_operations)
    assert hybrid([small, heavy, thin]) == ["factors", "allreduce", "allreduce"]


def test_hybrid_keeps_allreduce_unless_the_whole_step_is_faster() -> None:
    variables = [layer("b", 1000, 1000, 4), dense("c", 50)]
    assert hybrid(variables, 0.9) == ["factors", "allreduce"]
    assert hybrid(variables, 0.96) == ["allreduce", "allreduce"]
    # Steps of a few milliseconds differ by more from one measurement to the next.
    assert hybrid(variables, 0.9, step=0.01) == ["allreduce", "allreduce"]


def test_what_is_encoded_does_not_go_as_factors() -> None:
    graph = GraphFacts.of([layer("b", 1000, 1000, 4)], lambda strategy: StepTime(0.1, 0.1, 0.1))
    cluster = ClusterFacts(4, network=SLOW, speed=SPEED)
    chosen = Encoded("bf16", Auto()).build(graph, cluster).variables["b"]
    assert (chosen.synchronizer, chosen.encoder) == ("allreduce", "bf16")


def test_workers_that_would_drift_apart_are_not_sent_factors() -> None:
    variables = [layer("b", 1000, 1000, 4), dense("c", 50)]
    assert hybrid(variables, 0.5, replace(SPEED, alike=False)) == ["allreduce", "allreduce"]
    for alike, expected in ((True, True), (False, False)):
        cluster = ClusterFacts(4, network=SLOW, speed=replace(SPEED, alike=alike))
        found = {choice.synchronizer for choice in ways(variables[0], 0, cluster, {})}
        assert ("factors" in found) is expected
        assert "allreduce" in found


def test_speed_counts_that_a_table_outside_bags_is_read_by_itself() -> None:
    bagged = replace(TABLE, bags=True)
    speed = replace(SPEED, node=1e-3, crowding=2.0)

    def added(variable: Variable, synchronizer: str) -> float:
        return speed.added(variable, VariableStrategy(synchronizer), 4)

    assert added(bagged, "allreduce") == pytest.approx(2.0 * 100e-3)
    assert added(bagged, "bags") == added(TABLE, "allreduce") == 0.0
    assert added(bagged, "rows") - added(TABLE, "rows") == pytest.approx(2.0 * 100e-3)


def test_auto_counts_what_products_of_factors_take() -> None:
    def chosen(speed: Speed) -> VariableStrategy:
        graph = GraphFacts.of([layer("b", 1000, 1000, 4)])
        built = Auto().build(graph, ClusterFacts(4, network=SLOW, speed=speed))
        return built.variables["b"]

    # 96 kB at 1 MB a second; three times 8 million operations.
    assert chosen(SPEED).why == "336 ms; scatter 6e+03 ms"
    assert chosen(replace(SPEED, operations=1e6)).synchronizer == "allreduce"


def test_auto_counts_what_an_exchange_of_rows_calls() -> None:
    cold = replace(TABLE, shape=(100_000, 16), sparsity=0.01)
    graph = GraphFacts.of([cold, dense("w", 1000, 100)])
    whys = []
    for node in (0.0, 1e-3):
        cluster = ClusterFacts(4, network=SLOW, speed=replace(SPEED, node=node))
        chosen = Auto().build(graph, cluster).variables["table"]
        assert chosen.synchronizer == "rows"
        whys.append([float(part.split()[-2]) for part in chosen.why.split(";")])
    more = [slow - fast for slow, fast in zip(whys[1], whys[0], strict=True)]
    # Operations of a millisecond each; gathered rows are not asked for at owners.
    assert more == pytest.approx([156, 120], abs=1)


def test_auto_gives_up_messages_that_are_not_worth_their_latency() -> None:
    small = replace(TABLE, shape=(100, 4), sparsity=0.5)
    # Rows would send less, but cost three exchanges of 10 ms; the dense one needs AllReduce.
    alone = bytes_per_step(small, built("Parallax", [small], 4).variables["table"], 4)
    assert alone < bytes_per_step(small, VariableStrategy("allreduce"), 4)
    chosen = auto([small, dense("w", 1000, 100)]).variables
    assert [one.synchronizer for one in chosen.values()] == ["allreduce", "allreduce"]


def test_auto_prefers_a_whole_step_that_is_predicted_faster() -> None:
    variables = [replace(TABLE, sparsity=0.01), dense("w", 1000, 100)]
    slow, fast = StepTime(2.0, 1.0, 1.0), StepTime(1.5, 1.0, 1.0)
    with warnings_of_parallax(logging.INFO) as said:
        found = auto(variables, lambda s: fast if s.variables["w"].owners else slow)
    assert found.variables["w"].synchronizer == "owner"
    close = StepTime(1.95, 1.0, 1.0)
    found = auto(variables, lambda s: close if s.variables["w"].owners else slow)
    assert found.variables["w"].synchronizer == "allreduce"
    assert said == [
        "auto: predicted times of a step: PS 1500.0 ms, per variable 2000.0 ms, HYBRID 2000.0 ms, "
        "AR 2000.0 ms"
    ]


def test_a_forecast_is_what_the_plan_says_and_leaves_the_step() -> None:
    analysis, leaves = captured_with_state()
    variables = analysis.variables
    strategy = merge_messages(built("HYBRID", variables.values(), 4), analysis)
    before = text(analysis.step)
    speed = Speed(1e9, 1e9, 1e-6)
    forecast = Forecast(analysis, leaves, {}, SLOW, speed).step(strategy)
    assert text(analysis.step) == before
    items = timeline(rewrite(analysis, strategy, 0, 4), variables, strategy)
    assert forecast == predict(items, variables, strategy, SLOW, speed)


def test_the_base_of_an_encoded_strategy_by_its_name() -> None:
    assert Encoded("bf16", "zero").title == Encoded("bf16", BUILDERS["ZeRO"]()).title
    with pytest.raises(ConfigError, match="no strategy builder 'Zerro'"):
        Encoded("bf16", "Zerro")
    with pytest.raises(ConfigError, match="a strategy builder or its name, found"):
        Encoded("bf16", BUILDERS["ZeRO"])  # type: ignore[arg-type]
