"""The user's optimizers, checked against the model and stepped in one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError, some_names
from lockstep.optim.stand_ins import step_with_stand_ins
from lockstep.optim.trial import PER_PARAMETER, CannotTry, kind_of
from lockstep.runtime.context import Runtime
from lockstep.runtime.layout import balance, by_mesh

if TYPE_CHECKING:
    from lockstep.optim.bf16_masters import MasterWeights

# These divide gradients by `grad_scale` inside their fused kernel. Exact types only: subclasses, and optimizers that
# merely declare AMP support, may not do this.
DIVIDING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

# These may also skip by themselves (`found_inf`). SGD may not: a skipped first step leaves its momentum uninitialised.
SKIPPING = (torch.optim.Adam, torch.optim.AdamW)

# These are right on DTensors. Others get plain tensors in their place (optim/stand_ins.py).
ON_DTENSORS = (
    *DIVIDING,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)

# A user-defined optimizer may set this attribute to True: it works on DTensors by itself.
DTENSOR_ATTRIBUTE = "works_on_shards"

# These fail on DTensors, but step the elements of a shard as plain tensors.
ELEMENTWISE_OPTIMIZERS = {torch.optim.Rprop}

# A user-defined optimizer may set this attribute to True: it divides gradients by its `grad_scale`, and leaves
# everything as it was where its `found_inf` is not 0 (tensors on the device, or None).
DIVIDES_AND_SKIPS_ATTRIBUTE = "divides_and_skips"

GroupPart = tuple[dict[str, Any], list[Tensor]]  # a parameter group, and some of its tensors


class Optimizers:
    """One or several torch optimizers that together move every trainable parameter of the model."""

    sharded = False  # whether each rank holds the state of only some parameters

    def __init__(self, optimizers: Any, model: nn.Module):
        """`optimizers`: an optimizer or a list of them, as the task or the user's loop made them."""
        self.all: list[torch.optim.Optimizer] = as_list(optimizers)
        for optimizer in self.all:
            _check_kind(optimizer)
        _check_coverage(self.parameters(), model)

        # All parameters of every group. ZeRO-1 and master weights replace those that the optimizers themselves hold.
        self.groups = [[list(group["params"]) for group in optimizer.param_groups] for optimizer in self.all]

        # Whether every optimizer can apply grad_scale inside its fused kernel. Fused optimizers hold the divisor in
        # float32: float64 parameters are scaled before the step instead.
        in_float32 = all(p.dtype == torch.float32 for p in self.parameters())
        self.divides_gradients = in_float32 and self._all_fused(DIVIDING)

        # Whether a step can be skipped on the device, without the host knowing.
        self.skips_by_itself = self.divides_gradients and self._all_fused(SKIPPING)

        self.masters: MasterWeights | None = None  # what the optimizers hold instead of bfloat16 parameters
        self._several_meshes = len(by_mesh(self.parameters())) > 1
        self._stand_ins = {id(one): _needs_whole(one) for one in self.all if not _knows_dtensors(one)}
        self._updating = False
        self._hooks: list[Any] = []

    @property
    def facts(self) -> dict[str, str]:
        """A banner line about optimizers that need whole parameters."""
        names = [type(one).__name__ for one in self.all if self._stand_ins.get(id(one))]
        how = "gathers one parameter after another for its update: its numbers need whole ones"
        return {"optimizer": f"{some_names(list(dict.fromkeys(names)))} {how}"} if names else {}

    def refuse_coupled(self, who: str) -> None:
        """Refuse optimizers whose update of one parameter depends on others, where `who` steps only some of them."""
        for optimizer in self.all:
            # One without trainable parameters moves something that no gradient reaches.
            learning = any(p.requires_grad for group in optimizer.param_groups for p in group["params"])
            if learning and not _is_known(optimizer):
                try:
                    kind_of(optimizer)
                except CannotTry as reason:
                    fix = (
                        "type strategy=ddp, where every rank steps all parameters; if each parameter is updated by "
                        f"itself, set {DTENSOR_ATTRIBUTE} = True in its class"
                    )
                    raise _cannot_step(optimizer, f"{who} steps only some of the parameters", reason, fix) from reason

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizers hold on this rank."""
        return [p for optimizer in self.all for group in optimizer.param_groups for p in group["params"]]

    def use_masters(self, masters: MasterWeights) -> None:
        """Step through master weights, which divide gradients as they make them float32."""
        self.masters = masters
        self.divides_gradients = True
        self.skips_by_itself = self._all_fused(SKIPPING)

    def step(
        self,
        update_count: int,
        to_step: Sequence[int] | None = None,
        divisor: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Step the optimizers with the indices `to_step`, or all of them.

        `update_count` is that of the run, with skipped updates; it seeds the bits of stochastic rounding.
        `divisor` and `skip` have shape (); a `skip` that is not 0 leaves everything as it was.
        """
        self._updating = True  # `_refuse` lets these steps pass

        # Fused optimizers read `grad_scale` and `found_inf` from themselves; the others ignore them.
        for optimizer in self.all if to_step is None else [self.all[i] for i in to_step]:
            optimizer.grad_scale = None if self.masters else divisor  # pyrefly: ignore[missing-attribute]
            optimizer.found_inf = skip  # pyrefly: ignore[missing-attribute]

            if self.masters:
                self.masters.step(optimizer, divisor, update_count, self._call)
            elif self._several_meshes and id(optimizer) not in self._stand_ins:
                parts = [(group, part) for group in optimizer.param_groups for part in by_mesh(group["params"])]
                with only_these(optimizer, parts):
                    optimizer.step()
            else:
                self._call(optimizer)

        self._updating = False
        self._after_step()

    def _after_step(self) -> None:
        """Do nothing: every rank has stepped all of its parameters."""

    def _call(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._stand_ins:
            step_with_stand_ins(optimizer, self._stand_ins[id(optimizer)])
        else:
            optimizer.step()

    def parameters_of(self, numbers: Sequence[int]) -> set[int]:
        """Return the ids of the model's parameters that these optimizers move, on any rank."""
        return {id(p) for number in numbers for group in self.groups[number] for p in group}

    def refuse_direct_steps(self) -> None:
        """Raise when the user calls `optimizer.step()`: it would apply sums that are not yet divided."""
        self._hooks = [optimizer.register_step_pre_hook(self._refuse) for optimizer in self.all]

    def release(self) -> None:
        """Let the user step the optimizers again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _all_fused(self, kinds: tuple[type[torch.optim.Optimizer], ...]) -> bool:
        """Return whether every optimizer is a fused one of these kinds, or declares that it divides and skips."""
        return all(
            getattr(optimizer, DIVIDES_AND_SKIPS_ATTRIBUTE, False)
            or (type(optimizer) in kinds and all(group.get("fused") for group in optimizer.param_groups))
            for optimizer in self.all
        )

    def _refuse(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._updating:
            raise UserError(
                "optimizer.step() was called directly in a Lockstep loop",
                "the gradients are sums over the batch, not yet divided, checked or clipped",
                "call step.apply(); it divides by the global weight, clips, and steps the optimizer",
            )


class ShardedOptimizers(Optimizers):
    """ZeRO-1: every rank keeps the optimizer state of some parameters, updates those, and broadcasts them.

    DDP reduces the gradients as always. Parameters are assigned to the ranks by size, each as a whole, and in a
    checkpoint each rank saves the state of the parameters that it owns.
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

        own = {id(p) for p in self._owned[runtime.world.rank]}
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in own]
            # Some optimizers, such as Adagrad, set up their state in the constructor.
            for p in [p for p in optimizer.state if id(p) not in own]:
                del optimizer.state[p]

    def _after_step(self) -> None:
        """Broadcast every rank's parameters. Collective: every rank must step."""
        with torch.no_grad():
            for owner, parameters in enumerate(self._owned):
                # A flat buffer has one dtype.
                for dtype in dict.fromkeys(p.dtype for p in parameters):
                    self._broadcast([p for p in parameters if p.dtype == dtype], owner)

    def _broadcast(self, parameters: list[nn.Parameter], owner: int) -> None:
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self._runtime.collectives.broadcast_([flat], owner)
        if owner != self._runtime.world.rank:
            received = flat.split([p.numel() for p in parameters])
            torch._foreach_copy_([p.detach().view(-1) for p in parameters], list(received))


@contextmanager
def only_these(optimizer: torch.optim.Optimizer, parts: list[GroupPart]) -> Iterator[None]:
    """Let the optimizer see nothing but these tensors, as groups with the settings of their group."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": tensors} for group, tensors in parts]
    try:
        yield
    finally:
        used_groups = optimizer.param_groups
        optimizer.param_groups = groups

    # Some optimizers keep numbers in their groups, which must survive.
    for (group, _), used in zip(parts, used_groups, strict=True):
        group.update({key: value for key, value in used.items() if key != "params"})


def as_list(optimizers: Any) -> list[Any]:
    return list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]


def rebind(optimizers: Any, before: dict[str, nn.Parameter], now: dict[str, nn.Parameter]) -> None:
    """Give optimizers that were made before the model was sharded the parameters that it has now."""
    replaced = {id(old): now[name] for name, old in before.items() if now[name] is not old}
    for optimizer in as_list(optimizers) if replaced else []:
        for group in getattr(optimizer, "param_groups", []):
            group["params"] = [replaced.get(id(p), p) for p in group["params"]]


def _check_kind(optimizer: Any) -> None:
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


def _knows_dtensors(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer can step its parameters as they are: all plain ones, or it is right on DTensors."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    sharded = any(isinstance(p, DTensor) for p in parameters)
    return not sharded or _is_known(optimizer)


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer need not be tried: torch's, our own, or one whose author says so."""
    ours = type(optimizer).__module__.partition(".")[0] == __name__.partition(".")[0]
    return ours or type(optimizer) in ON_DTENSORS or getattr(optimizer, DTENSOR_ATTRIBUTE, False)


def _needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer gets whole parameters; False: it treats every element of a shard by itself.

    A trial on small parameters proves that they are needed, and never that they are not: some optimizers treat only
    large matrices as such, or begin to after many steps.
    """
    try:
        whole = kind_of(optimizer) == PER_PARAMETER or type(optimizer) not in ELEMENTWISE_OPTIMIZERS
    except CannotTry as reason:
        fix = (
            "type strategy=ddp, which keeps full parameters on every rank; if it works on DTensors by itself, set "
            f"{DTENSOR_ATTRIBUTE} = True in its class"
        )
        raise _cannot_step(optimizer, "parameters are sharded", reason, fix) from reason

    # With one step for every parameter, a hook on a step would be called that often.
    if whole and any(vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")):
        fix = "do in after_step(), or after step.apply(), what the hook does; or type strategy=ddp"
        raise _cannot_step(optimizer, "parameters are sharded", "it has a hook on its step, and needs them whole", fix)
    return whole


def _cannot_step(optimizer: Any, why: str, reason: object, fix: str) -> UserError:
    return UserError(f"{type(optimizer).__name__} cannot be used here: {why}", str(reason), fix)


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
            "they would never move",
            "give them to an optimizer, or freeze them with requires_grad_(False)",
        )
