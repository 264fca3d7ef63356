"""Parameters stored in bfloat16. Their optimizers see float32 masters of them, with one of three kinds of rounding:

master       a master is permanent, and the model has a rounded copy of it
stochastic   a master exists for one update and is then rounded up or down at random into the parameter
compensated  the same with rounding to nearest; the rounding error is stored in bfloat16 and added the next time

An update processes a few parameters at a time, so that temporary masters need little memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.optim.capabilities import is_known
from lockstep.optim.groups import GroupPart, restricted_to
from lockstep.runtime.seeds import derive
from lockstep.runtime.shards import by_mesh, dtensor_like, shard_of, to_local

CHUNK_ELEMENTS = 2**24  # elements that are updated at a time
COMPENSATION = "compensation"  # key of the rounding error, in the optimizer's state and in a checkpoint
LOW_BITS = 0xFFFF  # the lower half of a float32, which a bfloat16 lacks


class MasterWeights:
    """Replaces bfloat16 parameters in the optimizers' groups by float32 masters, and rounds the updated values.

    The optimizer steps the masters as if they were the parameters, and keeps its state for them. After the step the
    parameters get the rounded values. Checkpoints hold the masters' values under the names of the parameters.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer], model: nn.Module, rounding: str, seed: int):
        """`rounding` is one of the three kinds above; `seed` is the run's, for stochastic rounding."""
        self.rounding = rounding
        self.persistent = rounding == "master"  # whether masters keep their memory between two steps
        self.seed = seed

        self.names = {id(p): name for name, p in model.named_parameters()}
        self._masters: dict[int, nn.Parameter] = {}  # the master of each parameter, by the parameter's id
        self._parameters: dict[int, nn.Parameter] = {}  # the parameter of each master, by the master's id

        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._replaced(p, optimizer) for p in group["params"]]

    def named(self) -> dict[int, str]:
        """Return the name of each parameter, by the id of its master."""
        return {key: self.names[id(p)] for key, p in self._parameters.items()}

    def master_of(self, parameter: Tensor) -> Tensor | None:
        """Return the permanent master of a parameter, or None if this rank has none for it."""
        return self._masters.get(id(parameter)) if self.persistent else None

    def persistent_tensors(self) -> list[Tensor]:
        """Return the masters, if they are permanent. Temporary ones take no memory between two steps."""
        return list(self._masters.values()) if self.persistent else []

    @torch.no_grad()
    def step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        divisor: Tensor | None,
        pass_count: int,
        step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: optimizer.step(),
    ) -> None:
        """Update the parameters of one optimizer, a few at a time.

        divisor: shape (); gradients are divided by it, unless it is None
        pass_count: seeds the random bits, so that no two updates draw the same
        step: steps the optimizer; it may put other tensors into its groups
        """
        if not any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            # None of its tensors has a master: it updates something other than trainable parameters.
            optimizer.step()
            return

        for parts in self._parts_per_step(optimizer):
            masters = [master for _, tensors in parts for master in tensors]
            for master in masters:
                self._load_master(optimizer, master, divisor)

            with restricted_to(optimizer, parts):
                step(optimizer)

            for master in masters:
                self._round_back(optimizer, master, pass_count)

    def _replaced(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> nn.Parameter:
        """Return a float32 master with the same placement. Frozen parameters are returned as they are."""
        if not parameter.requires_grad:
            return parameter

        # A temporary master has memory only during an update.
        wide = to_local(parameter).detach().float()
        if not self.persistent:
            _free(wide)

        master = nn.Parameter(dtensor_like(wide, parameter))
        self._masters[id(parameter)] = master
        self._parameters[id(master)] = parameter

        # Some optimizers, such as Adagrad, create their state in the constructor, in the parameter's bfloat16.
        state = optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[master] = {
                key: value.float() if isinstance(value, Tensor) and value.dtype == parameter.dtype else value
                for key, value in state.items()
            }

        return master

    def _parts_per_step(self, optimizer: torch.optim.Optimizer) -> Iterator[list[GroupPart]]:
        """Yield the parts of groups that one call of `optimizer.step()` updates."""
        parts = [part for group in optimizer.param_groups for part in self._parts(group)]
        # A user-defined optimizer may count its calls: it gets everything at once.
        if is_known(optimizer):
            yield from ([part] for part in parts)
        elif parts:
            yield parts

    def _parts(self, group: dict[str, Any]) -> Iterator[GroupPart]:
        """Yield the masters of parameters with a gradient, mesh by mesh, about CHUNK_ELEMENTS elements at a time."""
        known = [master for master in group["params"] if id(master) in self._parameters]
        with_gradient = [master for master in known if self._parameters[id(master)].grad is not None]

        for masters in by_mesh(with_gradient):
            part: list[Tensor] = []
            size = 0
            for master in masters:
                # `numel()` of a DTensor counts the full tensor, so all ranks make the same parts.
                if part and size + master.numel() > CHUNK_ELEMENTS:
                    yield group, part
                    part, size = [], 0

                part.append(master)
                size += master.numel()

            yield group, part

    def _load_master(self, optimizer: torch.optim.Optimizer, master: Tensor, divisor: Tensor | None) -> None:
        """Set the value and the gradient of a master. The division in float32 loses no precision."""
        parameter = self._parameters[id(master)]

        # The value is the parameter plus the stored rounding error. A permanent master keeps its value.
        if not self.persistent:
            wide = to_local(master)
            wide.untyped_storage().resize_(wide.numel() * wide.element_size())
            wide.copy_(to_local(parameter))

            # Not `state[master]`: it would create an empty state, which optimizers take for a first step.
            compensation = optimizer.state.get(master, {}).get(COMPENSATION)
            if compensation is not None:
                wide.add_(to_local(compensation))

        # The gradient is a float32 copy, which is freed after the update.
        gradient: Tensor = parameter.grad  # pyrefly: ignore[bad-assignment]
        wide = to_local(gradient).float()
        if divisor is not None:
            wide.div_(divisor)

        master.grad = dtensor_like(wide, gradient)

    def _round_back(self, optimizer: torch.optim.Optimizer, master: Tensor, pass_count: int) -> None:
        """Round an updated master into its bfloat16 parameter, and free temporary memory."""
        parameter = self._parameters[id(master)]
        wide = to_local(master)
        shard = to_local(parameter)

        # `copy_` rounds to the nearest bfloat16.
        if self.rounding == "stochastic":
            key = rounding_key(self.seed, pass_count, self.names[id(parameter)])
            shard.copy_(round_stochastically(wide, element_indices(parameter, wide.device), key))
        else:
            shard.copy_(wide)

        # Stored after the update, because optimizers initialise their state only if it is empty.
        if self.rounding == "compensated":
            optimizer.state[master][COMPENSATION] = dtensor_like((wide - shard).to(shard.dtype), parameter)

        master.grad = None
        if not self.persistent:
            _free(wide)


def _free(tensor: Tensor) -> None:
    """Release the memory of a tensor. It keeps its shape."""
    tensor.untyped_storage().resize_(0)


# ---- stochastic rounding ----

# Rounds float32 to bfloat16 up or down at random, so that the expected value is the exact number. The random bits are a
# function of a key and of the element's index in the full parameter, so they do not depend on the rank that holds it.


def round_stochastically(values: Tensor, indices: Tensor, key: int) -> Tensor:
    """Return float32 `values` as bfloat16. `indices` (int32, same shape) number the elements of the full tensor."""
    # Adding random low bits carries into the upper half with a probability proportional to the lower half.
    with_random_bits = values.contiguous().view(torch.int32) + (_scrambled(indices, key) & LOW_BITS)
    return (with_random_bits & ~LOW_BITS).view(torch.float32).to(torch.bfloat16)


def rounding_key(seed: int, step: int, name: str) -> int:
    """Return the key for a parameter's random bits in one step."""
    return derive(seed, f"rounding/{name}", step)


def element_indices(parameter: Tensor, device: torch.device) -> Tensor:
    """Return, for each element on this rank, its index in the full parameter, as int32. Large indices wrap around."""
    if not hasattr(parameter, "to_local"):
        return torch.arange(parameter.numel(), dtype=torch.int32, device=device).view(parameter.shape)

    # Row-major indices: add the contribution of each dimension, by broadcasting.
    shard = shard_of(parameter)  # pyrefly: ignore[bad-argument-type]
    indices = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (length, offset) in enumerate(zip(shard.local.shape, shard.offset, strict=True)):
        along = torch.arange(offset, offset + length, device=device) * math.prod(shard.full_shape[dim + 1 :])
        indices = indices.unsqueeze(-1) + along

    return indices.to(torch.int32)


def _scrambled(indices: Tensor, key: int) -> Tensor:
    """Mix each index with the key: multiplications spread bits upwards, shifts bring them down again."""
    mixed = indices * _signed(0x9E3779B1) + _signed(key)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> 15 & 0x1FFFF) ^ _signed(key >> 32)) * _signed(factor)

    return mixed ^ (mixed >> 16 & LOW_BITS)


def _signed(number: int) -> int:
    """Return the lower 32 bits of a number, read as a signed int32."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number
