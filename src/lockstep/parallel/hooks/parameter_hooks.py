"""Hooks that a model sets on its own parameters: `register_hook` and `register_post_accumulate_grad_hook`.

Sharding replaces parameters, and their hooks would be lost without a word. So the hooks are taken off before anything
is sharded, and the drivers call them, always with a full gradient:

    one process, ddp, zero1, fsdp    that of each micro-batch, before it is added to others
    tp and pp, alone or in a mesh    the sum of the step over micro-batches and ranks, gathered from its shards

Both are right for a linear hook only: what it makes of a sum is the sum of what it makes of the terms. probe.py
tells which hooks are linear, and all others are refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError
from lockstep.parallel.hooks.probe import Hooks, call_hooks, problem_with, reachable
from lockstep.runtime.context import Runtime
from lockstep.runtime.layout import full_tensor, shard_of


class ParameterHooks:
    """The hooks of one parameter. A hook that the user removes later is no longer called."""

    def __init__(self, parameter: nn.Parameter, names: Mapping[int, str]):
        """Take the hooks off `parameter`. `names` holds the names of all parameters by the address of their memory."""
        # torch's own dictionaries: the handles that the user got remove hooks from these.
        self.on_gradient: Hooks = parameter._backward_hooks or {}
        self.after_accumulation: Hooks = parameter._post_accumulate_grad_hooks or {}
        self.reads_parameter = bool(self.after_accumulation)

        parameter._backward_hooks = None
        if self.reads_parameter:
            # None would not take them off: torch keeps what it was given before.
            parameter._post_accumulate_grad_hooks = OrderedDict()

        # The parameters that the hooks hold. A module that they hold always has the current ones.
        held = [item for hook in self._all() for item in reachable(hook) if isinstance(item, Tensor)]
        self.held = {names[_address(item)]: ref(item) for item in held if _address(item) in names}

    def __call__(self, grad: Tensor, parameter: Callable[[], Tensor]) -> Tensor:
        """Return what the hooks make of a full gradient. `parameter` returns the full parameter, if one reads it."""
        # A hook that reads the parameter may also change the gradient in place, which might be another's as well.
        if self.reads_parameter:
            grad = grad.clone()
        return call_hooks(self.on_gradient, self.after_accumulation, grad, parameter)

    def register(self, parameter: nn.Parameter) -> None:
        """Have autograd call the hooks in every backward, before the gradient is added to earlier ones."""
        weak = ref(parameter)  # the parameter must not keep itself alive

        def full() -> Tensor:
            alive = weak()
            assert alive is not None
            return alive

        parameter.register_hook(lambda grad: self(grad, full))

    @torch.no_grad()
    def change_sum(self, parameter: nn.Parameter) -> None:
        """Change the reduced gradient of a parameter that may be sharded. Collective among those that hold it."""
        grad = parameter.grad
        if grad is None:
            return

        # Gathered in any case, so that ranks never wait for one whose hook was removed.
        full = full_tensor(parameter.detach()) if self.reads_parameter else None
        changed = self(full_tensor(grad), lambda: nn.Parameter(full if full is not None else parameter.detach()))
        if isinstance(grad, DTensor):
            shard = shard_of(grad)
            own = zip(shard.offset, shard.local.shape, strict=True)
            shard.local.copy_(changed[tuple(slice(start, start + size) for start, size in own)])
        else:
            parameter.grad = changed

    def _all(self) -> Iterator[Callable[..., object]]:
        yield from self.on_gradient.values()
        yield from self.after_accumulation.values()


def take_hooks(model: nn.Module) -> dict[str, ParameterHooks]:
    """Take the hooks off all trainable parameters, and return them by name. Frozen ones never call theirs."""
    names = {_address(p): name for name, p in model.named_parameters()}
    return {
        name: ParameterHooks(p, names)
        for name, p in model.named_parameters()
        if p.requires_grad and (p._backward_hooks or p._post_accumulate_grad_hooks)
    }


def check_hooks(hooks: Mapping[str, ParameterHooks], model: nn.Module, runtime: Runtime) -> None:
    """Refuse hooks that would not do what they do in one process, on the model as it is now. Collective."""
    # Also without any: another rank may have some.
    parameters = dict(model.named_parameters())
    own = {name: [len(h.on_gradient), len(h.after_accumulation)] for name, h in hooks.items()}
    first, *others = runtime.collectives.gather_json(own)
    for rank, theirs in enumerate(others, start=1):
        for name in sorted(first.keys() | theirs.keys()):
            if first.get(name) != theirs.get(name):
                raise UserError(
                    f"the ranks set different hooks on {name!r}",
                    f"rank 0 has {sum(first.get(name, []))}, rank {rank} has {sum(theirs.get(name, []))}",
                    "set the same hooks on every rank: no `if rank == 0` in model()",
                )

    if not first:
        return

    # What one rank finds wrong, all of them raise.
    problem = next(filter(None, (_problem(h, name, parameters, runtime) for name, h in hooks.items())), None)
    for found in runtime.collectives.gather_json(problem):
        if found:
            raise UserError(*found)


def _problem(
    hooks: ParameterHooks, name: str, parameters: Mapping[str, nn.Parameter], runtime: Runtime
) -> tuple[str, str, str] | None:
    # Weights that the hook holds and that are no longer the model's.
    for held, original in hooks.held.items():
        if not _is_current(original, parameters[held]):
            return (
                f"the hook on {name!r} holds the parameter {held!r}, which this strategy replaces with its shards",
                "the hook would see the weights of the first step for ever",
                "let it read the parameter from its module (`layer.weight`, not a variable that holds the weight), or "
                "type strategy=ddp",
            )

    parameter = parameters[name]
    if isinstance(parameter, DTensor):
        # A full parameter may not fit together with all others, so its values are made up.
        parameter = nn.Parameter(torch.randn(parameter.shape, dtype=parameter.dtype, device=runtime.device))

    what = problem_with(hooks.on_gradient, hooks.after_accumulation, parameter)
    if what is None:
        return None

    return (
        f"the hook on {name!r} is not linear: hook(a + b) must be hook(a) + hook(b)",
        f"{what}. It gets the gradient of one micro-batch or of a sum that is not yet divided, so it would not do what "
        "it does to the gradient of a whole batch",
        "take it off, and type clip.norm=1, clip.value=1 or clip.adaptive=0.01 to limit gradients; what else needs the "
        "gradient of the whole step belongs in the step() of a custom optimizer",
    )


def hook_ids(parameter: Tensor) -> set[int]:
    """Return the numbers by which torch knows the hooks that are on a parameter."""
    return {*(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())}


def _is_current(held: ReferenceType[Tensor], current: nn.Parameter) -> bool:
    tensor = held()
    if tensor is None or isinstance(current, DTensor):
        return False
    return tensor is current or _address(tensor) == _address(current)


def _address(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; on the meta device, where there is none, what stands for it."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata
