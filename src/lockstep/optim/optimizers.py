"""The user's optimizers, checked against the model, and stepped in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.optim.bf16_masters import MasterWeights
from lockstep.runtime.layout import mesh_of

# torch's own fused optimizers divide gradients by `grad_scale` inside their one pass. Others that claim to take part in
# loss scaling may expect a GradScaler instead, so only these are trusted, and only as they are, not subclassed.
FOLDING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
# These may also skip by themselves (`found_inf`). SGD may not: a skipped first step leaves its momentum uninitialised.
SKIPPING = (torch.optim.Adam, torch.optim.AdamW)
# One of the user's own may say `divides_and_skips = True`: it divides gradients by its `grad_scale`, and leaves all as
# it was where its `found_inf` is not 0 (tensors on the device, or None).
OWN_WORD = "divides_and_skips"


class Optimizers:
    def __init__(self, made: Any, model: nn.Module):
        self.all: list[torch.optim.Optimizer] = list(made) if isinstance(made, list | tuple) else [made]
        for optimizer in self.all:
            _check_kind(optimizer)
        _check_coverage(self.all, model)
        self.groups = [[list(group["params"]) for group in o.param_groups] for o in self.all]  # all, whoever steps them
        fused = all(_divides_and_skips(o) or (type(o) in FOLDING and _fused(o)) for o in self.all)
        # They hold the divisor in float32: float64 parameters are scaled before the step instead.
        self.folds = fused and all(p.dtype == torch.float32 for p in self.parameters())
        self.skips_by_itself = self.folds and all(map(_divides_and_skips, self.all))
        self._mixed = len({mesh_of(p) for p in self.parameters()}) > 1
        self._updating = False
        self._hooks: list[Any] = []
        self.masters: MasterWeights | None = None  # what the optimizers hold instead of parameters stored in bfloat16
        self.now: Callable[[], int] = lambda: 0  # which step it is

    def parameters(self) -> list[nn.Parameter]:
        return _parameters(self.all)

    def stand_in(self, masters: MasterWeights) -> None:
        """The optimizers have float32 parameters now, and these divide gradients as they make them float32."""
        self.masters, self.folds = masters, True
        self.skips_by_itself = all(map(_divides_and_skips, self.all))

    def step(self, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Fused optimizers read `grad_scale` and `found_inf` from themselves; the others ignore them."""
        self._updating = True
        for optimizer in self.all:
            scale = None if self.masters else divisor
            optimizer.grad_scale, optimizer.found_inf = scale, skip  # pyrefly: ignore[missing-attribute]
            if self.masters:
                self.masters.step(optimizer, divisor, self.now())
            elif not self._mixed:
                optimizer.step()
            else:
                with _one_grid_per_group(optimizer):
                    optimizer.step()
        self._updating = False

    def refuse_direct_steps(self) -> None:
        """In a loop of the user's own, `optimizer.step()` would apply sums that nobody has divided."""
        self._hooks = [optimizer.register_step_pre_hook(self._refuse) for optimizer in self.all]

    def release(self) -> None:
        """Give the optimizers back as they came."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _refuse(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._updating:
            raise UserError(
                "optimizer.step() in a Lockstep loop",
                "a direct call: the gradients are sums over the batch, not yet divided, checked or clipped",
                "call step.apply(); it divides by the global weight, clips, and steps the optimizer",
            )


@contextmanager
def _one_grid_per_group(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """torch's fused and foreach optimizers take whole and cut parameters, or two ways of cutting, only one by one."""
    groups = optimizer.param_groups
    parts: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group in groups:
        by_grid: dict[Any, list[Tensor]] = {}
        for p in group["params"]:
            by_grid.setdefault(mesh_of(p), []).append(p)
        parts += [(group, {**group, "params": some}) for some in by_grid.values()]
    optimizer.param_groups = [part for _, part in parts]
    try:
        yield
    finally:
        for group, part in parts:  # some optimizers keep numbers there
            group.update({key: value for key, value in part.items() if key != "params"})
        optimizer.param_groups = groups


def rebind(made: Any, before: dict[str, nn.Parameter], now: dict[str, nn.Parameter]) -> None:
    """An optimizer that was made before the model was cut holds parameters that are gone: give it the new ones."""
    replaced = {id(old): now[name] for name, old in before.items() if now[name] is not old}
    for optimizer in made if isinstance(made, list | tuple) else [made]:
        for group in getattr(optimizer, "param_groups", []) if replaced else []:
            group["params"] = [replaced.get(id(p), p) for p in group["params"]]


def _parameters(optimizers: list[torch.optim.Optimizer]) -> list[nn.Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _divides_and_skips(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer, OWN_WORD, False) or (type(optimizer) in SKIPPING and _fused(optimizer))


def _check_kind(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            "an optimizer", f"a {type(optimizer).__name__}", "return a torch.optim.Optimizer, or a list of them"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            "an optimizer that takes one gradient per step",
            "LBFGS, which evaluates the loss again and again inside its step",
            "use AdamW or SGD",
        )


def _check_coverage(optimizers: list[torch.optim.Optimizer], model: nn.Module) -> None:
    """Every trainable parameter in an optimizer, and nothing else: what is outside the model is never exchanged."""
    covered = {id(p) for p in _parameters(optimizers) if p.requires_grad}
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    forgotten = [name for key, name in trainable.items() if key not in covered]
    if covered - trainable.keys():
        raise UserError(
            "an optimizer over the parameters of the model",
            f"{len(covered - trainable.keys())} trainable parameters that the model does not have",
            "make them part of the module that model() returns (a learned loss weight, a head, ...), and build the "
            "optimizer from that very module",
        )
    if forgotten:
        raise UserError(
            "every trainable parameter in an optimizer",
            f"{len(forgotten)} in none, first {forgotten[0]!r}: they would never move",
            "give them to an optimizer, or freeze them with requires_grad_(False)",
        )
