"""Process groups share Gloo's threads for sockets, and work as groups of their own."""

from __future__ import annotations

import process_groups
from pool import HOSTS, Pool


def test_a_process_has_two_threads_for_sockets_whatever_its_groups(pool: Pool) -> None:
    found = pool.run(HOSTS[0], process_groups.opened)
    assert len(found[0]["groups"]) >= 7
    for rank, one in enumerate(found):
        assert one["threads"] == 2
        assert one["received"] == [10 * other + rank for other in range(4)]
        for name, members in one["members"].items():
            assert one["sums"][name] == [sum(members)] * 3
