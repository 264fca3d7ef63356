"""Parameter hooks that a model registers: `register_hook` and `register_post_accumulate_grad_hook`.

Sharding replaces parameters and would silently drop their hooks. So the hooks are removed before sharding, and the
drivers call them, always with a full gradient:

    one process, ddp, zero1, fsdp    the gradient of each micro-batch, before it is added to others
    tp and pp, alone or in a mesh    the sum over micro-batches and ranks, gathered from its shards

Both are correct only for a linear hook: hook(a + b) = hook(a) + hook(b). probe.py tests for linearity, and hooks that
are not linear are refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError
from lockstep.parallel.parameter_hooks.probe import Hooks, call_hooks, problem_with, reachable
from lockstep.runtime.context import Runtime
from lockstep.runtime.shards import full_tensor, shard_of


class ParameterHooks:
    """The hooks of one parameter. A hook that the user removes later is no longer called.

    The hooks are taken off the parameter, because it is about to be sharded or reduced in buckets: torch would call
    them with a part of the gradient. They are called with the full one instead.
    """

    def __init__(self, parameter: nn.Parameter, names: Mapping[int, str]):
        """Remove the hooks from `parameter`. `names` holds the names of all parameters by their memory address."""
        # Keep torch's own dictionaries: the user's RemovableHandles remove hooks from them.
        self.on_gradient: Hooks = parameter._backward_hooks or {}
        self.after_accumulation: Hooks = parameter._post_accumulate_grad_hooks or {}
        self.reads_parameter = bool(self.after_accumulation)

        parameter._backward_hooks = None
        if self.reads_parameter:
            # Setting None would not remove them: torch ignores it and keeps the old dictionary.
            parameter._post_accumulate_grad_hooks = OrderedDict()

        # Parameters that the hooks reference directly. (Through a module, a hook always finds the current parameters.)
        held = [item for hook in self._all() for item in reachable(hook) if isinstance(item, Tensor)]
        self.held = {names[_address(item)]: ref(item) for item in held if _address(item) in names}

    def __call__(self, grad: Tensor, parameter: Callable[[], Tensor]) -> Tensor:
        """Return the full gradient `grad` as the hooks change it. `parameter` returns the full parameter on demand."""
        # A hook that reads the parameter may change its gradient in place, and autograd may share that tensor.
        if self.reads_parameter:
            grad = grad.clone()
        return call_hooks(self.on_gradient, self.after_accumulation, grad, parameter)

    def register(self, parameter: nn.Parameter) -> None:
        """Register the hooks with autograd, which calls them before it accumulates a gradient."""
        weak = ref(parameter)  # the parameter must not keep itself alive

        def full() -> Tensor:
            alive = weak()
            assert alive is not None
            return alive

        parameter.register_hook(lambda grad: self(grad, full))

    @torch.no_grad()
    def change_sum(self, parameter: nn.Parameter) -> None:
        """Apply the hooks to the reduced gradient of a parameter that may be sharded. Collective among its holders."""
        grad = parameter.grad
        if grad is None:
            return

        # Gather even if this rank's hook was removed, because the other ranks may wait in the same collective.
        full = full_tensor(parameter.detach()) if self.reads_parameter else None
        changed = self(full_tensor(grad), lambda: nn.Parameter(full if full is not None else parameter.detach()))

        # Hooks get the full gradient. Of the result each rank keeps its own shard.
        if isinstance(grad, DTensor):
            shard = shard_of(grad)
            ranges = zip(shard.offset, shard.local.shape, strict=True)
            slices = tuple(slice(start, start + size) for start, size in ranges)
            shard.local.copy_(changed[slices])
        else:
            parameter.grad = changed

    def _all(self) -> Iterator[Callable[..., object]]:
        yield from self.on_gradient.values()
        yield from self.after_accumulation.values()


def take_hooks(model: nn.Module) -> dict[str, ParameterHooks]:
    """Remove the hooks of all trainable parameters and return them by name. A frozen parameter calls no hooks."""
    names = {_address(p): name for name, p in model.named_parameters()}
    return {
        name: ParameterHooks(p, names)
        for name, p in model.named_parameters()
        if p.requires_grad and (p._backward_hooks or p._post_accumulate_grad_hooks)
    }


def register_hooks(hooks: Mapping[str, ParameterHooks], parameters: Mapping[str, nn.Parameter]) -> None:
    """Register the hooks of parameters that every rank holds in full. Both `hooks` and `parameters` are by name."""
    for name, own in hooks.items():
        own.register(parameters[name])


def change_sums(hooks: Mapping[str, ParameterHooks], parameters: Mapping[str, nn.Parameter]) -> None:
    """Apply the hooks to the gradient sums of a pass, of which each rank may hold a shard. Collective.

    Both `hooks` and `parameters` are by name.
    """
    for name, own in hooks.items():
        own.change_sum(parameters[name])


def check_hooks(hooks: Mapping[str, ParameterHooks], model: nn.Module, runtime: Runtime) -> None:
    """Refuse hooks that differ between ranks, are not linear, or hold a parameter that was replaced. Collective."""
    # Compare even if this rank has no hooks: another rank may have some.
    parameters = dict(model.named_parameters())
    local_counts = {name: [len(h.on_gradient), len(h.after_accumulation)] for name, h in hooks.items()}

    first, *others = runtime.collectives.all_gather_json(local_counts)

    for rank, counts in enumerate(others, start=1):
        for name in sorted(first.keys() | counts.keys()):
            if first.get(name) != counts.get(name):
                raise UserError(
                    f"the ranks set different hooks on {name!r}",
                    f"rank 0 has {sum(first.get(name, []))}, rank {rank} has {sum(counts.get(name, []))}",
                    "set the same hooks on every rank: no `if rank == 0` in model()",
                    cause="hook",
                )

    if not first:
        return

    # All ranks raise the first problem that any rank finds.
    problems = (_problem(h, name, parameters, runtime) for name, h in hooks.items())
    local_problem = next(filter(None, problems), None)
    for problem in runtime.collectives.all_gather_json(local_problem):
        if problem:
            raise UserError(*problem, cause="hook")


def _problem(
    hooks: ParameterHooks, name: str, parameters: Mapping[str, nn.Parameter], runtime: Runtime
) -> tuple[str, str, str] | None:
    # The hook may hold a parameter that is no longer part of the model.
    for held, original in hooks.held.items():
        if not _is_current(original, parameters[held]):
            return (
                f"the hook on {name!r} holds the parameter {held!r}, which this strategy replaces with its shards",
                "the hook would always see the weights of the first step",
                "let it read the parameter from its module (`layer.weight`, not a variable that holds the weight), or "
                "set strategy=ddp",
            )

    parameter = parameters[name]
    if isinstance(parameter, DTensor):
        # Random values: the full parameter need not be gathered to test for linearity.
        parameter = nn.Parameter(torch.randn(parameter.shape, dtype=parameter.dtype, device=runtime.device))

    symptom = problem_with(hooks.on_gradient, hooks.after_accumulation, parameter)
    if symptom is None:
        return None

    return (
        f"the hook on {name!r} is not linear: hook(a + b) must be hook(a) + hook(b)",
        f"{symptom}. The hook gets the gradient of one micro-batch, or a sum that is not yet divided, so its result "
        "would differ from a hook on the gradient of the whole batch",
        "remove it, and set clip.norm=1, clip.value=1 or clip.adaptive=0.01 to limit gradients; code that needs the "
        "gradient of the whole step belongs in the step() of a custom optimizer",
    )


def hook_ids(parameter: Tensor) -> set[int]:
    """Return torch's ids of the hooks that are registered on a parameter."""
    return {*(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())}


def _is_current(held: ReferenceType[Tensor], current: nn.Parameter) -> bool:
    """Whether a parameter that a hook holds is still the model's `current` one."""
    tensor = held()
    if tensor is None or isinstance(current, DTensor):
        return False
    return tensor is current or _address(tensor) == _address(current)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; on the meta device, which has none, that of its storage object."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata
