"""What a loss computes of one item of a list stays that item's own."""

from __future__ import annotations

import item_lists
import pytest
from pool import Pool


@pytest.mark.parametrize("items", [1, 2])
@pytest.mark.parametrize("told_by", ["rows", "another list"])
@pytest.mark.parametrize("name", item_lists.LOSSES)
def test_the_numbers_of_one_device(pool: Pool, name: str, told_by: str, items: int) -> None:
    for far in pool.run(2, item_lists.train, name, told_by, items, "HYBRID"):
        assert far < 1e-12
