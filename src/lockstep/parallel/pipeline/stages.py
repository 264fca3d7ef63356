"""A model as a row of stages: which modules run one after another, where it is cut, and who then holds which tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError

WHAT_TO_WRITE = (
    "give the task `def stages(self, model): return [Front(model), *model.blocks, Back(model)]`: modules that are "
    "called one after another, each with what the one before it returned; or build the model as an nn.Sequential"
)
Given = tuple[tuple[Any, ...], dict[str, Any]]  # what the task passes to the model


def list_pieces(model: nn.Module, given: Sequence[nn.Module] | None) -> list[nn.Module] | None:
    """The modules between which the model may be cut: as the task says, or else the parts of an nn.Sequential. None:
    its forward says by itself what runs after what."""
    pieces = list(given) if given is not None else _flat(model)
    wrong = [type(piece).__name__ for piece in pieces if not isinstance(piece, nn.Module)]
    if wrong:
        raise UserError("stages(model): a list of modules", f"a {wrong[0]} in it", WHAT_TO_WRITE)
    if given is None and pieces == [model]:
        return None
    _check_complete(model, pieces)
    return pieces


def _flat(module: nn.Module) -> list[nn.Module]:
    if type(module).forward is not nn.Sequential.forward:
        return [module]
    return [piece for child in module.children() for piece in _flat(child)]


def _check_complete(model: nn.Module, pieces: Sequence[nn.Module]) -> None:
    known = {id(p) for p in model.parameters()}
    staged = {id(p) for piece in pieces for p in piece.parameters()}
    if foreign := [name for piece in pieces for name, p in piece.named_parameters() if id(p) not in known]:
        raise UserError(
            "stages(model) made of the model's own parts",
            f"{foreign[0]!r}, a parameter that the model does not have",
            "create every parameter in model(), and only arrange them in stages(model)",
        )
    forgotten = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in staged]
    if forgotten:
        raise UserError(
            "every trainable parameter in one of the stages",
            f"{len(forgotten)} in none, first {forgotten[0]!r}",
            "add the module that uses it to what stages(model) returns, or freeze it",
        )


def cut(pieces: Sequence[nn.Module], count: int) -> list[list[nn.Module]]:
    """`count` runs of consecutive pieces; the largest is as small as it can be, by number of parameters."""
    if len(pieces) < count:
        raise too_few(count, len(pieces))
    ends = balance([sum(p.numel() for p in piece.parameters()) for piece in pieces], count)
    return [list(pieces[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def too_few(count: int, possible: int, why: str = "") -> UserError:
    return UserError(
        f"a model in {count} stages",
        f"one that can be cut into {possible}{why}",
        f"use at most {possible} stages (mesh.pp x pp.stages_per_rank), or list more of them in stages(model)",
    )


def balance(sizes: Sequence[int], count: int) -> list[int]:
    """Where each of `count` runs ends, so that the largest is as small as it can be."""
    reach = [0]  # of the first n pieces, how many parameters
    for size in sizes:
        reach.append(reach[-1] + size + 1)  # 1: what has none takes time, too
    # best[n]: the largest run when the first n pieces are cut as well as they can be, and where the cuts are
    best: list[tuple[int, list[int]] | None] = [None] * (len(sizes) + 1)
    best[0] = (0, [])
    for _ in range(count):
        longer: list[tuple[int, list[int]] | None] = [None] * (len(sizes) + 1)
        for end in range(1, len(sizes) + 1):
            found = [(max(b[0], reach[end] - reach[n]), [*b[1], end]) for n in range(end) if (b := best[n])]
            longer[end] = min(found, default=None)
        best = longer
    chosen = best[len(sizes)]
    assert chosen is not None
    return chosen[1]


class Chunk(nn.Module):
    """Consecutive pieces: what one stage computes."""

    def __init__(self, pieces: Sequence[nn.Module]):
        super().__init__()
        self.pieces = nn.ModuleList(pieces)

    def changing(self) -> list[Tensor]:
        """The buffers that a forward may write into."""
        return list(self.buffers())

    def forward(self, given: Given, received: Sequence[Tensor] | None) -> Any:
        """`received`: what the stage before has passed on; None: this one begins the model."""
        args, kwargs = given if received is None else (received, {})
        value: Any = None
        for piece in self.pieces:
            value = piece(*args, **kwargs)
            args, kwargs = value if isinstance(value, tuple) else (value,), {}
        return value


def whereabouts(model: nn.Module, used: Sequence[Sequence[Tensor]]) -> dict[str, tuple[int, ...]]:
    """The stages that use each parameter and buffer, by all its names. Of what no stage uses: none. `used`: by each
    stage."""
    users: dict[int, list[int]] = {}
    for number, tensors in enumerate(used):
        for tensor in {id(t): t for t in tensors}.values():
            users.setdefault(id(tensor), []).append(number)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tuple(users.get(id(tensor), ())) for name, tensor in named}


def keep_only(model: nn.Module, mine: Collection[str], device: torch.device) -> None:
    """Move what is `mine`, by name, to the device, and let go of the memory of the rest. What is let go keeps its name,
    shape and type, so that every rank still sees the same model; its value is one NaN, so that using it cannot pass
    unseen."""
    done: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in done:
            parameter.data = parameter.data.to(device) if name in mine else placeholder(parameter, device)
            done.add(id(parameter))
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                name = f"{prefix}.{key}" if prefix else key
                module._buffers[key] = buffer.to(device) if name in mine else placeholder(buffer, device)


def placeholder(tensor: Tensor, device: torch.device) -> Tensor:
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
