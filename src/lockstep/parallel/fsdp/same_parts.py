"""Under fsdp all ranks gather the same parameters, and add the gradients of the same parameters, in the same order. A
part of the model that only some of them use breaks that: gloo aborts, nccl waits for ever, or adds what does not belong
together. So the ranks compare what they are about to do before they do it, while that costs little: over gloo always,
over nccl in the first steps only, since the host must wait for the answer. In a pipeline "all ranks" are the copies of
one stage.

A part that nobody uses in a step is fine: nobody gathers it, and it gets no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from lockstep.errors import UserError
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime

FIRST_STEPS = 3
END, GATHER, ADD = range(3)  # what a rank is about to do


class SameParts:
    """What the ranks are about to exchange, compared by all of them."""

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        stages: Sequence[nn.Module] | None = None,
        copies: Collectives | None = None,
    ):
        """`model` has been cut over all ranks; or this rank's `stages` of it, over their `copies`."""
        self.runtime, self.steps = runtime, 0
        self.among = copies or runtime.collectives
        self.groups: list[list[str]] = []  # of parameters that are gathered as one
        self._in_mesh = False  # ranks share layers or stages too (mesh.tp, mesh.pp), which zero1 does not know
        names = {id(p): name for name, p in model.named_parameters()}
        for module in nn.ModuleList(stages or [model]).modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            if group is not None and isinstance(module, FSDPModule):
                module.set_custom_all_gather(_ComparedGather(self, len(self.groups)))
                self._compare_before_adding(group, len(self.groups))
                known = [names.get(id(each.sharded_param)) or str(each._param_fqn) for each in group.fsdp_params]
                self.groups.append(known)
                self._in_mesh = "dp" in (group.mesh_info.mesh.mesh_dim_names or ())

    @property
    def compares(self) -> bool:
        return self.runtime.backend == "gloo" or self.steps <= FIRST_STEPS

    def compare(self, what: int, number: int = 0, has_gradient: tuple[bool, ...] = ()) -> None:
        """Every rank says what it does next, with which group. If that differs, every rank ends with the same error."""
        if not self.compares:
            return
        pattern = hash(has_gradient) % 2**31  # of whole numbers: the same in all processes
        mine = torch.tensor([what, number, pattern], dtype=torch.int64, device=self.runtime.device)
        every = mine.new_empty(self.among.world.size, len(mine))
        dist.all_gather(list(every.unbind()), mine, group=self.among.group)
        if not torch.equal(every, mine.expand_as(every)):  # on a GPU the host waits here
            words = self._in_words(what, number, has_gradient)
            raise _differ(self.among.gather_json([self.runtime.world.rank, *words]), self._in_mesh)

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
        names = self.groups[number]
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


def _differ(told: list[tuple[int, str, list[str]]], in_mesh: bool) -> UserError:
    """`told`: every rank, what it does, and with which parameters."""
    first = told[0]
    other = next(words for words in told if words[1:] != first[1:])
    found, silent = [], []
    for (rank, does, names), peer in ((first, other), (other, first)):
        only = [name for name in names if name not in peer[2]]
        found += [f"rank {rank} {does} {_some(only)}"] if only else []
        silent += [] if only else [f"rank {rank} does not"]
    if len(found) == 1:
        found += silent
    return UserError(
        "all ranks use the same parameters in a micro-batch, as fsdp needs it",
        "; ".join(found),
        f"type strategy=ddp ddp.find_unused_parameters=true{'' if in_mesh else ', or strategy=zero1 with it'}; or call "
        "that part of the model on every rank, and multiply by 0 what should not count",
    )


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
