"""What ranks that share one GPU cannot do (LOCKSTEP_TEST_DEVICE=cuda) is left out there, by name."""

from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.errors import UserError
from ranks.support import DEVICE, NEEDS_NCCL


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    try:
        return (yield)
    except UserError as error:
        if DEVICE == "cuda" and NEEDS_NCCL in str(error):
            pytest.skip("pipelines need nccl, and so a GPU for each rank")
        raise
