"""The check that this version of torch has what Lockstep uses of its FSDP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.errors import UserError
from lockstep.parallel.fsdp import torch_private


def sharded(without: str = "") -> Any:
    """A module as `fully_shard` leaves it, as far as torch_private.py looks at it, without one member."""

    def having(members: tuple[str, ...], **values: Any) -> SimpleNamespace:
        return SimpleNamespace(**{name: values.get(name) for name in members if name != without})

    group = having(torch_private.GROUP_MEMBERS, fsdp_params=[having(torch_private.PARAMETER_MEMBERS)])
    state = having(torch_private.STATE_MEMBERS, _fsdp_param_group=group)
    return SimpleNamespace(_get_fsdp_state=lambda: state)


def test_nothing_is_missing() -> None:
    torch_private.check_members(sharded())


@pytest.mark.parametrize("name", ["_fsdp_param_group", "post_backward", "fsdp_params", "init_dtype_attrs"])
def test_a_missing_member_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"there is no SimpleNamespace.{name} any more"):
        torch_private.check_members(sharded(without=name))
