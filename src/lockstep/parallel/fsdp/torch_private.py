"""The private members of torch's FSDP2 that Lockstep uses. No other module knows them (torch 2.11 to 2.15).

FSDP2's public functions shard, gather and reshard. They show neither the gathered parameters nor which of these have a
gradient, call nothing around a forward or before a reduction, gather for no tensors but those that a module returns,
reduce nothing but at the end of a backward, take gradients of one dtype only, and do not recover from a backward that
raised. `fully_shard` gives every module a state; if the module has parameters of its own, or of children that are not
sharded themselves, the state has a parameter group: they are gathered and reduced together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter  # base class of a custom one
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather as DefaultAllGather

from lockstep.errors import UserError

STATE_MEMBERS = (
    "_fsdp_param_group",
    "_is_root",
    "_pre_backward",
    "_root_post_backward_final_callback",
    "_state_ctx",
)
GROUP_MEMBERS = (
    "_init_mp_dtypes",
    "fsdp_params",
    "mesh_info",
    "post_backward",
    "post_forward",
    "pre_forward",
    "reduce_grads",
    "reshard_after_backward",
)
PARAMETER_MEMBERS = ("_param_fqn", "init_dtype_attrs", "mp_policy", "sharded_param", "unsharded_accumulated_grad")


def check_members(module: FSDPModule) -> None:
    """Raise if this version of torch does not have what is used here."""
    missing = _missing(_state(module), STATE_MEMBERS)
    group = None if missing else _group(module)
    if group is not None:
        missing = _missing(group, GROUP_MEMBERS)
        parameters = [] if missing else group.fsdp_params
        missing += [name for parameter in parameters[:1] for name in _missing(parameter, PARAMETER_MEMBERS)]

    if missing:
        raise UserError(
            f"torch {torch.__version__} has changed its FSDP: there is no {missing[0]} any more, which sharded "
            "parameters need",
            "" if len(missing) == 1 else f"there are {len(missing)} of them: {', '.join(missing)}",
            "install a torch from 2.11 to 2.15; or set strategy=ddp or strategy=zero1",
        )


def grouped_parameters(module: FSDPModule) -> list[Any]:
    """Return torch's objects for the parameters in the module's group, [] if it has none."""
    group = _group(module)
    return [] if group is None else group.fsdp_params


def shard(parameter: Any) -> Tensor:
    """Return the sharded parameter, which `model.parameters()` has, too."""
    return parameter.sharded_param


def gathered(parameter: Any) -> Tensor | None:
    """Return the full parameter, the leaf of the autograd graph. None before the first gather, which creates it."""
    return getattr(parameter, "_unsharded_param", None)


def has_gradient(parameter: Any) -> bool:
    """Return whether the parameter has a full gradient, which is not reduced yet."""
    full = gathered(parameter)
    return full is not None and (full.grad is not None or parameter.unsharded_accumulated_grad is not None)


def name_in_module(parameter: Any) -> str:
    return str(parameter._param_fqn)


def mesh_axes(module: FSDPModule) -> tuple[str, ...]:
    """Return the names of the mesh axes that the module's group is sharded over."""
    group = _group(module)
    return () if group is None else group.mesh_info.mesh.mesh_dim_names or ()


def reduces_gradients(module: FSDPModule) -> bool:
    """Return whether the group's gradients will be reduced in this backward, and not kept for a later one."""
    group = _group(module)
    return group is not None and group.reduce_grads


def call_before_reduction(module: FSDPModule, function: Callable[[], None]) -> None:
    """Call `function` in every backward, when the group's full gradients are complete and before they are reduced."""
    group = _group(module)
    assert group is not None, "the module has no parameter group"
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        function()
        reduce(*unused)

    group.post_backward = post_backward


def watch_forwards(
    module: FSDPModule, before: Callable[[tuple[Any, Any], tuple[Any, Any]], None], after: Callable[[Any], None]
) -> None:
    """Call two functions around every forward of a module, while its parameters are gathered.

    before: called with the caller's (args, kwargs), and with those that the forward gets: the containers are copies
    after: called with the output

    A hook of the module would be compiled with it, and sees the caller's containers only if it is called before FSDP's.
    """
    group = _group(module)
    if group is None:
        return

    enter, leave = group.pre_forward, group.post_forward

    def pre_forward(called: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        received = enter(called, args, kwargs)
        before((args, kwargs), received)
        return received

    def post_forward(called: nn.Module, inputs: Any, output: Any) -> Any:
        after(output)
        return leave(called, inputs, output)

    group.pre_forward, group.post_forward = pre_forward, post_forward


def gather_before_backward(module: FSDPModule, tensor: Tensor) -> None:
    """Gather the module's parameters when a backward reaches `tensor`, as if the module had returned it."""
    tensor.register_hook(_state(module)._pre_backward)


def reduce_each_dtype(module: FSDPModule) -> None:
    """Reduce the gradients of each dtype by themselves, if the group's trainable parameters have several.

    torch gathers parameters of any dtypes together, but it packs all gradients into one tensor, and so refuses such a
    group in the first forward.
    """
    parameters = grouped_parameters(module)
    dtypes = list(dict.fromkeys(shard(p).dtype for p in parameters if shard(p).requires_grad))
    if len(dtypes) < 2:
        return

    group = _group(module)
    reduce = group.post_backward
    group._orig_dtype = group._reduce_dtype = None  # a gradient is reduced, and kept, in its own dtype

    def init_dtypes() -> None:
        for parameter in parameters:
            parameter.init_dtype_attrs(parameter.mp_policy)

    def select(selected: list[Any]) -> None:
        group.fsdp_params = selected
        group._reduce_scatter_param_indices = range(len(selected))  # torch 2.15 reduces those at these indices

    def post_backward(*unused: Any) -> None:
        reshards = group.reshard_after_backward

        # All but the first dtype, with the parameters still gathered.
        try:
            group.reshard_after_backward = False
            for dtype in dtypes[1:]:
                select([p for p in parameters if shard(p).dtype == dtype])
                reduce(*unused)
        finally:
            select(parameters)
            group.reshard_after_backward = reshards

        # The gradients that are left have the first dtype.
        reduce(*unused)

    group._init_mp_dtypes = init_dtypes
    group.post_backward = post_backward


def end_backward(root: FSDPModule) -> None:
    """Reduce all full gradients and reshard, as torch does when a backward ends. `root` is the outermost module."""
    state = _state(root)
    # torch 2.15 asserts that a backward runs: None means that it has ended. True would leave the reduction to its user.
    state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def forget_failed_backward(root: FSDPModule) -> None:
    """Reset the state of a backward that raised, which otherwise counts as still running."""
    state = _state(root)
    state._state_ctx.post_backward_final_callback_queued = False

    # Added in torch 2.13. Before the first forward there is no root, and nothing to reset.
    if hasattr(state, "_reset_iter_state") and state._is_root:
        state._reset_iter_state()


def _state(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def _group(module: FSDPModule) -> Any:
    return _state(module)._fsdp_param_group


def _missing(owner: Any, names: Sequence[str]) -> list[str]:
    return [f"{type(owner).__name__}.{name}" for name in names if not hasattr(owner, name)]
