"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for multi-process tests; they start with the first job."""
    made = Pool()
    yield made
    made.close()
