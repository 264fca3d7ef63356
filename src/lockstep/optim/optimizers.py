"""The update at the end of a step: multiply gradients by one factor, clip them, and step the user's optimizers.

Clipping by global norm is part of that factor. Clipping by value, or relative to the norm of a parameter (adaptive), is
separate: it needs gradients at their true size.

The user makes the optimizers, with any class of torch or of their own. They are checked for what would go wrong
silently: a parameter that no optimizer updates, or that two of them update. Nothing else may step them during a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lockstep.config import ClipConfig
from lockstep.errors import UserError, some_names
from lockstep.optim.capabilities import (
    DIVIDES_AND_SKIPS_ATTRIBUTE,
    DTENSOR_ATTRIBUTE,
    HOOK_FIX,
    StepHooks,
    can_step_as_is,
    cannot_step,
    check_coverage,
    check_kind,
    is_trusted,
    needs_full_parameters,
    refuse_dependent,
    step_hook,
    traits_of,
)
from lockstep.optim.groups import restricted_to
from lockstep.optim.registry import OptimizerTraits
from lockstep.optim.schedule import group_added
from lockstep.optim.unknown.stand_ins import step_with_stand_ins
from lockstep.runtime.shards import by_mesh, to_local

if TYPE_CHECKING:
    from lockstep.optim.bf16_masters import MasterWeights

TINY = 1e-6  # keeps the division by a norm of zero finite
FLOAT32_MAX = torch.finfo(torch.float32).max
MIN_PARAMETER_NORM = 1e-3  # of adaptive clipping: parameters of zero can still change

# Returns the norm of each full tensor, even if this rank holds only a shard of it.
Norms = Callable[[list[Tensor]], list[Tensor]]


# ---- the update ----


class Update:
    """Multiplies gradients by the step's factor, clips elements if configured, and steps the optimizers.

    The factor contains everything that divides: the weight of the step, the loss scale and the clipping by norm. It is
    applied once, inside the optimizer's kernel if that can do it.
    """

    def __init__(self, optimizers: Optimizers, clip: ClipConfig, replicated: bool, norms: Norms, device: torch.device):
        """`replicated`: gradients are full tensors on every rank, not shards."""
        self._before_next: Callable[[], None] | None = None  # see `before_next_update`
        self.optimizer_indices = range(len(optimizers.all))

        self._optimizers = optimizers
        self._clip = clip
        self._replicated = replicated
        self._norms = norms
        self._divisor = torch.ones((), device=device)  # the inverse of a step's factor
        self._clips_elements = clip.value is not None or clip.adaptive is not None
        self.choose_kernels()

    def choose_kernels(self) -> None:
        """Decide whether the optimizers' kernels apply the factor, and whether they may skip on the device.

        It depends on the hooks that the optimizers have on their steps. A step chooses again if these have changed.
        """
        optimizers = self._optimizers
        optimizers.check_step_hooks()

        # Fused optimizers can apply the factor inside their kernel. They need full gradients (or float32 masters, which
        # get copies), and no elementwise clipping, which needs gradients that are already divided.
        full_gradients = self._replicated or optimizers.masters is not None
        self._fused = optimizers.divides_gradients and full_gradients and not self._clips_elements
        self.skips_on_device = self._replicated and self._fused and optimizers.skips_on_device

    def before_next_update(self, wait: Callable[[], None]) -> None:
        """Call `wait` once, before the next update: a save may still be copying the optimizers' state."""
        self._before_next = wait

    def wait_for_copy(self) -> None:
        """Wait until a save has copied the optimizers' state. Every update begins with this."""
        if self._before_next is not None:
            self._before_next()
            self._before_next = None

    def clip_factor(self, norm: Any) -> Any:
        """Return the factor that brings a gradient of this norm down to `clip.norm`; at most 1.

        `norm` is a number, or a tensor of shape () on the device. The host does not wait for the device.
        """
        if self._clip.norm is None:
            return 1.0

        ratio = self._clip.norm / (norm + TINY)
        return ratio.clamp(max=1.0) if isinstance(ratio, Tensor) else min(1.0, ratio)

    def step(self, parameters: list[nn.Parameter], factor: float, pass_count: int, indices: Sequence[int]) -> None:
        """Apply a step that the host accepted.

        `pass_count` counts the passes of the run, of which each has an update or a skip. `indices` holds the indices of
        the optimizers to step.
        """
        self.wait_for_copy()
        if self._optimizers.step_hooks_changed:
            self.choose_kernels()

        # The optimizers divide, hence the inverse, which float32 must be able to hold.
        if self._fused and factor and 1.0 / factor <= FLOAT32_MAX:
            self._optimizers.step(pass_count, indices, self._divisor.fill_(1.0 / factor))
            return

        # A pipeline stage may have no trainable parameters.
        if parameters:
            grads = self.multiply(parameters, factor)
            if self._clips_elements:
                clip_elements_([p.detach() for p in parameters], grads, self._clip, self._norms)

        self._optimizers.step(pass_count, indices)

    def step_on_device(self, factor: Tensor, not_applied: Tensor, pass_count: int, indices: Sequence[int]) -> None:
        """Apply the step unless `not_applied` is true on the device. The other arguments are as in `step`."""
        self.wait_for_copy()
        if self._optimizers.step_hooks_changed:
            self.choose_kernels()
            if not self.skips_on_device:
                raise UserError(
                    "a hook was set on the step of an optimizer during the loop",
                    "on this GPU the optimizer divides the gradients itself, so the hook would find sums",
                    f"set it before the loop, where Lockstep notices it; or {HOOK_FIX}",
                    cause="hook",
                )

        self._optimizers.step(pass_count, indices, (1.0 / factor).float(), not_applied.float())

    def multiply(self, parameters: list[nn.Parameter], factor: float) -> list[Tensor]:
        """Multiply the gradients in place by a factor, and return them. A factor of 0 makes every number 0."""
        grads: list[Tensor] = [p.grad for p in parameters]  # pyrefly: ignore[bad-assignment]
        local = grads if self._replicated else [to_local(grad) for grad in grads]

        # Without any terms the gradients may be nan, and 0 times nan is nan.
        if factor:
            torch._foreach_mul_(local, factor)
        else:
            torch._foreach_zero_(local)

        return grads


def clip_elements_(parameters: list[Tensor], grads: list[Tensor], clip: ClipConfig, norms: Norms) -> None:
    """Clip the gradients in place, by value or relative to the norms of their parameters."""
    shards = [to_local(grad) for grad in grads]
    if clip.value is not None:
        torch._foreach_clamp_min_(shards, -clip.value)
        torch._foreach_clamp_max_(shards, clip.value)

    # The norm of a gradient is limited to a fraction of the norm of its parameter, both over full tensors.
    if clip.adaptive is not None:
        for grad, parameter_norm, grad_norm in zip(shards, norms(parameters), norms(grads), strict=True):
            limit = clip.adaptive * parameter_norm.clamp(min=MIN_PARAMETER_NORM)
            grad.mul_((limit / (grad_norm + TINY)).clamp(max=1.0))


# ---- the optimizers ----


class Optimizers:
    """One or several torch optimizers that together update every trainable parameter of the model.

    They come from the user and are not changed, apart from their groups. What the engine must know about them is found
    out here: whether their kernels can divide gradients or skip a step on the device, and which need full parameters.
    Only hooks on their steps may come later (`check_step_hooks`).
    """

    sharded = False  # whether each rank holds the state of only some parameters

    def __init__(self, optimizers: Any, model: nn.Module):
        """`optimizers`: an optimizer or a list of them, from the task or from a custom loop."""
        self.all: list[torch.optim.Optimizer] = as_list(optimizers)
        for optimizer in self.all:
            check_kind(optimizer)

        check_coverage(self.parameters(), model)

        # The model's parameters, by optimizer and group. ZeRO-1 and master weights change `group["params"]` itself.
        self.groups = [[list(group["params"]) for group in optimizer.param_groups] for optimizer in self.all]
        self.step_hooks = StepHooks(self.all)

        # Whether every optimizer can apply grad_scale inside its fused kernel. That divisor is float32, so gradients of
        # float64 parameters are divided before the step instead.
        all_float32 = all(p.dtype == torch.float32 for p in self.parameters())
        self.divides_gradients = all_float32 and self._all_fused(lambda traits: traits.divides)

        # Whether the device can skip a step without waiting for the host.
        self.skips_on_device = self.divides_gradients and self._all_fused(lambda traits: traits.skips)

        self.masters: MasterWeights | None = None  # set if parameters are stored in bfloat16
        self._several_meshes = len(by_mesh(self.parameters())) > 1

        # By the id of each optimizer that cannot step DTensors: whether it steps full parameters, or else shards.
        self._needs_full = {
            id(optimizer): needs_full_parameters(optimizer, self.step_hooks)
            for optimizer in self.all
            if not can_step_as_is(optimizer)
        }
        self._updating = False
        self._refusals: list[Any] = []  # see `refuse_direct_steps`
        self.group_banner: str | None = None  # about the groups that `optim.groups` made

        # Optimizers that train and evaluate with different weights (schedule-free).
        self._switching: list[Any] = [o for o in self.all if hasattr(o, "train") and hasattr(o, "eval")]
        for optimizer in self._switching:
            optimizer.train()

    @property
    def banner(self) -> dict[str, str]:
        """The banner lines about optimizers that need full parameters, and about groups by name, if there are any."""
        names = [type(optimizer).__name__ for optimizer in self.all if self._needs_full.get(id(optimizer))]
        how = "gathers one parameter after another, because its update needs full parameters"
        lines = {"optimizer": f"{some_names(list(dict.fromkeys(names)))} {how}"} if names else {}
        return lines | ({"groups": self.group_banner} if self.group_banner else {})

    def switch(self, mode: Literal["train", "eval"], before_change: Callable[[], None] = lambda: None) -> None:
        """Give the model the weights to train with, or those to evaluate and save. Collective under ZeRO-1.

        They differ only with an optimizer such as a schedule-free one; otherwise this does nothing. `before_change`
        drops full parameters that were gathered from shards.
        """
        if self._switching:
            before_change()
            for optimizer in self._switching:
                getattr(optimizer, mode)()

            self._after_step()

    def refuse_coupled(self, owner: str) -> None:
        """Refuse optimizers whose update of one parameter depends on others: `owner` steps only some of them."""
        problem = f"{owner} steps only some of the parameters"
        reason = "which would see only these gradients, and no updates of other ranks"
        stepped = [optimizer for optimizer in self.all if _has_trainable(optimizer)]
        for optimizer in stepped:
            self.step_hooks.refuse(optimizer, problem, reason, f"{HOOK_FIX}; or set strategy=ddp")
            if not is_trusted(optimizer):
                fix = (
                    "set strategy=ddp, where every rank steps all parameters; if it updates each parameter "
                    f"independently, set {DTENSOR_ATTRIBUTE} = True in its class"
                )
                refuse_dependent(optimizer, problem, fix)

    @property
    def step_hooks_changed(self) -> bool:
        """Whether hooks on the steps were set or removed since `check_step_hooks`."""
        return self.step_hooks.live != self.step_hooks.seen

    def check_step_hooks(self) -> None:
        """Refuse hooks on a step that would see too little, and let the others find gradients at their true size.

        Hooks of torch, such as its profiler's, do not count.
        """
        # A kernel divides, and skips, after the hook. Master weights are divided when they get their gradients.
        if self.step_hooks.look():
            self.divides_gradients = self.masters is not None
            self.skips_on_device = False

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizers hold on this rank."""
        return [p for optimizer in self.all for group in optimizer.param_groups for p in group["params"]]

    def check_groups(self, model: nn.Module) -> None:
        """Raise if the optimizers have got other parameters since they were wrapped: nothing would reduce these."""
        for optimizer, groups in zip(self.all, self.groups, strict=True):
            if len(optimizer.param_groups) != len(groups):
                raise group_added()

        # With ZeRO-1 an optimizer holds this rank's parameters, and with master weights copies.
        if not self.sharded and self.masters is None:
            check_coverage(self.parameters(), model)

    def use_masters(self, masters: MasterWeights) -> None:
        """Update parameters through `masters`, which divide the gradients when they convert them to float32.

        The masters step a few parameters at a time, so optimizers with a hook on their step are refused.
        """
        reason = "which would be called for some parameters at a time, as float32 copies"
        fix = f"{HOOK_FIX}; or set precision=bf16, which stores parameters in float32"
        for optimizer in filter(_has_trainable, self.all):
            self.step_hooks.refuse(optimizer, "parameters are stored in bfloat16", reason, fix)

        if self._switching:
            reason = "it gives the model other weights to train with than to evaluate, and float32 copies have neither"
            fix = "set precision=bf16, which stores parameters in float32; or optimizer=adamw"
            raise cannot_step(self._switching[0], "parameters are stored in bfloat16", reason, fix)

        self.masters = masters
        self.divides_gradients = True
        self.skips_on_device = self._all_fused(lambda traits: traits.skips)

    def step(
        self,
        pass_count: int,
        indices: Sequence[int],
        divisor: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Step the optimizers with the indices `indices`.

        `pass_count` counts the passes of the run, of which each has an update or a skip; it seeds stochastic rounding.
        `divisor` and `skip` have shape (); if `skip` is not 0, nothing changes.
        """
        stepped = [self.all[i] for i in indices]
        self._updating = True  # until the end of this method `_refuse` allows steps
        try:
            for optimizer in stepped:
                # Fused optimizers read these two attributes; others ignore them.
                optimizer.grad_scale = None if self.masters else divisor  # pyrefly: ignore[missing-attribute]
                optimizer.found_inf = skip  # pyrefly: ignore[missing-attribute]

                if self.masters:
                    self.masters.step_optimizer(optimizer, divisor, pass_count, self._step_one)
                elif self._several_meshes and id(optimizer) not in self._needs_full:
                    parts = [(group, part) for group in optimizer.param_groups for part in by_mesh(group["params"])]
                    with restricted_to(optimizer, parts):
                        optimizer.step()
                else:
                    self._step_one(optimizer)
        finally:
            self._updating = False

            # Both belong to this step. The user's own `step()`, after the run, must not divide by its weight.
            for optimizer in stepped:
                optimizer.grad_scale = optimizer.found_inf = None  # pyrefly: ignore[missing-attribute]

        self._after_step()

    def _after_step(self) -> None:
        """Do nothing: every rank has stepped all of its parameters."""

    def _step_one(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer, or the stand-ins of its parameters if it cannot step sharded ones."""
        if id(optimizer) in self._needs_full:
            step_with_stand_ins(optimizer, gather=self._needs_full[id(optimizer)])
        else:
            optimizer.step()

    def parameter_ids(self, indices: Sequence[int]) -> set[int]:
        """Return the ids of the model's parameters that these optimizers update, on any rank."""
        return {id(p) for index in indices for group in self.groups[index] for p in group}

    def refuse_direct_steps(self) -> None:
        """Make `optimizer.step()` raise if the user calls it: it would apply sums that are not divided yet."""
        self._refusals = [optimizer.register_step_pre_hook(self._refuse) for optimizer in self.all]

    def release(self) -> None:
        """Allow the user to step the optimizers again."""
        for hook in self._refusals:
            hook.remove()

        self._refusals = []

    def _all_fused(self, can: Callable[[OptimizerTraits], bool]) -> bool:
        """Return whether every optimizer is a fused one that `can` do it, or declares that it divides and skips.

        One with a hook before its step is not: the hook would see gradients that are not divided yet.
        """
        for optimizer in self.all:
            is_fused = can(traits_of(optimizer)) and all(group.get("fused") for group in optimizer.param_groups)
            declares = getattr(optimizer, DIVIDES_AND_SKIPS_ATTRIBUTE, False)
            if not (is_fused or declares) or step_hook(optimizer, ("pre",)):
                return False

        return True

    def _refuse(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Refuse a step from the user's code. It is a hook of every optimizer."""
        if not self._updating:
            raise UserError(
                "optimizer.step() was called directly in a Lockstep loop",
                "the gradients are sums over the batch, not yet divided, checked or clipped",
                "call step.apply(); it divides by the global weight, clips, and steps the optimizer",
            )


def as_list(optimizers: Any) -> list[Any]:
    return list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]


def rebind(optimizers: Any, before: dict[str, nn.Parameter], now: dict[str, nn.Parameter]) -> None:
    """Replace the parameters in optimizers that were made before the model was sharded by the current ones."""
    replaced = {id(old): now[name] for name, old in before.items() if now[name] is not old}
    for optimizer in as_list(optimizers) if replaced else []:
        for group in getattr(optimizer, "param_groups", []):
            group["params"] = [replaced.get(id(p), p) for p in group["params"]]


def _has_trainable(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer steps anything: one without trainable parameters may update what has no gradient."""
    return any(p.requires_grad for group in optimizer.param_groups for p in group["params"])
