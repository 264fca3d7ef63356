"""What Lockstep uses of torch's private FSDP: a check that it is there, and what torch 2.15 does in its own way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("name", ["_fsdp_param_group", "post_backward", "fsdp_params", "mp_policy"])
def test_a_missing_member_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"there is no SimpleNamespace.{name} any more"):
        torch_private.check_members(sharded(without=name))


class Group:
    """A group of two dtypes as in torch 2.15: its parameters have the policy, and indices say what is reduced."""

    def __init__(self) -> None:
        self.policies: list[str] = []
        self.reduced: list[list[torch.dtype]] = []
        self.fsdp_params = [self.parameter(dtype) for dtype in (torch.float32, torch.float64, torch.float32)]
        self.reshard_after_backward = True
        self._reduce_scatter_param_indices = [0, 2, 1]

    def parameter(self, dtype: torch.dtype) -> SimpleNamespace:
        sharded_param = torch.ones(1, dtype=dtype, requires_grad=True)
        return SimpleNamespace(
            sharded_param=sharded_param, mp_policy=str(dtype), init_dtype_attrs=self.policies.append, has_gradient=True
        )

    def post_backward(self) -> None:
        taken = [self.fsdp_params[index] for index in self._reduce_scatter_param_indices]
        taken = [p for p in taken if p.has_gradient]
        for parameter in taken:
            parameter.has_gradient = False
        self.reduced.append([p.sharded_param.dtype for p in taken])


def test_each_dtype_is_reduced_by_itself_in_torch_2_15() -> None:
    group: Any = Group()
    module: Any = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_group=group))
    torch_private.reduce_each_dtype(module)

    group._init_mp_dtypes()
    assert group.policies == ["torch.float32", "torch.float64", "torch.float32"]

    group.post_backward()
    assert group.reduced == [[torch.float64], [torch.float32, torch.float32]]
    assert len(group.fsdp_params) == 3
    assert group.reshard_after_backward


def test_a_backward_is_ended_that_torch_2_15_does_not_know_of() -> None:
    context = SimpleNamespace(manual_backward_finalization_active=None)
    ended: list[bool | None] = []
    state = SimpleNamespace(
        _state_ctx=context,
        _root_post_backward_final_callback=lambda: ended.append(context.manual_backward_finalization_active),
    )

    root: Any = SimpleNamespace(_get_fsdp_state=lambda: state)
    torch_private.end_backward(root)
    assert ended == [False]  # torch asserts that this is not None, and leaves the reduction to the user if it is True
