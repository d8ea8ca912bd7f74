"""Steps as people write them give the numbers of one device."""

from __future__ import annotations

import pytest
import torch
import user_steps
from cells import sampled
from pool import Pool

from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover
from parallax.ops import marks

ADVERSARIES = [f"adversaries, {variant}" for variant in user_steps.ADVERSARIES]
OTHERS = [name for name in user_steps.CASES if name not in ADVERSARIES]
TABLES = ("steps_by_signs", "sparse_momentum", "bags_of_short_ids", "averaged_table")
TABLES += ("two_tasks_of_a_table", "two_tasks_of_bags", "table_of_one_row")
TABLES += ("bags_with_padding",)
TABLES += ("attacked_table", "attacked_bags", "some_rows_of_a_table")
INDEXED = ("sentences_with_tags", "rows_of_tables", "columns_of_rows")
INDEXED += ("written_at_the_best", "places_that_move")
GUESSES = ("trust_ratios", "scaled_rates", "found_rate", "clipped_by_hand", "bounded_rates")
GUESSES += ("clipped_beside_a_table",)
CELLS = [
    *((name, builder) for name in ADVERSARIES for builder in ("HYBRID", "PS", "AR")),
    *((name, builder) for name in ADVERSARIES[2:5] for builder in ("UnevenPS", "ZeRO")),
    *((name, builder) for name in TABLES for builder in ("Parallax", "PS", "AR")),
    *((name, builder) for name in INDEXED for builder in ("PS", "AR", "ZeRO")),
    ("masked_words", "Poseidon"),
    *((name, builder) for name in GUESSES for builder in ("PS", "AR", "ZeRO", "UnevenPS")),
    *(("layers_that_are_run_again", builder) for builder in ("PS", "ZeRO")),
    *(("volume_of_columns", builder) for builder in ("PS", "ZeRO")),
]
ALL = [*((name, "HYBRID") for name in OTHERS), *sampled(CELLS, 4)]


@pytest.mark.parametrize(("name", "builder"), ALL)
def test_the_numbers_of_one_device(pool: Pool, name: str, builder: str) -> None:
    for found in pool.run(2, user_steps.compare, name, builder):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # Four of the generator, and five of the discriminator.
        ("adversaries, plain", 9),
        ("adversaries, frozen", 9),
        ("adversaries, zeroed", 14),
        ("adversaries, norms", 14),
        ("adversaries, both", 14),
        ("critic_trained_more", 16),
        ("gradients_by_hand", 3),
    ],
)
def test_a_gradient_is_marked_where_it_is_used(name: str, wanted: int) -> None:
    _, step, batches = user_steps.build(name, user_steps.LOCAL)
    graph = capture(step, discover(step), batches[0], {}).graph
    found = [node for node in graph.nodes if node.target is marks.GRADIENT]
    assert len(found) == wanted
    assert all(mark.users for mark in found)


def test_what_nobody_takes_is_not_computed() -> None:
    """The generator's backward pass ends at the discriminator's inputs."""
    _, step, batches = user_steps.build("adversaries, plain", user_steps.LOCAL)
    graph = capture(step, discover(step), batches[0], {}).graph
    wanted = torch.ops.aten.embedding_dense_backward.default
    assert len([node for node in graph.nodes if node.target is wanted]) == 2  # real and fake
