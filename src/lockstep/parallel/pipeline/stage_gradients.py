"""Sums and norms of the gradients of a pipeline, in which a rank holds the parameters of its own stages.

Gradients are summed over replicas (dp), and over stages that share a weight. Norms are those of the parameters of all
stages, on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.parallel.gradients import (
    broadcast_unsharded_gradients,
    fill_missing,
    redistribute_gradient,
    sum_gradients,
)
from lockstep.parallel.mesh import Axes, Mesh
from lockstep.parallel.micro_batches import full_norms
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime
from lockstep.runtime.shards import squared_norms
from lockstep.runtime.world import World


def ranks_at(mesh: Mesh, pp_ranks: Collection[int]) -> tuple[int, ...]:
    """Return all ranks with these coordinates along pp."""
    size = mesh.sizes["dp"] * mesh.sizes["tp"]
    return tuple(pp_rank * size + offset for pp_rank in sorted(pp_ranks) for offset in range(size))


class StageGradients:
    """The gradients of a model's trainable parameters, of which this rank holds some."""

    def __init__(
        self,
        runtime: Runtime,
        axes: Axes,
        parameters: Sequence[nn.Parameter],
        is_held: Sequence[bool],
        pp_ranks: Sequence[Collection[int]],
        sharded: bool,
    ):
        """Create the process groups of stages that share weights. Collective: every rank must call it.

        parameters: those of all stages, in the same order on all ranks
        is_held: for each parameter, whether this rank holds it
        pp_ranks: for each parameter, the coordinates along pp of the ranks whose stages use it; if none do, all hold it
        sharded: FSDP has sharded the stages along dp, and sums their gradients itself
        """
        self._runtime = runtime
        self._dp_group = axes.along("dp")
        self._tp_group = axes.along("tp")
        self._parameters = parameters
        self._is_held = is_held
        self._sharded = sharded

        # How many ranks along pp hold each parameter.
        self._copies = [len(users) or axes.mesh.sizes["pp"] for users in pp_ranks]
        self._tied = _tied_groups(runtime, axes.mesh, [tuple(sorted(users)) for users in pp_ranks])

    def used(self) -> list[bool]:
        """Return, for each parameter, whether this rank holds it and its stages have used it in this pass."""
        pairs = zip(self._is_held, self._parameters, strict=True)
        return [is_held and p.grad is not None for is_held, p in pairs]

    def sum(self, used: Sequence[bool]) -> None:
        """Sum gradients over replicas, and then over stages that share a weight, so that all get the same bits.

        `used`: for each parameter, whether any rank used it. If none did, it keeps no gradient.
        """
        triples = zip(self._parameters, self._is_held, used, strict=True)
        trained = [p for p, is_held, is_used in triples if is_held and is_used]
        for parameter in trained:
            redistribute_gradient(parameter)

        # FSDP has already summed over the replicas.
        fill_missing(trained)
        if not self._sharded:
            sum_gradients(trained, self._dp_group)

        for indices, group in self._tied:
            sum_gradients([self._parameters[index] for index in indices if used[index]], group)

        broadcast_unsharded_gradients(trained, self._tp_group)

    def gradient_norms(self) -> Tensor:
        """Return the norms of the summed gradients, one for each parameter of all stages: [parameters]. Collective."""
        squared = torch.zeros(len(self._parameters), dtype=torch.float64, device=self._runtime.device)
        triples = enumerate(zip(self._parameters, self._is_held, strict=True))
        grads = {index: p.grad for index, (p, is_held) in triples if is_held and p.grad is not None}

        # A parameter that several stages hold counts once.
        if grads:
            copies = torch.tensor([self._copies[index] for index in grads], device=squared.device)
            squared[[*grads]] = self._squared_terms([*grads.values()]) / copies

        return self._runtime.collectives.all_reduce_(squared).sqrt()

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the norm of each full tensor of this rank's stages. Collective along dp and tp."""
        # Without shards, a stage holds its tensors in full.
        if self._tp_group.world.alone and not self._sharded:
            return full_norms(tensors)

        squared = self._tp_group.all_reduce_(self._dp_group.all_reduce_(self._squared_terms(tensors)))
        return list(squared.sqrt().unbind())

    def _squared_terms(self, tensors: list[Tensor]) -> Tensor:
        """Return this rank's terms of the squared norms, which are to be summed over dp and tp."""
        ranks = self._dp_group.world.size * self._tp_group.world.size
        return squared_norms(tensors, ranks).to(self._runtime.device)


def _tied_groups(
    runtime: Runtime, mesh: Mesh, pp_ranks: Sequence[tuple[int, ...]]
) -> list[tuple[list[int], Collectives]]:
    """Return the parameters that this rank shares with other stages: lists of indices, each with a process group.

    `pp_ranks` holds, for each parameter, the coordinates along pp of the ranks that hold it. Collective: every rank
    must take part in the creation of every process group.
    """
    tied: list[tuple[list[int], Collectives]] = []
    for shared in dict.fromkeys(users for users in pp_ranks if len(users) > 1):
        indices = [index for index, users in enumerate(pp_ranks) if users == shared]

        # A rank shares with the ranks of the other stages that have the same dp and tp coordinates.
        counterparts = zip(*(ranks_at(mesh, [pp_rank]) for pp_rank in shared), strict=True)
        group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in counterparts])

        if isinstance(group, dist.ProcessGroup):
            world = World(group.rank(), group.size())
            tied.append((indices, Collectives(world, runtime.device, runtime.heartbeat, group)))

    return tied
