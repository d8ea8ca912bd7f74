"""Workers of a host add up gradients in memory that they share."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import host_sums
import pytest
import torch
from pool import HOSTS, Pool

from parallax.errors import DisagreementError, PeerError
from parallax.runtime.comm import host_links
from parallax.runtime.comm.host_links import HostLinks, as_tensor, connect_host


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("size", [3, 4])
def test_sums_are_those_of_all_workers(pool: Pool, size: int, dtype: torch.dtype) -> None:
    assert max(pool.run(size, host_sums.sums, dtype, False)) <= 1e-5


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize("hosts", HOSTS[:2], ids=str)
def test_sums_stay_inside_a_host_or_cross(
    pool: Pool, hosts: tuple[int, ...], crosses: bool
) -> None:
    assert max(pool.run(hosts, host_sums.sums, torch.float64, crosses)) <= 1e-12


def test_a_sum_leaves_while_the_model_computes(pool: Pool) -> None:
    """Nobody waits for it, nor starts another one."""
    assert all(pool.run(HOSTS[0], host_sums.leaves_while_computing))


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_that_are_changed_are_ones_own(
    pool: Pool, size: int, clip: bool, even: bool
) -> None:
    """Clipping multiplies gradients in place, and uneven batches weigh them: once per worker."""
    for found in pool.run(size, host_sums.train, clip, even):
        assert found["difference"] <= 1e-12
        assert found["changed"] == [((0, 1, 2, 3),) if clip else ()]
        assert (found["in memory"] > 0) is (size > 2)


@pytest.mark.parametrize(
    ("workers", "group"), [(3, "rows"), (4, "dense"), (HOSTS[0], "host"), (HOSTS[1], "host dense")]
)
def test_exchanges_inside_a_host(pool: Pool, workers: int | tuple[int, ...], group: str) -> None:
    """No memory is written again before all have taken what was in it."""
    assert not any(pool.run(workers, host_sums.exchanges, group))


# -- Links -------------------------------------------------------------------------------------


def _pair(seconds: float = 60.0) -> tuple[HostLinks, HostLinks]:
    one, other = socket.socketpair()
    return HostLinks(0, 0, {1: one}, seconds), HostLinks(1, 1, {0: other}, seconds)


def _both(*functions: Callable[[], None]) -> None:
    """Run functions at once; raises what one of them raises."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_memory_is_seen_by_the_other() -> None:
    one, other = _pair()
    name = one.name("gradients")
    assert other.name("gradients") == name
    mine = as_tensor(one.share(name, 80), torch.float64, 16, 8)
    mine.copy_(torch.arange(8.0))
    theirs = as_tensor(other.memory(name, 0), torch.float64, 16, 8)
    assert torch.equal(mine, theirs)
    theirs[3] = 7.0
    assert mine[3] == 7.0
    assert one.name("gradients") != name  # of the next with that text


def test_more_signals_than_fit_between_two_that_do_not_listen() -> None:
    one, other = _pair()
    name = one.name("x")
    other.name("x")
    count = 5000

    def work(links: HostLinks) -> Callable[[], None]:
        def run() -> None:
            for number in range(count):
                links.tell("full", name, number)
            for number in range(count):
                links.hear("full", name, number)

        return run

    _both(work(one), work(other))


def test_a_worker_that_ends_is_noticed_at_once() -> None:
    one, other = _pair()
    name = one.name("x")
    other.close()
    with pytest.raises(PeerError, match="Worker 0 lost another worker of its host: it ended"):
        one.hear("full", name, 0)
    with pytest.raises(PeerError, match="Worker 0 lost another worker of its host"):
        one.tell("full", name, 0)


def test_a_worker_that_does_not_answer_is_given_up() -> None:
    one, _other = _pair(seconds=0.3)
    with pytest.raises(PeerError, match="no answer"):
        one.hear("full", one.name("x"), 0)


def test_a_worker_that_sums_something_else_is_told() -> None:
    one, other = _pair()
    other.tell("full", other.name("another model"), 0)
    with pytest.raises(
        DisagreementError, match=r"Worker 0 and another .* exchange different things"
    ):
        one.hear("full", one.name("x"), 0)


def _connected(count: int) -> list[HostLinks | None]:
    """What the workers of a host get, as threads of this process."""
    told: dict[str, dict[int, str]] = {}
    barrier = threading.Barrier(count)
    found: dict[int, HostLinks | None] = {}

    def connect(rank: int) -> None:
        def exchange(topic: str, text: str) -> list[str]:
            told.setdefault(topic, {})[rank] = text
            barrier.wait(30)
            return [told[topic][worker] for worker in range(count)]

        found[rank] = connect_host(exchange, range(count), rank, 30.0)

    def connecting(rank: int) -> Callable[[], None]:
        return lambda: connect(rank)

    _both(*(connecting(rank) for rank in range(count)))
    return [found[rank] for rank in range(count)]


def test_all_workers_of_a_host_are_linked() -> None:
    links = [one for one in _connected(4) if one is not None]
    assert [one.place for one in links] == [0, 1, 2, 3]
    for one in links:
        one.tell("summed", 5, one.place)
    for one in links:
        others = {other.place for other in links} - {one.place}
        while not all(("summed", 5, place) in one._told for place in others):
            one.advance()
    for one in links:
        one.close()


@pytest.mark.parametrize("why", ["no socket", "another user"])
def test_if_one_worker_cannot_nobody_does(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "no socket":
        made = iter([True, False, True])
        original = host_links._listener
        lock = threading.Lock()

        def listener() -> socket.socket | None:
            with lock:
                return original() if next(made) else None

        monkeypatch.setattr(host_links, "_listener", listener)
    else:
        real = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: real + 1)
    monkeypatch.setattr(host_links, "MEET_SECONDS", 2.0)
    assert _connected(3) == [None, None, None]
