"""Parameters stored in bfloat16: their optimizers only ever see float32 stand-ins. There are three kinds of rounding:

master       the stand-in is the parameter in full precision (its master weight), and the model has a rounded copy
stochastic   the stand-in is made from the parameter for one update, then rounded back up or down at random
compensated  the same, but what rounding cuts off is kept in a second bfloat16, and added to the next stand-in

An update goes through the parameters a few at a time, to keep the memory for temporary stand-ins small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.optim.optimizers import GroupPart, only_these
from lockstep.runtime.layout import by_mesh, like, local, shard_of
from lockstep.runtime.seeds import derive

AT_ONCE = 2**24  # elements that are updated at once
COMPENSATION = "compensation"  # what rounding cut off, in the optimizer's state and in a checkpoint
LOW_BITS = 0xFFFF  # the half of a float32's bits that a bfloat16 does not have


class MasterWeights:
    """Replaces bfloat16 parameters in the optimizers' groups by float32 stand-ins and rounds their updates back."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], model: nn.Module, rounding: str, seed: int):
        """`rounding` is one of the three kinds above; `seed` is that of the run, for stochastic rounding."""
        self.rounding = rounding
        self.persistent = rounding == "master"  # stand-ins live on between two steps
        self.seed = seed
        self.names = {id(p): name for name, p in model.named_parameters()}
        self._stand_ins: dict[int, nn.Parameter] = {}  # by the id of the parameter
        self._parameters: dict[int, nn.Parameter] = {}  # by the id of the stand-in

        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._replaced(p, optimizer) for p in group["params"]]

    def named(self) -> dict[int, str]:
        """Return the name of each parameter, by the id of its stand-in."""
        return {key: self.names[id(p)] for key, p in self._parameters.items()}

    def master_of(self, parameter: Tensor) -> Tensor | None:
        """Return the parameter in full precision, if there are master weights and this rank has this one."""
        return self._stand_ins.get(id(parameter)) if self.persistent else None

    def held(self) -> list[Tensor]:
        """Return the master weights that take memory between two steps."""
        return list(self._stand_ins.values()) if self.persistent else []

    @torch.no_grad()
    def step(
        self,
        optimizer: torch.optim.Optimizer,
        divisor: Tensor | None,
        now: int,
        call: Callable[[torch.optim.Optimizer], None] = lambda optimizer: optimizer.step(),
    ) -> None:
        """Update the parameters of one optimizer, a few at a time.

        divisor: shape (); gradients are divided by it. None: they have their true size.
        now: the number of the step, so that no two steps draw the same random bits.
        call: steps the optimizer; it may put other tensors into its groups
        """
        if not any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            # None of its tensors has a stand-in: it moves something that is not a parameter of the model.
            optimizer.step()
            return

        for parts in self._in_turn(optimizer):
            stand_ins = [stand_in for _, tensors in parts for stand_in in tensors]
            for stand_in in stand_ins:
                self._fill(optimizer, stand_in, divisor)
            with only_these(optimizer, parts):
                call(optimizer)
            for stand_in in stand_ins:
                self._round_back(optimizer, stand_in, now)

    def _replaced(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> nn.Parameter:
        """Return a float32 stand-in of the same placement. Frozen parameters stand for themselves."""
        if not parameter.requires_grad:
            return parameter

        # A stand-in for one update has memory only while that lasts.
        wide = local(parameter).detach().float()
        if not self.persistent:
            _free(wide)
        stand_in = nn.Parameter(like(wide, parameter))
        self._stand_ins[id(parameter)] = stand_in
        self._parameters[id(stand_in)] = parameter

        # Some optimizers, such as Adagrad, have set up their state already, in the parameter's bfloat16.
        state = optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[stand_in] = {
                key: value.float() if isinstance(value, Tensor) and value.dtype == parameter.dtype else value
                for key, value in state.items()
            }

        return stand_in

    def _in_turn(self, optimizer: torch.optim.Optimizer) -> Iterator[list[GroupPart]]:
        """Yield what one call of `optimizer.step()` updates."""
        parts = [part for group in optimizer.param_groups for part in self._parts(group)]
        # A user-defined optimizer may count its calls: it gets everything at once.
        if type(optimizer).__module__.startswith(("torch.optim.", "lockstep.")):
            yield from ([part] for part in parts)
        elif parts:
            yield parts

    def _parts(self, group: dict[str, Any]) -> Iterator[GroupPart]:
        """Yield the stand-ins that have a gradient, by their mesh, about AT_ONCE elements at a time."""
        known = [stand_in for stand_in in group["params"] if id(stand_in) in self._parameters]
        learning = [stand_in for stand_in in known if self._parameters[id(stand_in)].grad is not None]

        for stand_ins in by_mesh(learning):
            part: list[Tensor] = []
            size = 0
            for stand_in in stand_ins:
                # `numel` is that of the full tensor, so that all ranks make the same parts.
                if part and size + stand_in.numel() > AT_ONCE:
                    yield group, part
                    part, size = [], 0
                part.append(stand_in)
                size += stand_in.numel()

            yield group, part

    def _fill(self, optimizer: torch.optim.Optimizer, stand_in: Tensor, divisor: Tensor | None) -> None:
        """Set the value and the gradient of a stand-in. Dividing here, in float32, costs no precision."""
        parameter = self._parameters[id(stand_in)]

        # The value is what the model has, plus what rounding cut off before. Masters keep theirs.
        if not self.persistent:
            wide = local(stand_in)
            wide.untyped_storage().resize_(wide.numel() * wide.element_size())
            wide.copy_(local(parameter))

            # Not `state[stand_in]`: it would create an empty state, which optimizers take for a first step.
            cut_off = optimizer.state.get(stand_in, {}).get(COMPENSATION)
            if cut_off is not None:
                wide.add_(local(cut_off))

        # The gradient is a float32 copy, which is freed after the update.
        gradient: Tensor = parameter.grad  # pyrefly: ignore[bad-assignment]
        wide = local(gradient).float()
        if divisor is not None:
            wide.div_(divisor)
        stand_in.grad = like(wide, gradient)

    def _round_back(self, optimizer: torch.optim.Optimizer, stand_in: Tensor, now: int) -> None:
        """Write an updated stand-in into its bfloat16 parameter and free what lives for one update only."""
        parameter = self._parameters[id(stand_in)]
        wide = local(stand_in)
        shard = local(parameter)

        # `copy_` rounds to the nearest bfloat16.
        if self.rounding == "stochastic":
            key = rounding_key(self.seed, now, self.names[id(parameter)])
            shard.copy_(round_stochastically(wide, element_indices(parameter, wide.device), key))
        else:
            shard.copy_(wide)

        # Stored only after the update: optimizers initialise their state in the first step only if it is empty.
        if self.rounding == "compensated":
            optimizer.state[stand_in][COMPENSATION] = like((wide - shard).to(shard.dtype), parameter)

        # Only masters live on.
        stand_in.grad = None
        if not self.persistent:
            _free(wide)


def _free(tensor: Tensor) -> None:
    """Release the memory of a tensor. It keeps its shape."""
    tensor.untyped_storage().resize_(0)


# ---- stochastic rounding ----

# From float32 to bfloat16, up or down at random, so that the mean of many roundings is the number. The random bits
# are a function of a key and of the element's index in the full parameter: an element gets the same bits on every
# rank that may hold it.


def round_stochastically(values: Tensor, indices: Tensor, key: int) -> Tensor:
    """Return float32 `values` as bfloat16. `indices` (int32, same shape) number the elements of the full tensor."""
    # Adding random low bits carries into the upper half with a probability in proportion to the lower half.
    raised = values.contiguous().view(torch.int32) + (_scrambled(indices, key) & LOW_BITS)
    return (raised & ~LOW_BITS).view(torch.float32).to(torch.bfloat16)


def rounding_key(seed: int, step: int, name: str) -> int:
    """Return the key of a parameter's random bits in one step."""
    return derive(seed, f"rounding/{name}", step)


def element_indices(parameter: Tensor, device: torch.device) -> Tensor:
    """Return the index in the full parameter of each element that this rank holds, as int32; large ones wrap."""
    if not hasattr(parameter, "to_local"):
        return torch.arange(parameter.numel(), dtype=torch.int32, device=device).view(parameter.shape)

    # Row-major indices: each dimension adds its own, and broadcasting does the rest.
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
    """Return the lower 32 bits of a number, as int32 reads them."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number
