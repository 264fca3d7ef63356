"""Finds out what an optimizer can do, and refuses those that a run cannot use.

The answer comes from the traits of its class (registry.py), from attributes that a user's class sets, and from the
hooks on its step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from lockstep.errors import UserError
from lockstep.optim.registry import TRAITS, OptimizerTraits
from lockstep.optim.unknown.probe import ProbeFailed, check_independent

# A user-defined optimizer may set this attribute to True if it is correct on DTensors.
DTENSOR_ATTRIBUTE = "works_on_shards"

# A user-defined optimizer may set this attribute to True if it divides gradients by its `grad_scale`, and changes
# nothing when its `found_inf` is not 0 (both are tensors on the device, or None).
DIVIDES_AND_SKIPS_ATTRIBUTE = "divides_and_skips"

# What to do instead of a hook on the step of an optimizer.
HOOK_FIX = "clip gradients with clip.norm=1, and do in after_step(), or after step.apply(), what else the hook does"


def check_kind(optimizer: Any) -> None:
    """Refuse an object that is no optimizer, and an optimizer that does not take one gradient per step."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer() must return an optimizer; it returned a {type(optimizer).__name__}",
            "",
            "return a torch.optim.Optimizer, or a list of them",
        )

    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            "LBFGS cannot be used: an optimizer must take one gradient per step",
            "LBFGS evaluates the loss again and again inside its step",
            "use AdamW or SGD; if a step needs gradients at several points, as in SAM, go over its batches several "
            "times: run.steps(dataset, passes=2)",
        )


def check_coverage(parameters: list[nn.Parameter], model: nn.Module) -> None:
    """Check that the optimizers hold every trainable parameter of the model, and nothing else.

    The gradient of a parameter outside the model would never be all-reduced.
    """
    covered = {id(p) for p in parameters if p.requires_grad}
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}

    outside = covered - trainable.keys()
    if outside:
        raise UserError(
            f"the optimizer holds {len(outside)} trainable parameters that the model does not have",
            "",
            "make them part of the module that model() returns (a learned loss weight, a head, ...), and build the "
            "optimizer from that very module",
        )

    forgotten = [name for key, name in trainable.items() if key not in covered]
    if forgotten:
        raise UserError(
            f"{len(forgotten)} trainable parameters are in no optimizer, first {forgotten[0]!r}",
            "they would never be updated",
            "add them to an optimizer, or freeze them with requires_grad_(False)",
        )


def can_step_as_is(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer needs no stand-ins: none of its parameters is sharded, or it supports DTensors."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    sharded = any(isinstance(p, DTensor) for p in parameters)
    return not sharded or is_trusted(optimizer)


def is_trusted(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer needs no probe: its traits say that it works on shards, or DTENSOR_ATTRIBUTE does."""
    return traits_of(optimizer).works_on_shards or getattr(optimizer, DTENSOR_ATTRIBUTE, False)


def traits_of(optimizer: torch.optim.Optimizer) -> OptimizerTraits:
    """Return the traits of the optimizer's class, or empty traits if the table does not have it."""
    return TRAITS.get(_path_of(optimizer), OptimizerTraits())


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the class of this optimizer is torch's or ours, and not the user's."""
    return _path_of(optimizer) in TRAITS


def _path_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}:{type(optimizer).__qualname__}"


def needs_full_parameters(optimizer: torch.optim.Optimizer, hooks: StepHooks) -> bool:
    """Return whether an optimizer must step full parameters. False: it updates every element independently.

    No probe could prove that shards are enough: some optimizers treat only large matrices differently, or only after
    many steps. So an optimizer gets shards only if it is known to work on them (`OptimizerTraits.elementwise`).
    """
    # An optimizer that needs full parameters is stepped once for each, so a hook on its step would be called too often.
    # Others get shards as plain tensors: a hook that clips would use the norm of this rank's shards.
    needs_full = not traits_of(optimizer).elementwise
    reason = "and needs full parameters" if needs_full else "which would see only the shards of one rank"
    kinds = ("pre", "post") if needs_full else ("pre",)
    hooks.refuse(optimizer, "parameters are sharded", reason, f"{HOOK_FIX}; or set strategy=ddp", kinds)
    if not needs_full:
        return False

    fix = (
        "set strategy=ddp, which keeps full parameters on every rank; if it supports DTensors, set "
        f"{DTENSOR_ATTRIBUTE} = True in its class"
    )
    refuse_dependent(optimizer, "parameters are sharded", fix)
    return True


def refuse_dependent(optimizer: torch.optim.Optimizer, problem: str, fix: str) -> None:
    """Refuse an optimizer whose update of one parameter depends on others, or that cannot be probed."""
    try:
        check_independent(optimizer)
    except ProbeFailed as reason:
        raise cannot_step(optimizer, problem, reason, fix) from reason


# ---- hooks on the step ----


# torch's private tables of the hooks on the steps of all optimizers, by kind (torch 2.11 to 2.15).
# `tests/unit/optim/test_step_hooks.py` fails when torch changes them.
HOOKS_OF_ALL: dict[str, Mapping[int, Any]] = {
    "pre": torch_optimizer._global_optimizer_pre_hooks,
    "post": torch_optimizer._global_optimizer_post_hooks,
}


def hooks_of(optimizer: torch.optim.Optimizer, kind: str) -> Mapping[int, Any]:
    """Return torch's table of the optimizer's own hooks: those before its step ("pre"), or after it ("post")."""
    return vars(optimizer).get(f"_optimizer_step_{kind}_hooks", {})


def step_hook(optimizer: torch.optim.Optimizer, kinds: Sequence[str] = ("pre", "post")) -> str | None:
    """Return the name of the function that has registered the first of the user's hooks on a step, or None.

    A hook of all optimizers counts as well.
    """
    for kind in kinds:
        if any(map(_is_users, hooks_of(optimizer, kind).values())):
            return f"register_step_{kind}_hook"

        if any(map(_is_users, HOOKS_OF_ALL[kind].values())):
            return f"register_optimizer_step_{kind}_hook"

    return None


def _is_users(hook: Any) -> bool:
    """Return whether a hook is the user's: torch's profiler has one, and so has `Optimizers.refuse_direct_steps`."""
    module = getattr(hook, "__module__", None) or ""
    return not module.startswith(("torch.", "lockstep.optim."))


class StepHooks:
    """The user's hooks on the steps of optimizers: which of them are refused, and whether there are new ones.

    Hooks were set or removed since the last look if `live` and `seen` differ (`Optimizers.step_hooks_changed`).
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = optimizers
        self._rules: list[tuple[Any, Sequence[str], str, str, str]] = []  # the arguments of `refuse`

        own = [hooks_of(optimizer, kind) for optimizer in optimizers for kind in ("pre", "post")]
        self.live = [*HOOKS_OF_ALL.values(), *own]  # torch's own tables
        self.seen: list[Mapping[int, Any]] = []  # their contents at the last look

    def refuse(
        self, optimizer: Any, problem: str, reason: str, fix: str, kinds: Sequence[str] = ("pre", "post")
    ) -> None:
        """Refuse hooks of these kinds on the step of an optimizer: those that it has, and later ones."""
        self._rules.append((optimizer, kinds, problem, reason, fix))
        self.look()

    def look(self) -> bool:
        """Raise if a hook is refused. Return whether one before a step must find gradients at their true size."""
        self.seen = [dict(table) for table in self.live]
        for optimizer, kinds, problem, reason, fix in self._rules:
            if hook := step_hook(optimizer, kinds):
                raise cannot_step(optimizer, problem, f"it has a hook on its step ({hook}), {reason}", fix)

        return any(step_hook(optimizer, ("pre",)) for optimizer in self._optimizers)


def cannot_step(optimizer: Any, problem: str, reason: object, fix: str) -> UserError:
    return UserError(f"{type(optimizer).__name__} cannot be used here: {problem}", str(reason), fix)
