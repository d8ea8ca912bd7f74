"""Ids in one message although their number changes."""

from __future__ import annotations

import id_messages
import pytest
from pool import Pool


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [2, 4])
def test_all_ids_arrive_whatever_their_number(pool: Pool, size: int, seed: int) -> None:
    print("seed", seed)
    kind = ["int32", "int64"][seed % 2]
    found = pool.run(size, id_messages.exchanges, seed, 40, kind)
    assert all(messages == found[0] for messages in found)
    assert set(found[0]) <= {1, 2}
    assert found[0][0] == 2


def test_steady_numbers_take_one_message_of_about_their_size(pool: Pool) -> None:
    for messages, sent in pool.run(3, id_messages.steady, 1000, 6):
        assert messages == [2, 2, 1, 1, 1, 1]
        head = 4 * 8
        assert 2 * (4 * 1000 + head) < sent < 2 * (4 * 1000 + head) * 1.07


def test_without_ids_only_heads_travel(pool: Pool) -> None:
    for messages, sent in pool.run(3, id_messages.steady, 0, 3):
        assert messages == [1, 1, 1]
        assert sent == 2 * 5 * 8


@pytest.mark.parametrize("seed", range(3))
def test_a_message_may_start_before_the_one_before_has_ended(pool: Pool, seed: int) -> None:
    print("seed", seed)
    pool.run(3, id_messages.two_under_way, seed, 40)
