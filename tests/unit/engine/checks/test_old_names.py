"""Attributes of a task that have another name by now are refused: without an error they would be ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import lockstep


class Old(lockstep.Task):
    lasting = ("global_batch",)

    def model(self) -> nn.Module:
        raise AssertionError("the name comes first")


class Other(Old):
    """`lasting` is its own, and no list of settings."""

    def lasting(self) -> None: ...

    def model(self) -> nn.Module:
        raise KeyError("reached")


def test_the_old_name_of_fixed_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lockstep.UserError, match=r"Old.lasting is now called fixed_settings\n(.|\n)*'global_batch'"):
        lockstep.fit(Old(), run_dir=tmp_path / "old", steps=1, global_batch=1)


def test_a_method_of_that_name_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="reached"):
        lockstep.fit(Other(), run_dir=tmp_path / "other", steps=1, global_batch=1)
