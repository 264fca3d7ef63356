"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from pool import Pool

UNIT = Path(__file__).parent / "unit"

# Nobody asks a name server: torch looks up the name of whoever connects, also on this machine, and an answer that gets
# lost costs five seconds: about one of twelve jobs with three ranks or more.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# Hundreds of processes import the package: without its bytecode each of them would compile it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Timings never decide: a busy machine is not a broken program.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of single modules as quick, for `make quick`."""
    for item in items:
        if item.path.is_relative_to(UNIT):
            item.add_marker(pytest.mark.quick)


def pytest_collection_finish() -> None:
    """What has been imported stays: no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for multi-process tests; they start with the first job."""
    made = Pool()
    yield made
    made.close()
