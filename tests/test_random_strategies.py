"""Any strategy that verification lets through gives the numbers of one device; no other is run."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from pool import Pool
from random_strategies import mutated, random_strategy, train, variables

from parallax.errors import StrategyError
from parallax.graph.analysis.variables import Variable
from parallax.strategy.data import Strategy
from parallax.strategy.registry import synchronizers
from parallax.strategy.verify import findings

# For how many workers, and how many; with the long checks 200. ``TEST_SEED`` repeats a run.
DRAWN = [
    (2, 60),
    pytest.param(2, 100, marks=pytest.mark.long),
    pytest.param(3, 40, marks=pytest.mark.long),
]
MUTATIONS = 2000


@pytest.fixture(scope="module")
def found() -> list[Variable]:
    return variables()


@pytest.fixture(scope="module")
def first_seed() -> int:
    seed = int(os.environ.get("TEST_SEED") or random.SystemRandom().randrange(2**31))
    print(f"TEST_SEED={seed}")
    return seed


@pytest.mark.parametrize(("size", "count"), DRAWN)
def test_random_strategies_equal_one_device(
    pool: Pool, found: list[Variable], first_seed: int, size: int, count: int
) -> None:
    print(f"TEST_SEED={first_seed}")
    # Others for each.
    start = first_seed + 1000 * count
    seeds = range(start, start + count)
    drawn = {seed: random_strategy(found, size, seed).to_json() for seed in seeds}
    assert len(set(drawn.values())) == count
    used = Counter(
        choice.synchronizer
        for text in drawn.values()
        for choice in Strategy.from_json(text).variables.values()
    )
    assert set(used) == set(synchronizers())
    for worker in pool.run(size, train, drawn):
        wrong = {seed: far for seed, far in worker.items() if isinstance(far, str) or far > 1e-10}
        assert set(worker) == set(drawn)
        assert wrong == {}, drawn[next(iter(wrong))].decode()


def read(text: str) -> Strategy | str:
    """A strategy, or why it is none."""
    try:
        return Strategy.from_json(text)
    except StrategyError as error:
        return str(error)


def test_mutations_are_refused_or_equal_one_device(
    pool: Pool, found: list[Variable], first_seed: int
) -> None:
    print(f"TEST_SEED={first_seed}")
    draw = random.Random(first_seed)
    names = {variable.name for variable in found}
    bases = [random_strategy(found, 2, first_seed + number) for number in range(20)]
    outcomes = Counter[str]()
    valid: dict[int, bytes] = {}
    refused: dict[int, bytes] = {}
    for number in range(MUTATIONS):
        text, name, field = mutated(draw.choice(bases), draw)
        strategy = read(text)
        if isinstance(strategy, str):
            # It names what cannot be read, or that which should not be there.
            assert field in strategy or field == "variables", (text, strategy)
            assert name in strategy or name not in names, (text, strategy)
            outcomes["unreadable"] += 1
            continue
        wrong = findings(strategy, found, 2, two_levels=False)
        for finding in wrong:
            assert finding.field, (text, finding)
            assert finding.problem, (text, finding)
            assert finding.remedy, (text, finding)
        if wrong:
            assert any(name in str(finding) for finding in wrong), (text, wrong)
            refused[number] = strategy.to_json()
        elif field not in ("average", "encoder"):  # other numbers are asked for
            valid[number] = strategy.to_json()
    print(outcomes, len(valid), len(refused))
    assert min(outcomes["unreadable"], len(valid), len(refused)) > 150
    sample = dict(draw.sample(sorted(valid.items()), 15))
    for worker in pool.run(2, train, sample):
        assert all(isinstance(far, float) and far < 1e-10 for far in worker.values()), worker
    sample = dict(draw.sample(sorted(refused.items()), 15))
    for worker in pool.run(2, train, sample):
        assert all("The strategy does not fit" in str(far) for far in worker.values()), worker
