"""Ranks compare the sources that they have imported."""

import sys

import pytest

from lockstep.engine.checks.settings import _check_same_sources, digests_of_sources
from lockstep.errors import UserError


def test_only_the_users_own_modules_are_compared(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text("WIDTH = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_model  # pyrefly: ignore

    digests = digests_of_sources()
    assert digests["own_model"]
    assert not {"os", "torch", "lockstep.engine.checks.settings", "pytest"} & digests.keys()

    # Another content, another digest; a file that is gone says nothing.
    (tmp_path / "own_model.py").write_text("WIDTH = 4\n")
    assert digests_of_sources()["own_model"] != digests["own_model"]
    (tmp_path / "own_model.py").unlink()
    assert "own_model" not in digests_of_sources()
    del sys.modules[own_model.__name__]


def test_a_rank_with_an_older_copy_is_named():
    _check_same_sources([{"net": "1f", "task": "2a"}, {"net": "1f"}, {"net": "1f", "more": "3b"}])
    with pytest.raises(UserError, match="module net is not the same on rank 0 and rank 2"):
        _check_same_sources([{"net": "1f"}, {"net": "1f"}, {"net": "2e"}])
