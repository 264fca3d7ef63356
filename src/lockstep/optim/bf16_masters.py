"""Optimizers of parameters that are stored in bfloat16: they see float32 stand-ins, and never bfloat16 itself.

kept         a stand-in is the parameter in full precision (its master); the model has a rounded copy of it
stochastic   a stand-in lives for one update: made from the parameter, and rounded back up or down at random
compensated  the same, and what rounding cut off is kept in a second bfloat16, and added back the next time

Updates go through the parameters in pieces, so that what lives for one update stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.runtime.layout import block_of, like, local, mesh_of
from lockstep.runtime.seeds import derive

PIECE = 2**24  # elements that are updated at once
CUT_OFF = "compensation"  # its name in the optimizer's state, which a checkpoint holds
Part = tuple[dict[str, Any], list[Tensor]]  # a parameter group, and some of its stand-ins


class MasterWeights:
    def __init__(self, optimizers: list[torch.optim.Optimizer], model: nn.Module, way: str, seed: int):
        """Puts stand-ins into the optimizers' groups, in place of the parameters."""
        self.way, self.seed = way, seed
        self.names = {id(p): name for name, p in model.named_parameters()}
        self._stand_ins: dict[int, nn.Parameter] = {}  # by the id of the parameter
        self._parameters: dict[int, nn.Parameter] = {}  # by the id of the stand-in
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._replaced(p, optimizer) for p in group["params"]]

    def named(self) -> dict[int, str]:
        return {key: self.names[id(p)] for key, p in self._parameters.items()}

    def kept(self, parameter: Tensor) -> Tensor | None:
        """The parameter in full precision, where it lives on, and on this rank."""
        return self._stand_ins.get(id(parameter)) if self.way == "kept" else None

    def held(self) -> list[Tensor]:
        return list(self._stand_ins.values()) if self.way == "kept" else []

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, divisor: Tensor | None, now: int) -> None:
        """`now` numbers the steps: no two draw the same random bits."""
        groups = optimizer.param_groups
        if not any(id(p) in self._parameters for group in groups for p in group["params"]):
            optimizer.step()  # it moves something else
            return
        try:
            for parts in self._pieces(optimizer):
                for _, some in parts:
                    self._make(optimizer, some, divisor)
                optimizer.param_groups = [{**group, "params": some} for group, some in parts]
                optimizer.step()
                for (group, some), used in zip(parts, optimizer.param_groups, strict=True):
                    group.update({key: value for key, value in used.items() if key != "params"})
                    self._take_over(optimizer, some, now)
        finally:
            optimizer.param_groups = groups

    def _replaced(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> nn.Parameter:
        """Its stand-in, which takes over what the optimizer may have set up for it already."""
        made = self._stand_in_for(parameter)
        state = optimizer.state.pop(parameter, None)
        if state:
            kept = {key: _wide(value, parameter) for key, value in state.items()}
            optimizer.state[made] = kept if made is not parameter else state
        return made

    def _stand_in_for(self, parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.requires_grad:
            return parameter
        wide = local(parameter).detach().float()
        if self.way != "kept":
            _empty(wide)
        made = nn.Parameter(_alike(wide, parameter))
        self._stand_ins[id(parameter)], self._parameters[id(made)] = made, parameter
        return made

    def _pieces(self, optimizer: torch.optim.Optimizer) -> Iterator[list[Part]]:
        """What is updated at once. An optimizer that we do not know may count its calls: it gets everything."""
        parts = [part for group in optimizer.param_groups for part in self._parts(group)]
        if type(optimizer).__module__.startswith(("torch.optim.", "lockstep.")):
            yield from ([part] for part in parts)
        elif parts:
            yield parts

    def _parts(self, group: dict[str, Any]) -> Iterator[Part]:
        """Those with a gradient, by the mesh they are laid out over, about PIECE elements at a time."""
        by_grid: dict[Any, list[Tensor]] = {}
        for stand_in in group["params"]:
            if id(stand_in) in self._parameters and self._parameters[id(stand_in)].grad is not None:
                by_grid.setdefault(mesh_of(stand_in), []).append(stand_in)
        for some in by_grid.values():
            piece, size = [], 0
            for stand_in in some:
                if piece and size + stand_in.numel() > PIECE:  # of the whole: the same pieces on every rank
                    yield group, piece
                    piece, size = [], 0
                piece.append(stand_in)
                size += stand_in.numel()
            yield group, piece

    def _make(self, optimizer: torch.optim.Optimizer, some: list[Tensor], divisor: Tensor | None) -> None:
        """Values and gradients in float32; the gradient is divided here, where that costs no precision."""
        for stand_in in some:
            parameter = self._parameters[id(stand_in)]
            if self.way != "kept":
                wide = local(stand_in)
                wide.untyped_storage().resize_(wide.numel() * wide.element_size())
                wide.copy_(local(parameter))
                cut_off = optimizer.state[stand_in].get(CUT_OFF) if stand_in in optimizer.state else None
                if cut_off is not None:
                    wide.add_(local(cut_off))
            gradient: Tensor = parameter.grad  # pyrefly: ignore[bad-assignment]
            wide = local(gradient).float()
            if divisor is not None:
                wide.div_(divisor)
            stand_in.grad = _alike(wide, gradient)

    def _take_over(self, optimizer: torch.optim.Optimizer, some: list[Tensor], now: int) -> None:
        for stand_in in some:
            parameter, wide = self._parameters[id(stand_in)], local(stand_in)
            here = local(parameter)
            if self.way == "stochastic":
                key = rounding_key(self.seed, now, self.names[id(parameter)])
                here.copy_(round_stochastically(wide, places_in_whole(parameter, wide.device), key))
            else:
                here.copy_(wide)
            if self.way == "compensated":
                left = (wide - here).to(here.dtype)
                # Only now: optimizers set up a state that they find empty.
                optimizer.state[stand_in][CUT_OFF] = _alike(left, parameter)
            stand_in.grad = None
            if self.way != "kept":
                _empty(wide)


def _wide(value: Any, parameter: Tensor) -> Any:
    low = isinstance(value, Tensor) and value.dtype == parameter.dtype
    return value.float() if low else value


def _alike(part: Tensor, model: Tensor) -> Tensor:
    return like(part, model) if isinstance(model, DTensor) else part


def _empty(tensor: Tensor) -> None:
    """Keeps its shape and gives its memory back."""
    tensor.untyped_storage().resize_(0)


# Stochastic rounding from float32 to bfloat16: up or down at random, so that the mean of many roundings is the
# number. The random bits are a function of a key and of the element's place in the whole parameter. Whichever rank
# holds an element draws the same bits for it, whatever else it holds.


_LOW = 0xFFFF  # the half of a float32's bits that a bfloat16 does not have


def round_stochastically(values: Tensor, places: Tensor, key: int) -> Tensor:
    """float32 `values` to bfloat16; `places` (int32, as many) say which elements of the whole they are."""
    bits = values.contiguous().view(torch.int32)
    raised = bits + (_mixed(places, key) & _LOW)  # carries into the upper half as often as the lower half is large
    return (raised & ~_LOW).view(torch.float32).to(torch.bfloat16)


def rounding_key(seed: int, step: int, name: str) -> int:
    return derive(seed, f"rounding/{name}", step)


def places_in_whole(parameter: Tensor, device: torch.device) -> Tensor:
    """For each element of this rank's part, its number in the whole parameter, as int32 (large ones wrap around)."""
    if not hasattr(parameter, "to_local"):
        return torch.arange(parameter.numel(), dtype=torch.int32, device=device).view(parameter.shape)
    block = block_of(parameter)  # pyrefly: ignore[bad-argument-type]
    places = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(block.shape))):
        here = torch.arange(block.local.shape[dim], device=device) + block.offset[dim]
        places = places + (here * stride).view(-1, *[1] * (len(block.shape) - 1 - dim))
        stride *= block.shape[dim]
    return places.to(torch.int32).view(block.local.shape)


def _mixed(places: Tensor, key: int) -> Tensor:
    """Each number and the key, scrambled: multiplications spread bits upwards, shifts bring them down again."""
    low, high = _signed(key), _signed(key >> 32)
    mixed = places * _signed(0x9E3779B1) + low
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> 15 & 0x1FFFF) ^ high) * _signed(factor)
    return mixed ^ (mixed >> 16 & _LOW)


def _signed(number: int) -> int:
    """Its lower 32 bits, as int32 reads them."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number
