"""What the tests of this folder compare with."""

from __future__ import annotations

import pytest

from faults.runs import TINY, train
from faults.torture import digests


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of what a run of TINY ends with when nothing happens to it."""
    ended = train(tmp_path_factory.mktemp("undisturbed"), *TINY)
    assert ended.code == 0, ended.output
    return digests(ended.run)
