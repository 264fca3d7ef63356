"""Checks while a run trains, of what user code may change: parameters, their hooks, gradients, and equal replicas.

A check that compares ranks is collective and raises the same error on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError
from lockstep.optim.optimizers import Optimizers
from lockstep.parallel.parameter_hooks.hooks import hook_ids
from lockstep.runtime.context import Runtime
from lockstep.runtime.shards import checksums, to_local


class LateHooks:
    """Detects hooks that are set on parameters after the model was wrapped: sharded parameters never call them."""

    def __init__(self, model: nn.Module, parameters_before: Mapping[str, nn.Parameter]):
        """`parameters_before` are the parameters from before the model was wrapped."""
        self._parameters = dict(model.named_parameters())
        self._known = {name: hook_ids(p) for name, p in self._parameters.items()}  # hooks that Lockstep carried over

        # Originals of parameters that sharding has replaced. They are not kept alive for this.
        self._replaced = {
            name: weakref.ref(p) for name, p in parameters_before.items() if self._parameters.get(name) is not p
        }

    def check(self) -> None:
        """Raise if there is a late hook. Not called in every step, because there may be thousands of parameters."""
        late = [name for name, p in self._parameters.items() if hook_ids(p) - self._known[name]]
        for name, original in self._replaced.items():
            p = original()  # None if the original parameter was freed
            if p is not None and hook_ids(p):
                late.append(name)

        if late:
            raise UserError(
                f"a hook was set on {late[0]!r} after the model was wrapped",
                "the hooks of parameters are carried over when Lockstep gets the model, and a later one might never be "
                "called",
                "set it in model(), or before run.setup(...)",
                cause="hook",
            )


class TrainableGuard:
    """Detects parameters that are frozen, unfrozen or replaced during the run.

    The set of trainable parameters is fixed when the model is wrapped: the gradients of a layer that is unfrozen later
    would never be all-reduced.
    """

    def __init__(self, model: nn.Module, late_hooks: LateHooks, reshard: Callable[[], None]):
        """`reshard` gives up the full weights that a sharded model has gathered, if there are any."""
        self.model = model
        self._reshard = reshard
        self.named = dict(model.named_parameters())
        self.trainable = [p.requires_grad for p in self.named.values()]
        self._late_hooks = late_hooks

    def check(self) -> None:
        """Raise if a parameter was frozen or unfrozen. Called in every step."""
        if [p.requires_grad for p in self.named.values()] == self.trainable:
            return

        # Search for the changed parameter only now: every step pays just for the comparison above.
        for (name, p), before in zip(self.named.items(), self.trainable, strict=True):
            if p.requires_grad != before:
                raise _trainable_changed(f"{name!r} was {'frozen' if before else 'unfrozen'}")

    def check_structure(self) -> None:
        """Raise if a parameter was added, removed or replaced. This is slower, so it is not called in every step."""
        # After a forward without a backward, of the user's code, the model may still have full weights for its shards.
        self._reshard()
        now = dict(self.model.named_parameters())
        for name, p in self.named.items():
            if now.pop(name, None) is not p:
                raise _trainable_changed(f"parameter {name!r} was replaced or removed")

        if now:
            raise _trainable_changed(f"parameter {next(iter(now))!r} was added")

        self.check_late_hooks()

    def check_late_hooks(self) -> None:
        """Raise if a hook was set on a parameter that would never call it. Not called in every step either."""
        self._late_hooks.check()


def _trainable_changed(change: str) -> UserError:
    return UserError(
        f"{change} after the model was wrapped",
        "the trainable parameters must stay the same during the run",
        "freeze, unfreeze and replace parameters in model(), before Lockstep gets it; to change them later, "
        "start a second run from the saved weights. Two models in turn need no freezing: step.apply(optimizer) drops "
        "the gradients of the other",
        cause="changed-structure",
    )


class GradientGuard:
    """Detects in a custom loop that gradients were dropped or changed between two calls of the step.

    It watches up to three parameters of each optimizer and raises only if all of them changed, as zero_grad() and
    clip_grad_norm_() do: setting the gradient of one parameter to None may be intended.
    """

    def __init__(self, optimizers: Optimizers):
        self.is_new = True  # until the first `step.backward` of this process
        self._watched: list[list[Tensor]] = []  # a list for each optimizer
        for groups in optimizers.groups:
            # The first, the middle and the last are enough to see zero_grad() or clipping.
            parameters = [p for group in groups for p in group if p.requires_grad]
            if parameters:
                some = (parameters[0], parameters[len(parameters) // 2], parameters[-1])
                self._watched.append(list({id(p): p for p in some}.values()))

        # For each optimizer: parameter, gradient, and how often the gradient had been changed.
        self._noted: list[list[tuple[Tensor, Tensor, int]]] = []
        self._shards: list[Tensor] = []  # the noted gradients that are sharded

    def note(self) -> None:
        """Record the current gradients as the expected ones, and watch them until `check` or `forget`."""
        self.forget()

        for watched in self._watched:
            # Loops, because this runs for every micro-batch.
            noted = []

            # A version counter says how often a tensor was changed in place. Reading it does not wait for the device.
            for p in watched:
                gradient = p.grad
                if type(gradient) is Tensor:
                    noted.append((p, gradient, gradient._version))
                elif gradient is not None:
                    noted.append((p, gradient, _changes(gradient)))

                    # See `_WatchedShard`: torch does not count all changes of a shard.
                    if type(gradient) is DTensor:
                        gradient.__class__ = _WatchedShard
                        self._shards.append(gradient)

            if noted:
                self._noted.append(noted)

    def forget(self) -> None:
        """Stop watching, and expect nothing: a step or a pass over its batches begins or ends."""
        if self._shards:
            self._release()

        self._noted = []

    def _release(self) -> None:
        """Give the watched shards their own class back."""
        for gradient in self._shards:
            gradient.__class__ = DTensor  # pyrefly: ignore[bad-argument-type]

        self._shards = []

    def check(self, call: str) -> None:
        """Raise if all watched gradients of an optimizer have changed since `note`."""
        if self._shards:
            self._release()

        for noted in self._noted:
            for p, gradient, changes in noted:
                if p.grad is gradient and _changes(gradient) == changes:
                    break  # one that is unchanged is enough
            else:
                raise UserError(
                    f"the gradients of this step were dropped or changed before {call}",
                    "they are sums over the batches so far, not yet divided: zero_grad() loses the earlier batches, "
                    "and clip_grad_norm_() compares its limit with a sum",
                    "remove zero_grad() and clip_grad_norm_(): step.apply() does both, with clip.norm=1; other changes "
                    "of gradients belong in weight.register_hook(...) before run.setup if they are linear, or in the "
                    "step() of a custom optimizer",
                )


class _WatchedShard(DTensor):
    """A sharded gradient that counts how often a function changed it as one of several tensors.

    torch counts changes in place, but not those of the functions that get a list of DTensors (`torch._foreach_mul_`),
    which all clipping uses. A fingerprint would make the host wait for the device, and a shard may be empty on some
    ranks. So the gradient gets this class while it is watched, as torch gives a lazy parameter its final class.
    """

    __slots__ = ()  # the layout of a DTensor, without which the class of an object cannot change
    _changes_in_lists: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Only functions that change their arguments in place, by torch's naming, and that get several tensors at once.
        if func.__name__.endswith("_") and args and isinstance(args[0], list | tuple):
            for tensor in args[0]:
                if type(tensor) is cls:
                    tensor._changes_in_lists = _changes_in_lists(tensor) + 1

        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _changes_in_lists(gradient: Tensor) -> int:
    """Return the changes that `_WatchedShard` has counted, 0 for a tensor that was never watched."""
    return getattr(gradient, "_changes_in_lists", 0)


def _changes(gradient: Tensor) -> int:
    """Return how often a gradient was changed in place: torch counts each change in the DTensor or in its shard."""
    if type(gradient) is Tensor:
        return gradient._version

    return gradient._version + to_local(gradient)._version + _changes_in_lists(gradient)


def check_replicas(model: nn.Module, runtime: Runtime, only_frozen: bool = False) -> None:
    """Check that all ranks hold the same bits, with a checksum per parameter. Collective."""
    # Parameters on the meta device have no data yet.
    named = {}
    for name, p in model.named_parameters():
        if not p.is_meta and not (only_frozen and p.requires_grad):
            named[name] = p

    if runtime.world.alone or not named:
        return

    # A few bytes for each parameter are sent, not the parameters.
    first, *others = runtime.collectives.all_gather_json(checksums(named.values()))
    for rank, other in enumerate(others, start=1):
        for name, expected, actual in zip(named, first, other, strict=True):
            if expected != actual:
                raise UserError(
                    f"{name!r} differs between rank 0 and rank {rank}",
                    "every rank must hold the same weights",
                    "load or initialise frozen parts equally on all ranks; look for code that changes parameters on "
                    "one rank only (`if rank == 0`)",
                    cause="not-synchronised",
                )
