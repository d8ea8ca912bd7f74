"""Fixtures that several test files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launching import start_script
from pool import Pool

__all__ = ["pool", "start_script"]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four worker processes for the whole session."""
    workers = Pool()
    yield workers
    workers.close()
