"""Check that all ranks use the same parameters, because FSDP2 does not.

Under FSDP every rank must gather the same parameter groups, and reduce the gradients of the same parameters, in the
same order. torch (2.11 to 2.15, `torch.distributed.fsdp._fully_shard`) issues these collectives from hooks, for the
parameters that the rank itself used, and does not compare ranks: if only some ranks use a part of the model, gloo
aborts, and nccl hangs or adds gradients of different parameters. So before each of these collectives the ranks compare
what they are about to do: always over gloo, and only in the first passes over nccl, where the host must wait.

A part that no rank uses in a pass is fine: it is not gathered and gets no gradient. In a pipeline, the replicas of one
stage are compared.

There is a public way to intercept gathers (`set_custom_all_gather`), but none that sees which parameters have a
gradient before they are reduced (torch_private.py). tests/ranks/test_collective_check.py shows what torch does without
this module, and fails when torch no longer needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.errors import UserError, some_names
from lockstep.parallel.fsdp import torch_private
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime

FIRST_PASSES = 3  # the passes that are compared over nccl
END, GATHER, REDUCE = range(3)  # the next action of a rank; END: it has finished the last backward of the pass
VERBS = ("is done", "is about to use", "has a gradient for")


class CollectiveCheck:
    """Compares the next collective of all ranks.

    The driver calls `begin_pass` before the first forward of each pass, and `compare(END)` after its last backward.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        stages: Sequence[nn.Module] | None = None,
        dp_group: Collectives | None = None,
    ):
        """Install the comparison on all parameter groups.

        `model` is sharded over all ranks. In a pipeline, only this rank's `stages` are, over their `dp_group`.
        """
        self.runtime = runtime
        self._passes = 0
        self.among = dp_group or runtime.collectives
        self.groups: list[list[str]] = []  # the parameter names of each parameter group
        self._in_mesh = False  # whether mesh.tp or mesh.pp is set, which excludes strategy=zero1

        names = {id(p): name for name, p in model.named_parameters()}

        # A ModuleList visits modules that several stages share only once.
        modules = nn.ModuleList(stages or [model]).modules()
        for module in [module for module in modules if isinstance(module, FSDPModule)]:
            parameters = torch_private.grouped_parameters(module)
            if parameters:
                # All ranks visit the modules in the same order, so a number means the same group on all ranks.
                number = len(self.groups)
                module.set_custom_all_gather(_ComparedGather(self, number))
                torch_private.call_before_reduction(module, partial(self._compare_gradients, parameters, number))
                self.groups.append(
                    [names.get(id(torch_private.shard(p))) or torch_private.name_in_module(p) for p in parameters]
                )
                self._in_mesh = "dp" in torch_private.mesh_axes(module)

    def begin_pass(self) -> None:
        self._passes += 1

    @property
    def compares(self) -> bool:
        return self.runtime.backend == "gloo" or self._passes <= FIRST_PASSES

    def compare(self, action: int, number: int = 0, has_gradient: tuple[bool, ...] = ()) -> None:
        """Compare this rank's next `action` on parameter group `number` with the other ranks' next actions.

        Collective. If they differ, every rank raises the same error.
        """
        if not self.compares:
            return

        # The names are gathered only if something differs: three integers cost less than a list of strings.
        pattern = hash(has_gradient) % 2**31  # a tuple of bools has the same hash in all processes
        intent = torch.tensor([action, number, pattern], dtype=torch.int64, device=self.runtime.device)
        intents = intent.new_empty(self.among.world.size, len(intent))
        dist.all_gather(list(intents.unbind()), intent, group=self.among.group)

        if not torch.equal(intents, intent.expand_as(intents)):  # on a GPU the host waits here
            names = [] if action == END else self.groups[number]
            if action == REDUCE:
                names = [name for name, present in zip(names, has_gradient, strict=True) if present]

            actions = self.among.all_gather_json([self.runtime.world.rank, VERBS[action], names])
            raise _ranks_differ_error(actions, self._in_mesh)

    def _compare_gradients(self, parameters: list[Any], number: int) -> None:
        # torch will reduce this rank's gradients, whichever gradients the other ranks have.
        has_gradient = tuple(map(torch_private.has_gradient, parameters))

        # Without any gradient, torch starts no collective.
        if any(has_gradient):
            self.compare(REDUCE, number, has_gradient)


class _ComparedGather(torch_private.DefaultAllGather):
    def __init__(self, check: CollectiveCheck, number: int):
        self._check = check
        self._number = number

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._check.compare(GATHER, self._number)
        return super().__call__(output_tensor, input_tensor, group, async_op)


def _ranks_differ_error(actions: list[tuple[int, str, list[str]]], in_mesh: bool) -> UserError:
    """Return the error. `actions` holds (rank, what it is about to do, names of the parameters) for every rank."""
    # Two ranks that differ are enough for the message.
    first = actions[0]
    second = next(action for action in actions if action[1:] != first[1:])

    named = []
    silent = []

    for (rank, verb, names), (_, _, peer_names) in ((first, second), (second, first)):
        only = [name for name in names if name not in peer_names]
        if only:
            named.append(f"rank {rank} {verb} {some_names(only, 4)}")
        else:
            silent.append(f"rank {rank} does not")

    # If only one of the two ranks has parameters of its own to name, say so: "rank 1 does not".
    if len(named) == 1:
        named += silent

    # A mesh cannot have strategy=zero1.
    alternative = "" if in_mesh else ", or strategy=zero1 with it"
    return UserError(
        "the ranks use different parameters in the same micro-batch, but fsdp gathers parameters on all ranks together",
        "; ".join(named),
        f"set strategy=ddp ddp.find_unused_parameters=true{alternative}; or call that part of the model on every "
        "rank, and multiply its output by 0 where it should not count",
    )
