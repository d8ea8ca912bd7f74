"""Fixtures that several test files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four worker processes for the whole session."""
    workers = Pool()
    yield workers
    workers.close()
