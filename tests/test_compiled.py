"""Regions of a step, replayed and compiled, give the numbers of the step that is replayed whole."""

from __future__ import annotations

import compiled_steps
import pytest
from pool import Pool

import parallax
from parallax.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "optimizer", "size"),
    [
        ("HYBRID", "adam", 1),
        ("HYBRID", "nadam", 2),
        ("PS", "momentum", 2),
        ("AR", "adagrad", 3),
        ("ZeRO", "adam", 2),
        ("Poseidon", "momentum", 2),
        ("RandomAxis", "momentum", 2),
    ],
)
def test_regions_give_the_same_numbers(pool: Pool, option: str, optimizer: str, size: int) -> None:
    for found in pool.run(size, compiled_steps.cut_and_compare, option, optimizer):
        assert found["difference"] < 1e-12
        # The forward pass and the update are large regions, whatever is between them.
        assert max(found["operations"]) > 20
        assert len(found["operations"]) <= 12


@pytest.mark.parametrize(("option", "optimizer", "size"), [("HYBRID", "adam", 2)])
def test_compiled_regions_give_the_numbers_of_one_device(
    pool: Pool, option: str, optimizer: str, size: int
) -> None:
    for difference, plan in pool.run(size, compiled_steps.compare, option, optimizer):
        assert difference < 1e-10
        ready, of, total = plan.split()[1:4]
        assert (ready, of) == (total, "of"), plan


@pytest.mark.long
@pytest.mark.parametrize("optimizer", compiled_steps.OPTIMIZERS)
@pytest.mark.parametrize(("option", "size"), [("HYBRID", 1), ("PS", 3)])
def test_the_matrix_of_compiled_regions(pool: Pool, option: str, optimizer: str, size: int) -> None:
    for difference, _ in pool.run(size, compiled_steps.compare, option, optimizer):
        assert difference < 1e-10


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        parallax.Config(compile="inducto")  # type: ignore[arg-type]
    assert str(raised.value) == (
        'compile must be one of "auto", "inductor", "none"; found \'inducto\'.\n'
        '  What to do: did you mean "inductor"?'
    )
