"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from pool import Pool

# Timings never decide: a busy machine is not a broken program.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for multi-process tests; they start with the first job."""
    made = Pool()
    yield made
    made.close()
