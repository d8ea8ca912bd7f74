"""Strategies survive JSON and are verified; any that fits gives the numbers of one device."""

from __future__ import annotations

import re

import equality
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool

from parallax.config import Config
from parallax.errors import StrategyError
from parallax.graph.analysis.variables import Variable
from parallax.strategy.builders import BUILDERS
from parallax.strategy.cost import bytes_per_step
from parallax.strategy.data import Strategy, VariableStrategy, fingerprint
from parallax.strategy.hierarchy import with_hierarchy
from parallax.strategy.layout import RowLayout
from parallax.strategy.verify import verify


@st.composite
def variables(draw: st.DrawFn) -> list[Variable]:
    count = draw(st.integers(1, 8))
    result = []
    for index in range(count):
        rank = draw(st.integers(0, 3))
        shape = tuple(draw(st.integers(1, 3000)) for _ in range(rank))
        sparse = rank > 0 and draw(st.booleans())
        result.append(
            Variable(
                name=f"v{index}",
                shape=shape,
                dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
                trainable=draw(st.booleans()),
                sparse=sparse,
                lazy=sparse and draw(st.booleans()),
                lookups=("embedding",) if sparse else (),
                sparsity=draw(st.floats(0, 1)) if sparse else None,
                shard_obstacle="" if rank and draw(st.booleans()) else "it is a single number",
            )
        )
    return result


@settings(max_examples=60, deadline=None)
@given(variables(), st.integers(1, 9), st.sampled_from(list(BUILDERS)), st.booleans())
def test_builders_make_strategies_that_fit(
    found: list[Variable], workers: int, option: str, average: bool
) -> None:
    config = Config(average_dense=average, average_sparse=not average)
    strategy = strategies.built(option, found, workers, config)
    verify(strategy, found, workers)
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert list(strategy.variables) == [variable.name for variable in found]
    for variable in found:
        choice = strategy.variables[variable.name]
        assert (choice.synchronizer == "none") == (not variable.trainable)
        assert choice.why
        if choice.synchronizer in ("allreduce", "owner"):
            assert choice.average is (config.average_sparse if variable.sparse else average)
        assert bytes_per_step(variable, choice, workers) >= 0
        assert bytes_per_step(variable, choice, 1) == 0


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["cyclic", "block", "whole"]),
    st.integers(0, 40),
    st.integers(1, 7),
    st.integers(0, 6),
)
def test_layouts_divide_rows(partition: str, rows: int, workers: int, owner: int) -> None:
    owners = (owner % workers,) if partition == "whole" else tuple(range(workers))
    choice = VariableStrategy("rows", partition=partition, owners=owners)  # type: ignore[arg-type]
    layout = RowLayout.of(choice, rows, workers)
    whole = torch.arange(rows * 2).view(rows, 2)
    shards = [layout.take(whole, worker) for worker in range(workers)]
    assert [len(shard) for shard in shards] == [layout.local_rows(w) for w in range(workers)]
    assert sum(len(shard) for shard in shards) == rows
    assert torch.equal(layout.assemble(shards), whole)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))]
)
def test_any_mix_of_synchronisers_equals_one_device(pool: Pool, size: int, seed: int) -> None:
    print(f"seed {seed}")
    for found in pool.run(size, strategies.compare_random, seed):
        assert found["difference"] < 1e-10, found
        assert len(set(found["chosen"])) > 1


VARIABLES = [
    Variable("a", (8, 2), torch.float32, True, sparse=True),
    Variable("b", (4,), torch.float32, True),
    Variable("c", (), torch.float32, True, shard_obstacle="it is a single number"),
]
GOOD = {
    "a": VariableStrategy("rows", "cyclic", (0, 1)),
    "b": VariableStrategy("allreduce"),
    "c": VariableStrategy("allreduce"),
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"a": None}, "no decision for 'a'"),
        ({"x": VariableStrategy("allreduce")}, "no variable 'x'"),
        ({"a": VariableStrategy("rows", "cyclic", (0, 2))}, "owners (0, 2) are not all among 2"),
        ({"a": VariableStrategy("rows", "cyclic", (0, 0))}, "an owner is named twice"),
        (
            {"a": VariableStrategy("rows", "block", (0, 1))},
            "rows cannot use partition 'block' (partition: use 'cyclic')",
        ),
        ({"b": VariableStrategy("rows", "cyclic", (0, 1))}, "rows is for sparse variables"),
        ({"b": VariableStrategy("allgather")}, "allgather is for sparse variables"),
        ({"b": VariableStrategy("owner")}, "it has no owner"),
        ({"b": VariableStrategy("allreduce", owners=(0,))}, "allreduce has no owners"),
        ({"c": VariableStrategy("owner", owners=(0,))}, "cannot be sharded: it is a single number"),
        (
            {"b": VariableStrategy("owner", owners=(0,), hierarchy="hosts")},
            "'b': hierarchy 'hosts' is for rows and allreduce, not for owner",
        ),
        (
            {"b": VariableStrategy("allreduce", pieces=5)},
            "'b': it has 4 rows along axis 0, which cannot be cut in 5",
        ),
        (
            {"b": VariableStrategy("owner", owners=(0,), pieces=2)},
            "'b': only gradients of flat allreduce travel in pieces",
        ),
        ({"b": VariableStrategy("none")}, "receives a gradient but is not synchronised"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, VariableStrategy | None], text: str) -> None:
    chosen = {n: s for n, s in {**GOOD, **change}.items() if s is not None}
    strategy = Strategy(fingerprint(VARIABLES), 2, chosen)
    with pytest.raises(StrategyError) as caught:
        verify(strategy, VARIABLES, 2)
    assert text in str(caught.value)


def test_a_good_strategy_fits() -> None:
    verify(Strategy(fingerprint(VARIABLES), 2, GOOD), VARIABLES, 2)


def test_two_levels_need_hosts_of_several_workers() -> None:
    strategy = Strategy(fingerprint(VARIABLES), 2, GOOD)
    for synchronizer in ("rows", "allreduce"):
        strategy = with_hierarchy(strategy, synchronizer, "hosts")
    verify(strategy, VARIABLES, 2)
    text = "needs several hosts of equally many workers, more than one each (hierarchy: use 'flat')"
    with pytest.raises(StrategyError, match=re.escape(text)) as caught:
        verify(strategy, VARIABLES, 2, two_levels=False)
    assert str(caught.value).count(text) == 3


def test_another_model_is_refused() -> None:
    with pytest.raises(StrategyError, match="shapes or dtypes of the variables differ"):
        verify(Strategy("0" * 16, 2, GOOD), VARIABLES, 2)
    with pytest.raises(StrategyError, match="it is for 3 workers, there are 2"):
        verify(Strategy(fingerprint(VARIABLES), 3, GOOD), VARIABLES, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "This is no strategy"),
        ('{"fingerprint": "x", "replicas": 2, "variables": {}, "version": 9}', "schema version 9"),
        ('{"fingerprint": "x", "replicas": "2", "version": 2, "variables": {}}', "$.replicas"),
        ('{"fingerprint": "x", "replicas": 2, "variables": {}, "speed": 1}', "speed"),
        (
            '{"fingerprint": "x", "replicas": 2, "version": 2, "variables": {"a": '
            '{"synchronizer": "rows", "partition": "magic"}}}',
            "magic",
        ),
    ],
)
def test_bad_json_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        Strategy.from_json(text)
    assert message in str(caught.value)


def test_matrix_has_every_case() -> None:
    cases = equality.all_cases()
    assert len(cases) == len(set(cases)) == (4 * len(equality.OPTIMIZERS) + 3) * 4
