"""Under fsdp all ranks gather the same parameters, and add the gradients of the same parameters, in the same order. A
part of the model that only some of them use breaks that: gloo aborts, nccl waits for ever, or adds what does not belong
together. So the ranks compare what they are about to do before they do it, while that costs little: over gloo always,
over nccl in the first steps only, since the host must wait for the answer.

A part that nobody uses in a step is fine: nobody gathers it, and it gets no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from lockstep.errors import UserError
from lockstep.runtime.context import Runtime

FIRST_STEPS = 3
END, GATHER, ADD = range(3)  # what a rank is about to do


class SameParts:
    """What the ranks are about to exchange, compared by all of them."""

    def __init__(self, model: nn.Module, runtime: Runtime):
        """`model` has been cut."""
        self.runtime, self.steps = runtime, 0
        self.groups: list[Any] = []  # torch's records of what is gathered as one
        for module in model.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            if group is not None and isinstance(module, FSDPModule):
                module.set_custom_all_gather(_ComparedGather(self, len(self.groups)))
                self._compare_before_adding(group, len(self.groups))
                self.groups.append(group)

    @property
    def compares(self) -> bool:
        return self.runtime.backend == "gloo" or self.steps <= FIRST_STEPS

    def compare(self, what: int, number: int = 0, has_gradient: tuple[bool, ...] = ()) -> None:
        """Every rank says what it does next, with which group. If that differs, every rank ends with the same error."""
        if not self.compares:
            return
        pattern = hash(has_gradient) % 2**31  # of whole numbers: the same in all processes
        mine = torch.tensor([what, number, pattern], dtype=torch.int64, device=self.runtime.device)
        every = mine.new_empty(self.runtime.world.size, len(mine))
        dist.all_gather(list(every.unbind()), mine)
        if not torch.equal(every, mine.expand_as(every)):  # on a GPU the host waits here
            raise _differ(
                self.runtime.collectives.gather_json(self._in_words(what, number, has_gradient)), self._in_mesh
            )

    @property
    def _in_mesh(self) -> bool:
        """Whether ranks share layers or stages too (mesh.tp, mesh.pp), which zero1 does not know."""
        return any("dp" in (group.mesh_info.mesh.mesh_dim_names or ()) for group in self.groups)

    def _compare_before_adding(self, group: Any, number: int) -> None:
        """torch adds the gradients that are there, whichever they are."""
        original = group.post_backward

        def post_backward(*unused: Any) -> None:
            has_gradient = tuple(_has_gradient(each) for each in group.fsdp_params)
            if any(has_gradient):
                self.compare(ADD, number, has_gradient)
            original(*unused)

        group.post_backward = post_backward

    def _in_words(self, what: int, number: int, has_gradient: tuple[bool, ...]) -> tuple[str, list[str]]:
        if what == END:
            return "is done", []
        names = [each._param_fqn for each in self.groups[number].fsdp_params]
        if what == GATHER:
            return "is about to use", names
        return "has a gradient for", [name for name, has in zip(names, has_gradient, strict=True) if has]


class _ComparedGather(DefaultAllGather):
    def __init__(self, parts: SameParts, number: int):
        self._parts, self._number = parts, number

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._parts.compare(GATHER, self._number)
        return super().__call__(output_tensor, input_tensor, group, async_op)


def _has_gradient(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and (whole.grad is not None or parameter.unsharded_accumulated_grad is not None)


def _differ(told: list[tuple[str, list[str]]], in_mesh: bool) -> UserError:
    """`told`: what every rank does, and with which parameters."""
    other = next(rank for rank, words in enumerate(told) if words != told[0])
    found = []
    for rank, peer in ((0, other), (other, 0)):
        does, names = told[rank]
        only = [name for name in names if name not in told[peer][1]]
        found += [f"rank {rank} {does} {_some(only)}"] if only else []
    if len(found) == 1:
        found.append(f"rank {other if found[0].startswith('rank 0 ') else 0} does not")
    return UserError(
        "all ranks use the same parameters in a micro-batch, as fsdp needs it",
        "; ".join(found),
        f"type strategy=ddp ddp.find_unused_parameters=true{'' if in_mesh else ', or strategy=zero1 with it'}; or call "
        "that part of the model on every rank, and multiply by 0 what should not count",
    )


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
