"""Fixtures that several test files use."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pool as pools
import pytest
import torch
from cells import beyond
from launching import start_script
from pool import Pool
from torch.torch_version import TorchVersion

__all__ = ["pool", "start_script"]

# What a shell starts in the background ignores these, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


PATIENCE = 4
"""How many times as long a long check may take: other programs use such machines too."""


DAYS = 5
"""After how many days tests with a limit begin where they began before."""


WITH_213 = {
    "test_one_graph_holds_for_all_places[_from]": "asks whether lengths are equal",
    "test_means_over_selections[soft labels]": "asks for the length of a selection",
    "test_means_that_are_those_of_all_batches_have_none[soft labels]": "asks for it, too",
    **{
        f"test_the_numbers_of_one_device[below a quantile-{setting}]": "looks at quantiles' values"
        for setting in ("2-HYBRID", "3-HYBRID", "2-PS", "3-AR")
    },
    "test_numbers_are_those_of_one_device[PS-case3-3]": "counts steps on the default device",
    "test_a_process_has_two_threads_for_sockets_whatever_its_groups": "gives threads no names",
}
"""By test, what torch before 2.13 does instead."""
BEFORE_213 = TorchVersion(torch.__version__) < "2.13"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        help="where workers of the pool compute, such as cuda:0, which all of them share; only "
        "tests that have such workers run then",
    )
    parser.addoption(
        "--minutes", type=float, help="begin no test after so many, and skip those that are left"
    )
    parser.addoption(
        "--day",
        type=int,
        default=0,
        help="a number that is another one each day: with --minutes, tests begin at another place "
        "by it, so that none is always left out",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cells to the long checks and give those time; leave out what an older torch cannot."""
    usual = float(config.getini("timeout"))
    rare = {"long", "exhaustive"}
    short = [item for item in items if rare.isdisjoint(m.name for m in item.iter_markers())]
    names = (item.nodeid.partition("[")[0].rpartition("/")[2] for item in short)
    for item, is_long in zip(short, beyond(names), strict=True):
        if is_long:
            item.add_marker(pytest.mark.long)
    if config.getoption("--device") != "cpu":
        items[:] = [item for item in items if "pool" in getattr(item, "fixturenames", ())]
    for item in items:
        if BEFORE_213 and (why := WITH_213.get(item.name)):
            item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} {why}"))
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PATIENCE * usual))


class _Limited:
    """Tests for as many minutes as there are, from another one on each day."""

    def __init__(self, minutes: float, day: int) -> None:
        self._end = time.monotonic() + 60 * minutes
        self._day = day

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        first = self._day % DAYS * len(items) // DAYS
        items[:] = [*items[first:], *items[:first]]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self._end:
            pytest.skip("no time is left")


def pytest_configure(config: pytest.Config) -> None:
    """Give each process that runs tests their limit."""
    if (minutes := config.getoption("--minutes")) is not None:
        config.pluginmanager.register(_Limited(minutes, config.getoption("--day")))


@pytest.fixture(autouse=True)
def _patient_pools(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for what workers do in long checks."""
    if request.node.get_closest_marker("long"):
        monkeypatch.setattr(pools, "DEADLINE", PATIENCE * pools.DEADLINE)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Four worker processes for the whole session."""
    device = torch.device(request.config.getoption("--device"))
    workers = Pool(device=device, by_default=device != pools.CPU)
    yield workers
    workers.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small models: more threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
