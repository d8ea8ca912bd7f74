"""Fixtures that several test files use."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from launching import start_script
from pool import Pool

__all__ = ["pool", "start_script"]

# What a shell starts in the background ignores these, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four worker processes for the whole session."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small models: more threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
