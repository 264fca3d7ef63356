"""Parameters, gradients and optimizer state sharded over the ranks with torch's FSDP2 (`fully_shard`).

fsdp         every block is gathered for its forward and for its backward, and resharded after each
fsdp-grads   parameters stay gathered from the forward to the end of the backward; gradients and state are sharded
hsdp         sharded inside a group of ranks, replicated between groups

Gradients are sums over ranks, where torch would leave means.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.parallel.driver import DriverSetup
from lockstep.parallel.exact.shards import ShardReducer
from lockstep.parallel.fsdp import torch_private
from lockstep.parallel.fsdp.collective_check import END, CollectiveCheck
from lockstep.parallel.fsdp.forward_checks import (
    ForwardChecks,
    check_shardable,
    gathered_parameters,
    parameters_before,
)
from lockstep.parallel.fsdp.sharding import scalars, shard_blocks, sharded_modules
from lockstep.parallel.gradients import broadcast_unsharded_gradients, count_and_sum
from lockstep.parallel.inner_gradients import InnerGradient, refuse_second_derivative
from lockstep.parallel.parameter_hooks.hooks import ParameterHooks
from lockstep.parallel.sharded import ShardedDriver
from lockstep.runtime.context import Runtime, device_name
from lockstep.runtime.control_word import ControlWord
from lockstep.runtime.host.resources import available_memory

# torch's name for the autograd node at a block's inputs. A frozen block has no leaf to find it by.
FSDP_NODES = frozenset({"RegisterPostBackwardFunctionBackward"})


class FSDPDriver(ShardedDriver):
    """Reduce-scatters the gradients of every micro-batch as soon as its backward computes them.

    So no rank accumulates full-size gradients.
    """

    def __init__(self, model: nn.Module, setup: DriverSetup):
        """Shard `model` along dp; with `axes`, its layers are already sharded along tp."""
        config, runtime, axes = setup.config, setup.runtime, setup.axes
        check_shardable(model, config)
        originals = parameters_before(model)
        banner = shard_blocks(model, setup)

        # Exact mode adds gradients of one turn after another, and a turn has a micro-batch of each rank.
        role = replace(setup.role, round_robin=config.exact, banner=banner)

        # Layers that tp has sharded have no full gradients. Without tp, hooks get those of each micro-batch: see below.
        super().__init__(model, setup, role, hooks_on_sums=setup.hooks if axes else {})
        self._dp_group = setup.dp_group
        self._tp_group = axes.along("tp") if axes else None
        self._scalars = [p for p in scalars(model) if p.requires_grad]
        self._reshard_after_forward = config.strategy_record.reshard_after_forward
        self._graph_is_retained = False  # the loss computed a gradient itself, and the backward needs its graph again

        self._modules = sharded_modules(model)
        self._collective_check = CollectiveCheck(model, runtime)
        self._forward_checks = ForwardChecks(model, self._modules, originals, config)

        self._exact_reducer: ShardReducer | None = None
        if config.exact:
            self._exact_reducer = self.parts.add(ShardReducer(self.parameters, self._modules, runtime.collectives))

        # Last, so that the user's hooks are called first: before the ranks compare.
        if axes is None:
            _register_before_reduction(setup.hooks, self.parameters, self._modules, self._scalars)

    def begin_pass(self) -> None:
        super().begin_pass()
        self._collective_check.begin_pass()
        self._forward_checks.begin_pass()

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        return self._exact_reducer.norms(tensors) if self._exact_reducer else super().norms(tensors)

    def finish_reduction(self, control_word: ControlWord) -> tuple[Tensor, Tensor]:
        if self._exact_reducer:
            return self._exact_reducer.reduce(self.codec.pack(control_word))

        return super().finish_reduction(control_word)

    @contextmanager
    def many_forwards(self) -> Iterator[str | None]:
        # Every token of a generated text would gather the whole model again, so keep it gathered if memory allows.
        stays_gathered = not self._reshard_after_forward or _has_room(self.model, self.runtime)
        for module in self._modules:
            module.set_reshard_after_forward(not stays_gathered, recurse=False)

        try:
            with super().many_forwards():
                warning = "every forward gathers the model again: there is not enough memory for twice its parameters"
                yield None if stays_gathered else warning
        except BaseException:
            torch_private.forget_failed_backward(self._modules[0])
            raise
        finally:
            # Restore the configured setting, and reshard everything.
            for module in self._modules:
                module.set_reshard_after_forward(self._reshard_after_forward, recurse=False)
                module.reshard()

            # A failed backward leaves gradients, to which the first step would add.
            for _, full in gathered_parameters(self._modules):
                full.grad = None

    def reshard(self) -> None:
        for module in self._modules:
            module.reshard()

    def before_inner_gradient(self, inner: InnerGradient) -> None:
        super().before_inner_gradient(inner)
        if self._tp_group and not self._tp_group.world.alone:
            refuse_second_derivative(inner, self.leaf_names())

        # The second backward needs the gathered weights too, but does not run FSDP's hooks to gather them again. A
        # gradient that does not reach the model changes nothing: one rank may compute it alone.
        if inner.retains_graph and not self._graph_is_retained and inner.reaches(self.leaf_names(), FSDP_NODES):
            self._graph_is_retained = True
            for module in self._modules:
                module.set_reshard_after_backward(False, recurse=False)

    def leaf_names(self) -> dict[int, str]:
        names = super().leaf_names()
        gathered = gathered_parameters(self._modules)
        return names | {id(full): names[id(sharded)] for sharded, full in gathered if id(sharded) in names}

    def _run_backward(self, total: Tensor, grad_output: Tensor, control_word: ControlWord | None) -> None:
        if self._graph_is_retained:
            self._backward_through_gradients(total, grad_output)
        else:
            self._forward_checks.check_graph([total])
            super()._run_backward(total, grad_output, control_word)

        self._forward_checks.check_pass()
        if control_word is not None:
            self._collective_check.compare(END)

    def _backward_through_gradients(self, total: Tensor, grad_output: Tensor) -> None:
        """Backpropagate a loss that contains gradients, with the whole model gathered.

        A parameter's gradient then comes in several parts, of which FSDP would reduce some and drop the others. So
        gradient synchronisation is off during the backward, and everything is reduced at its end.
        """
        for module in self._modules:
            module.set_requires_gradient_sync(False, recurse=False)
            module.unshard()

        torch.autograd.backward(total, grad_output)

        for module in self._modules:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)

        torch_private.end_backward(self._modules[0])
        self._graph_is_retained = False

    def _reduce_gradients(self) -> None:
        count_and_sum(self._scalars, self._dp_group)
        if self._tp_group:
            broadcast_unsharded_gradients([*self.parameters.values()], self._tp_group)


def _register_before_reduction(
    hooks: Mapping[str, ParameterHooks],
    parameters: Mapping[str, nn.Parameter],
    modules: Sequence[FSDPModule],
    unsharded: Sequence[nn.Parameter],
) -> None:
    """Have the user's hooks called with the full gradients of each micro-batch, before FSDP reduces them."""
    # Before the first forward there is no full parameter to register a hook on, and the full gradient exists only just
    # before its reduction. If a block is called more than once, its gradient may come in parts; for a linear hook that
    # makes no difference.
    by_parameter = {id(parameters[name]): own for name, own in hooks.items()}

    for module in modules:
        ids = [(p, id(torch_private.shard(p))) for p in torch_private.grouped_parameters(module)]
        hooked = [(p, by_parameter.pop(key)) for p, key in ids if key in by_parameter]
        if hooked:
            torch_private.call_before_reduction(module, partial(_call_hooks, module, hooked))

    # FSDP ignores these, so autograd calls their hooks.
    for parameter in unsharded:
        if id(parameter) in by_parameter:
            by_parameter.pop(id(parameter)).register(parameter)

    assert not by_parameter, "a trainable parameter is neither sharded nor a scalar"


def _call_hooks(module: FSDPModule, hooked: list[tuple[Any, ParameterHooks]]) -> None:
    """Call the user's hooks with the full gradients of a module's parameters, if they are reduced now."""
    if not torch_private.reduces_gradients(module):
        return

    for parameter, hooks in hooked:
        full = torch_private.gathered(parameter)
        if full is not None and full.grad is not None:
            full.grad = hooks(full.grad, lambda full=full: full)


def _has_room(model: nn.Module, runtime: Runtime) -> bool:
    """Whether every rank has memory for twice the size of all parameters. Collective."""
    needed = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    memories = runtime.collectives.all_gather_json(_free_memory(runtime.device))
    users = Counter(name for name, _ in memories)  # ranks may share a device
    return all(needed * users[name] <= free for name, free in memories)


def _free_memory(device: torch.device) -> tuple[str, float]:
    """Return a name for the memory, and the bytes that this process could still allocate if no other one did."""
    if device.type != "cuda":
        return socket.gethostname(), available_memory()

    # Memory that torch has reserved but does not use counts as free. The setting `gpu_memory` may allow less.
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total - torch.cuda.memory_allocated(device)
    return device_name(device), min(free + unused, allowed)
