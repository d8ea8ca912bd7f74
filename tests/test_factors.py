"""Factors of gradients: the numbers of one device, and the bytes of the thesis."""

from __future__ import annotations

import itertools
from typing import Any

import convolutions
import pytest
import synchronizers
from cells import sampled
from pool import Pool

SENT: dict[str, dict[str, Any]] = {
    "factors": {"synchronizer": "factors"},
    "factor_push": {"synchronizer": "factor_push", "owners": "one"},
}
CASES = {
    2: [("dense", "momentum", "clip_norm"), ("tied", "nesterov", "clip_value")],
    3: [("dense", "adam", "clip_norm"), ("sparse", "adamw", "average")],
}
"""By number of workers; test_synchronizers_long.py has more."""


@pytest.mark.parametrize(("way", "size"), sampled(itertools.product(SENT, CASES), 3))
def test_factors_give_the_numbers_of_one_device(pool: Pool, way: str, size: int) -> None:
    for found in pool.run(size, synchronizers.compare, SENT[way], CASES[size]):
        for case, (difference, chosen) in found.items():
            assert difference < 1e-10, case
            assert "hidden.weight" in chosen, (case, chosen)
            assert case.startswith("tied") or "out.weight" in chosen


@pytest.mark.parametrize(("way", "mean"), sampled(itertools.product(SENT, (True, False)), 3))
def test_batches_may_be_uneven_or_empty(pool: Pool, way: str, mean: bool) -> None:
    for found in pool.run(3, synchronizers.uneven, SENT[way], mean):
        assert found["chosen"] == [way] * 3
        assert found["difference"] < 1e-10


@pytest.mark.parametrize("way", SENT)
def test_bytes_are_those_of_the_thesis(pool: Pool, way: str) -> None:
    """Table 3.4, of which a worker sends its half: 4 workers, 16 samples, 300x400 and 400x200."""
    found = pool.run(4, synchronizers.counted, SENT[way])
    assert found[0]["chosen"] == [way, "allreduce", way, "allreduce"]
    factors = [4 * 16 * (300 + 400), 4 * 16 * (400 + 200)]
    matrices = [4 * 300 * 400, 4 * 400 * 200]
    biases = 4 * (400 + 200) * 2 * 3 / 4
    each = [one["sent"] for one in found]
    if way == "factors":
        assert each == pytest.approx([3 * sum(factors) + biases] * 4, rel=0.02)
    else:
        # The owners of the first and of the third variable send whole matrices to all others.
        owned = [matrices[0], 0, matrices[1], 0]
        pushed = [factors[1], sum(factors), factors[0], sum(factors)]
        pulled = [3 * size for size in owned]
        expected = [a + b + biases for a, b in zip(pushed, pulled, strict=True)]
        assert each == pytest.approx(expected, rel=0.02)
        assert max(each) > 10 * min(each)  # the imbalance of figure 3.10
    assert sum(each) / 4 == pytest.approx(found[0]["formula"], rel=0.02)


def test_an_update_may_multiply_factors_in_blocks(pool: Pool) -> None:
    cases = [("dense", o, "none") for o in ("momentum", "adam", "asgd")]
    # Clipping needs the whole gradient; a moving average is part of the update.
    cases += [("dense", "adamw", "clip_norm"), ("sparse", "adamw", "average")]
    for result in pool.run(2, synchronizers.multiplied_in_blocks, SENT["factors"], cases):
        found = result["found"]
        # Two variables in ten steps of all cases but that with clipping.
        assert result["calls"] == 4 * 10 * 2
        for case, (difference, chosen) in found.items():
            assert difference < 1e-10, case
            assert {"hidden.weight", "out.weight"} <= set(chosen)


WEIGHTS = [f"{name}.weight" for name in ("again", "down", "grouped", "head", "line", "stem", "up")]


@pytest.mark.parametrize(
    ("way", "size", "kind"),
    sampled(
        [
            ("factors", 3, "mixed"),
            ("factors", 2, "even"),
            ("factors", 3, "uneven"),
            ("factor_push", 3, "uneven"),
            ("factor_push", 2, "sizes"),
            ("factors", 3, "sizes"),
            ("factor_push", 2, "mixed"),
        ],
        3,
    ),
)
def test_convolutions_have_factors(pool: Pool, way: str, size: int, kind: str) -> None:
    results = pool.run(size, convolutions.compare, SENT[way], kind)
    for found in results:
        assert found["chosen"] == WEIGHTS
        assert found["difference"] < 1e-10
        assert found["bits"] == results[0]["bits"], "the same on all workers to the last bit"


@pytest.mark.parametrize("way", SENT)
def test_a_gradient_that_is_a_product_no_longer_travels_whole(pool: Pool, way: str) -> None:
    results = pool.run(2, convolutions.compare, SENT[way], "even", True)
    for found in results:
        assert found["chosen"] == WEIGHTS
        assert found["difference"] < 1e-10
        assert found["bits"] == results[0]["bits"]


def test_bytes_of_convolutions_are_those_of_their_images(pool: Pool) -> None:
    """Five images of 4 x 4 with 32 channels, and as many gradients with 48, to three others."""
    for found in pool.run(4, convolutions.counted, SENT["factors"]):
        expected = 3 * 4 * 5 * 4 * 4 * (32 + 48)
        assert found["formula"] == expected
        assert found["sent"] == pytest.approx(expected, rel=0.02)
