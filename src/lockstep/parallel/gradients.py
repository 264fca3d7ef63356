"""Sums of gradients over ranks, after the last backward of a pass, and errors if there are no gradients.

All drivers that add gradients themselves call these functions. A gradient keeps the dtype, the layout in memory and the
placements of its parameter, and a parameter that no rank has used keeps no gradient, so that the optimizer skips it as
it would in a single process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError, some_names
from lockstep.parallel.mesh import is_sharded_along_tp
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.control_word import LENGTH
from lockstep.runtime.shards import in_memory_order_of, to_local


def clear_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.grad = None


# ---- sums ----


def sum_with_word(packed_word: Tensor, numbers: Tensor, ranks: Collectives) -> tuple[Tensor, Tensor]:
    """Return the sums over `ranks` of the packed control word [LENGTH] and of `numbers`, from one collective."""
    sums = ranks.all_reduce_(torch.cat([packed_word, numbers.to(packed_word.device)]))
    return sums[:LENGTH], sums[LENGTH:]


def have_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return 1 for each parameter with a gradient on this rank, else 0: [parameters]. Their sums count the ranks."""
    return torch.tensor([p.grad is not None for p in parameters], dtype=torch.float64)


def sum_used(parameters: Sequence[nn.Parameter], users: Sequence[float], ranks: Collectives) -> None:
    """Sum the gradients of the parameters that some rank has used. `users`: for each parameter, how many have."""
    used = [p for p, count in zip(parameters, users, strict=True) if count]
    fill_missing(used)
    sum_gradients(used, ranks)


def count_and_sum(parameters: Sequence[nn.Parameter], ranks: Collectives) -> None:
    """Sum the gradients of the parameters that some rank has used: one collective finds out, the others sum."""
    if ranks.world.alone or not parameters:
        return

    # On a GPU the host waits for the result, because it decides what is summed.
    users = ranks.all_reduce_(have_gradients(parameters).to(ranks.device)).tolist()
    sum_used(parameters, users, ranks)


def fill_missing(parameters: Sequence[nn.Parameter]) -> None:
    """Give zeros to each parameter without a gradient: what this rank adds to the gradients of the others."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def sum_gradients(parameters: Sequence[nn.Parameter], ranks: Collectives) -> None:
    """Sum gradients, or this rank's shards of them, over `ranks`: one all-reduce for each dtype.

    Half-precision gradients are added in float32 and rounded once. The same parameters must have gradients on all
    `ranks`.
    """
    if ranks.world.alone:
        return

    reduced = [(p, p.grad) for p in parameters if p.grad is not None]

    # The dtypes come in the same order on all ranks, which a set would not guarantee.
    for dtype in dict.fromkeys([p.dtype for p, _ in reduced]):
        pairs = [(p, grad) for p, grad in reduced if p.dtype == dtype]
        shards = [grad.to_local() if isinstance(grad, DTensor) else grad for _, grad in pairs]
        flat = torch.cat([shard.flatten() for shard in shards])

        total = ranks.all_reduce_(flat.to(torch.promote_types(dtype, torch.float32))).to(dtype)
        sums = total.split([shard.numel() for shard in shards])
        for (parameter, grad), shard, summed in zip(pairs, shards, sums, strict=True):
            # A plain gradient is replaced, which saves a copy. A DTensor keeps its placements.
            if shard is grad:
                parameter.grad = in_memory_order_of(parameter, summed.view_as(shard))
            else:
                shard.copy_(summed.view_as(shard))


def redistribute_gradient(parameter: nn.Parameter) -> None:
    """Give a gradient the placements of its parameter. Autograd may leave it as Partial, a term of a sum."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def broadcast_unsharded_gradients(parameters: Sequence[nn.Parameter], tp: Collectives) -> None:
    """Broadcast the gradients of unsharded parameters from the first rank of a tp group to its other ranks.

    Each rank computes these gradients itself. On a GPU, some kernels add in varying order, and parameters whose
    gradients differ in the last bit would drift apart.
    """
    if tp.device.type == "cuda" and not tp.world.alone and not torch.are_deterministic_algorithms_enabled():
        tp.broadcast_([to_local(p.grad) for p in parameters if p.grad is not None and not is_sharded_along_tp(p)])


# ---- missing gradients ----


def no_gradient() -> UserError:
    """Return the error for a loss through which no parameter gets a gradient."""
    return UserError(
        "no parameter of the model gets a gradient: the loss does not depend on any of them",
        "",
        "look for torch.no_grad() or inference_mode() around model(...) in the loss, for .detach(), .item() or numpy "
        "on the way from its output to the loss, and for a loss that does not use the output",
    )


def check_reached(missed: list[str], trainable: int) -> None:
    """Raise if a backward missed some parameters. `trainable` is the number of all trainable parameters."""
    if len(missed) == trainable:
        raise no_gradient()

    if missed:
        raise UserError(
            f"the loss of a micro-batch does not depend on every trainable parameter: no gradient for "
            f"{some_names(missed)}",
            "",
            "freeze them (requires_grad=False) if nothing uses them; if only some losses or micro-batches do, set "
            "ddp.find_unused_parameters=true",
            cause="unused",
        )
