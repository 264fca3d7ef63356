"""The user's optimizers, checked against the model and stepped in one place.

The user makes them, with any class of torch or of their own. They are checked for what would go wrong silently: a
parameter that no optimizer updates, or that two of them update. Nothing else may step them during a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError, some_names
from lockstep.optim.foreign.stand_ins import step_with_stand_ins
from lockstep.optim.foreign.trial import TrialFailed, check_independent
from lockstep.runtime.context import Runtime
from lockstep.runtime.layout import balance, by_mesh

if TYPE_CHECKING:
    from lockstep.optim.bf16_masters import MasterWeights

# These divide gradients by `grad_scale` inside their fused kernel. Only these exact types: a subclass, or an optimizer
# that declares AMP support, may not do so.
DIVIDING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

# These also skip correctly on the device (`found_inf`). SGD does not: skipping the first step leaves its momentum
# uninitialised.
SKIPPING = (torch.optim.Adam, torch.optim.AdamW)

# These are correct on DTensors. Other optimizers get plain tensors instead (optim/foreign/stand_ins.py).
ON_DTENSORS = (
    *DIVIDING,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)

# A user-defined optimizer may set this attribute to True if it is correct on DTensors.
DTENSOR_ATTRIBUTE = "works_on_shards"

# These fail on DTensors, but update every element independently, so they can step the shards as plain tensors.
ELEMENTWISE_OPTIMIZERS = {torch.optim.Rprop}

# A user-defined optimizer may set this attribute to True if it divides gradients by its `grad_scale`, and changes
# nothing when its `found_inf` is not 0 (both are tensors on the device, or None).
DIVIDES_AND_SKIPS_ATTRIBUTE = "divides_and_skips"

# What to do instead of a hook on the step of an optimizer.
HOOK_FIX = "clip gradients with clip.norm=1, and do in after_step(), or after step.apply(), what else the hook does"

GroupPart = tuple[dict[str, Any], list[Tensor]]  # a parameter group, and some of its tensors


class Optimizers:
    """One or several torch optimizers that together update every trainable parameter of the model.

    They come from the user and are not changed, apart from their groups. What the engine must know about them is found
    out once, here: whether their kernels can divide gradients or skip a step on the device, and which need full
    parameters.
    """

    sharded = False  # whether each rank holds the state of only some parameters

    def __init__(self, optimizers: Any, model: nn.Module):
        """`optimizers`: an optimizer or a list of them, from the task or from a custom loop."""
        self.all: list[torch.optim.Optimizer] = as_list(optimizers)
        for optimizer in self.all:
            check_kind(optimizer)

        _check_coverage(self.parameters(), model)

        # The model's parameters, by optimizer and group. ZeRO-1 and master weights change `group["params"]` itself.
        self.groups = [[list(group["params"]) for group in optimizer.param_groups] for optimizer in self.all]

        # Whether every optimizer can apply grad_scale inside its fused kernel. That divisor is float32, so gradients of
        # float64 parameters are divided before the step instead.
        all_float32 = all(p.dtype == torch.float32 for p in self.parameters())
        self.divides_gradients = all_float32 and self._all_fused(DIVIDING)

        # Whether the device can skip a step without waiting for the host.
        self.skips_on_device = self.divides_gradients and self._all_fused(SKIPPING)

        self.masters: MasterWeights | None = None  # set if parameters are stored in bfloat16
        self._several_meshes = len(by_mesh(self.parameters())) > 1

        # Optimizers that step stand-ins, by id: True for full parameters, False for shards.
        self._stand_ins = {
            id(optimizer): _needs_full_parameters(optimizer) for optimizer in self.all if not _can_step_as_is(optimizer)
        }
        self._updating = False
        self._hooks: list[Any] = []
        self.group_line: str | None = None  # about the groups that `optim.groups` made, for the banner

        # Those whose weights to evaluate are not the weights to train with (schedule-free).
        self._switching: list[Any] = [o for o in self.all if hasattr(o, "train") and hasattr(o, "eval")]
        for optimizer in self._switching:
            optimizer.train()

    @property
    def facts(self) -> dict[str, str]:
        """The banner lines about optimizers that need full parameters, and about groups by name, if there are any."""
        names = [type(optimizer).__name__ for optimizer in self.all if self._stand_ins.get(id(optimizer))]
        how = "gathers one parameter after another, because its update needs full parameters"
        facts = {"optimizer": f"{some_names(list(dict.fromkeys(names)))} {how}"} if names else {}
        return facts | ({"groups": self.group_line} if self.group_line else {})

    @contextmanager
    def evaluation_weights(self, before_change: Callable[[], None]) -> Iterator[None]:
        """Give the model the weights to evaluate and to save for a while: a schedule-free optimizer has others.

        `before_change` drops full parameters gathered from shards. Collective under ZeRO-1.
        """
        self.use_evaluation_weights(before_change)
        try:
            yield
        finally:
            self.use_training_weights(before_change)

    def use_evaluation_weights(self, before_change: Callable[[], None] = lambda: None) -> None:
        """Give the model the weights to evaluate. See `evaluation_weights`."""
        self._switch("eval", before_change)

    def use_training_weights(self, before_change: Callable[[], None] = lambda: None) -> None:
        """Give the model the weights to train with, as after a checkpoint has given it those to evaluate."""
        self._switch("train", before_change)

    def _switch(self, mode: str, before_change: Callable[[], None]) -> None:
        """Switch optimizers that keep two points, such as schedule-free ones, to training or to evaluation."""
        if self._switching:
            before_change()
            for optimizer in self._switching:
                getattr(optimizer, mode)()
            self._after_step()

    def refuse_coupled(self, owner: str) -> None:
        """Refuse optimizers whose update of one parameter depends on others: `owner` steps only some of them."""
        for optimizer in self.all:
            # An optimizer without trainable parameters may update something that has no gradient.
            has_trainable = any(p.requires_grad for group in optimizer.param_groups for p in group["params"])
            if has_trainable and (hook := step_hook(optimizer)):
                reason = f"its hook on a step ({hook}) would see only these gradients, and no updates of other ranks"
                raise _cannot_step(
                    optimizer, f"{owner} steps only some of the parameters", reason, f"{HOOK_FIX}; or set strategy=ddp"
                )

            if has_trainable and not _is_trusted(optimizer):
                try:
                    check_independent(optimizer)
                except TrialFailed as reason:
                    fix = (
                        "set strategy=ddp, where every rank steps all parameters; if it updates each parameter "
                        f"independently, set {DTENSOR_ATTRIBUTE} = True in its class"
                    )
                    raise _cannot_step(optimizer, f"{owner} steps only some of the parameters", reason, fix) from reason

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizers hold on this rank."""
        return [p for optimizer in self.all for group in optimizer.param_groups for p in group["params"]]

    def use_masters(self, masters: MasterWeights) -> None:
        """Update parameters through `masters`, which divide the gradients when they convert them to float32.

        The masters step a few parameters at a time, so optimizers with a hook on their step are refused.
        """
        for optimizer in self.all:
            if (hook := step_hook(optimizer)) and any(p.requires_grad for p in _parameters_of(optimizer)):
                reason = f"its hook on a step ({hook}) would be called for some parameters at a time, as float32 copies"
                fix = f"{HOOK_FIX}; or set precision=bf16, which stores parameters in float32"
                raise _cannot_step(optimizer, "parameters are stored in bfloat16", reason, fix)

        if self._switching:
            reason = "it gives the model other weights to train with than to evaluate, and float32 copies have neither"
            fix = "set precision=bf16, which stores parameters in float32; or optimizer=adamw"
            raise _cannot_step(self._switching[0], "parameters are stored in bfloat16", reason, fix)

        self.masters = masters
        self.divides_gradients = True
        self.skips_on_device = self._all_fused(SKIPPING)

    def step(
        self,
        update_count: int,
        indices: Sequence[int],
        divisor: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Step the optimizers with the indices `indices`.

        `update_count` counts the updates of the run, including skipped ones; it seeds stochastic rounding.
        `divisor` and `skip` have shape (); if `skip` is not 0, nothing changes.
        """
        self._updating = True  # `_refuse` allows steps meanwhile
        try:
            for optimizer in [self.all[i] for i in indices]:
                # Fused optimizers read these two attributes; others ignore them.
                optimizer.grad_scale = None if self.masters else divisor  # pyrefly: ignore[missing-attribute]
                optimizer.found_inf = skip  # pyrefly: ignore[missing-attribute]

                if self.masters:
                    self.masters.step_optimizer(optimizer, divisor, update_count, self._step_one)
                elif self._several_meshes and id(optimizer) not in self._stand_ins:
                    parts = [(group, part) for group in optimizer.param_groups for part in by_mesh(group["params"])]
                    with restricted_to(optimizer, parts):
                        optimizer.step()
                else:
                    self._step_one(optimizer)
        finally:
            self._updating = False

        self._after_step()

    def _after_step(self) -> None:
        """Do nothing: every rank has stepped all of its parameters."""

    def _step_one(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer, or the stand-ins of its parameters if it cannot step sharded ones."""
        if id(optimizer) in self._stand_ins:
            step_with_stand_ins(optimizer, self._stand_ins[id(optimizer)])
        else:
            optimizer.step()

    def parameter_ids(self, indices: Sequence[int]) -> set[int]:
        """Return the ids of the model's parameters that these optimizers update, on any rank."""
        return {id(p) for index in indices for group in self.groups[index] for p in group}

    def refuse_direct_steps(self) -> None:
        """Make `optimizer.step()` raise if the user calls it: it would apply sums that are not divided yet."""
        self._hooks = [optimizer.register_step_pre_hook(self._refuse) for optimizer in self.all]

    def release(self) -> None:
        """Allow the user to step the optimizers again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _all_fused(self, kinds: tuple[type[torch.optim.Optimizer], ...]) -> bool:
        """Return whether every optimizer is a fused one of these kinds, or declares that it divides and skips.

        One with a hook on its step is not: the hook must find gradients at their true size.
        """
        for optimizer in self.all:
            is_fused = type(optimizer) in kinds and all(group.get("fused") for group in optimizer.param_groups)
            if not (is_fused or getattr(optimizer, DIVIDES_AND_SKIPS_ATTRIBUTE, False)):
                return False

            # A hook before the step would see gradients that are not divided yet.
            if step_hook(optimizer, ("pre",)):
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


class ShardedOptimizers(Optimizers):
    """ZeRO-1: every rank holds the optimizer state of some parameters, updates these, and broadcasts them.

    DDP reduces the gradients as usual. Whole parameters are assigned to ranks, balanced by size. In a checkpoint each
    rank saves the state of the parameters that it owns.
    """

    sharded = True

    def __init__(self, optimizers: Any, model: nn.Module, runtime: Runtime):
        super().__init__(optimizers, model)
        self.refuse_coupled("under zero1 a rank")
        self._runtime = runtime

        parameters = self.parameters()
        ranks = range(runtime.world.size)
        owners = balance([p.nbytes for p in parameters], [ranks] * len(parameters))
        self._owned: list[list[nn.Parameter]] = [[] for _ in ranks]
        for p, owner in zip(parameters, owners, strict=True):
            self._owned[owner].append(p)

        owned = {id(p) for p in self._owned[runtime.world.rank]}
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in owned]
            # Some optimizers, such as Adagrad, create their state in the constructor.
            for p in [p for p in optimizer.state if id(p) not in owned]:
                del optimizer.state[p]

    def _after_step(self) -> None:
        """Broadcast every rank's parameters. Collective: every rank must step."""
        with torch.no_grad():
            for owner, parameters in enumerate(self._owned):
                # A flat buffer has one dtype.
                for dtype in dict.fromkeys(p.dtype for p in parameters):
                    self._broadcast([p for p in parameters if p.dtype == dtype], owner)

    def _broadcast(self, parameters: list[nn.Parameter], owner: int) -> None:
        """Send updated parameters from the rank that has updated them to the others, as one tensor."""
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self._runtime.collectives.broadcast_([flat], owner)
        if owner != self._runtime.world.rank:
            received = flat.split([p.numel() for p in parameters])
            torch._foreach_copy_([p.detach().view(-1) for p in parameters], list(received))


@contextmanager
def restricted_to(optimizer: torch.optim.Optimizer, parts: list[GroupPart]) -> Iterator[None]:
    """Let the optimizer see only these parts of its groups inside the `with` block.

    Each part becomes a parameter group with the settings of the group that it comes from.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": tensors} for group, tensors in parts]
    try:
        yield
    finally:
        used_groups = optimizer.param_groups
        optimizer.param_groups = groups

    # Some optimizers store numbers in their groups, which must be kept.
    for (group, _), used in zip(parts, used_groups, strict=True):
        group.update({key: value for key, value in used.items() if key != "params"})


def as_list(optimizers: Any) -> list[Any]:
    return list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]


def rebind(optimizers: Any, before: dict[str, nn.Parameter], now: dict[str, nn.Parameter]) -> None:
    """Replace the parameters in optimizers that were made before the model was sharded by the current ones."""
    replaced = {id(old): now[name] for name, old in before.items() if now[name] is not old}
    for optimizer in as_list(optimizers) if replaced else []:
        for group in getattr(optimizer, "param_groups", []):
            group["params"] = [replaced.get(id(p), p) for p in group["params"]]


def check_kind(optimizer: Any) -> None:
    """Refuse what is not an optimizer, and one that does not take one gradient per step."""
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


def _can_step_as_is(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer needs no stand-ins: none of its parameters is sharded, or it supports DTensors."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    sharded = any(isinstance(p, DTensor) for p in parameters)
    return not sharded or _is_trusted(optimizer)


def _is_trusted(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer needs no trial: it is in ON_DTENSORS, ours, or sets DTENSOR_ATTRIBUTE."""
    return is_ours(optimizer) or type(optimizer) in ON_DTENSORS or getattr(optimizer, DTENSOR_ATTRIBUTE, False)


def is_ours(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("lockstep.")


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def step_hook(optimizer: torch.optim.Optimizer, kinds: Sequence[str] = ("pre", "post")) -> str | None:
    """Return what registered the first hook on the step of this optimizer, such as one that clips; None if none."""
    hooked = [kind for kind in kinds if vars(optimizer).get(f"_optimizer_step_{kind}_hooks")]
    return f"register_step_{hooked[0]}_hook" if hooked else None


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _needs_full_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer must step full parameters. False: it updates every element independently.

    No trial could prove that shards are enough: some optimizers treat only large matrices differently, or only after
    many steps. So only ELEMENTWISE_OPTIMIZERS get shards.
    """
    # An optimizer that needs full parameters is stepped once for each, so a hook on its step would be called too often.
    # Others get shards as plain tensors: a hook that clips would use the norm of this rank's shards.
    needs_full = type(optimizer) not in ELEMENTWISE_OPTIMIZERS
    hook = step_hook(optimizer) if needs_full else step_hook(optimizer, ("pre",))
    if hook:
        problem = "needs full parameters" if needs_full else "would see only the shards of one rank"
        reason = f"it has a hook on its step ({hook}), and {problem}"
        raise _cannot_step(optimizer, "parameters are sharded", reason, f"{HOOK_FIX}; or set strategy=ddp")

    if not needs_full:
        return False

    try:
        check_independent(optimizer)
    except TrialFailed as reason:
        fix = (
            "set strategy=ddp, which keeps full parameters on every rank; if it supports DTensors, set "
            f"{DTENSOR_ATTRIBUTE} = True in its class"
        )
        raise _cannot_step(optimizer, "parameters are sharded", reason, fix) from reason

    return True


def _cannot_step(optimizer: Any, problem: str, reason: object, fix: str) -> UserError:
    return UserError(f"{type(optimizer).__name__} cannot be used here: {problem}", str(reason), fix)


def _check_coverage(parameters: list[nn.Parameter], model: nn.Module) -> None:
    """Check that the optimizers hold every trainable parameter of the model, and nothing else.

    The gradient of a parameter outside the model would never be all-reduced.
    """
    covered = {id(p) for p in parameters if p.requires_grad}
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}

    foreign = covered - trainable.keys()
    if foreign:
        raise UserError(
            f"the optimizer holds {len(foreign)} trainable parameters that the model does not have",
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
