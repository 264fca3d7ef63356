"""Call a model without side effects: snapshot and restore its state, and run trial forwards and backwards.

This is used before a CUDA graph is captured, before a model is split into pipeline stages, and to compile on all ranks
before the first collective.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.parallel.calls.arguments import OpaqueValue, flatten, unflatten
from lockstep.runtime.autograd_graph import autograd_nodes

# Attributes that torch itself sets on every module.
TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
# Values of these types are compared by value, all others by identity.
PLAIN_TYPES = frozenset({type(None), bool, int, float, str, torch.dtype})

Pattern = tuple[bool, ...]  # whether the backward passes a gradient to each differentiable output of a call


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module except its parameters, buffers, submodules and hooks."""
    return {name: value for name, value in vars(module).items() if name not in TORCH_ATTRIBUTES}


@contextmanager
def restore_modes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context after which each module is in the mode that it was in before.

    `model.train()` would not do: some modules may be in eval mode on purpose, and a module may override `train`.
    """
    modes = [(module, module.training) for module in modules]

    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# ---- snapshots ----


class StateSnapshot(AbstractContextManager["StateSnapshot"]):
    """Buffers, attributes and random number generators as they are now; the end of a `with` block restores them."""

    def __init__(self, model: nn.Module, generator: torch.Generator = torch.default_generator):
        """`generator` is the model device's. The host's generators (torch, numpy, random) are always included."""
        self._generators = [(g, g.get_state()) for g in (torch.default_generator, generator)]
        self._python_random = random.getstate()
        self._numpy_random = np.random.get_state()

        # The registered buffers of each module, and the names of the non-persistent ones: a forward may register more.
        self._registered = [(m, dict(m._buffers), set(m._non_persistent_buffers_set)) for m in model.modules()]
        unique = {id(b): b for _, buffers, _ in self._registered for b in buffers.values() if b is not None}
        self._values = [(buffer, buffer.clone()) for buffer in unique.values()]
        self._attributes = [(module, _with_contents(own_attributes(module))) for module in model.modules()]

        # Tensors that are no buffers, such as averages that a forward updates in place.
        others = {id(t): t for module in model.modules() for t in _tensors_in(own_attributes(module))}
        self._tensors = [(tensor, tensor.clone()) for key, tensor in others.items() if key not in unique]

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore everything. May be called more than once."""
        for generator, state in self._generators:
            generator.set_state(state)

        random.setstate(self._python_random)
        np.random.set_state(self._numpy_random)

        # Refill the same dicts, since other code may hold them.
        for module, buffers, non_persistent in self._registered:
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(non_persistent)

        with torch.no_grad():
            # Only what has changed: autograd may have saved a buffer for a backward, and notices every write.
            for tensor, value in [*self._values, *self._tensors]:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)

        for module, before in self._attributes:
            _restore_attributes(module, before)

    def current_buffers(self) -> list[Tensor]:
        """Return copies of the current values of the buffers that existed at the snapshot."""
        return [buffer.clone() for buffer, _ in self._values]

    def registered_buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers that are registered now, by the number of their module and their name."""
        # One that has not changed needs no other copy.
        copies = {id(buffer): value for buffer, value in self._values if torch.equal(buffer, value)}
        return {
            f"{number}.{name}": copies[id(buffer)] if id(buffer) in copies else buffer.clone()
            for number, (module, _, _) in enumerate(self._registered)
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def used_host_random(self) -> bool:
        """Whether a random number was drawn on the host since the snapshot: a replay would not draw it again."""
        # On a CPU the host and the device share a generator, and drawing from it is fine: `restore` resets it.
        (host, host_state), (device, _) = self._generators
        torch_drawn = host is not device and not torch.equal(host.get_state(), host_state)
        numpy_drawn = not all(map(np.array_equal, np.random.get_state(), self._numpy_random))
        return torch_drawn or numpy_drawn or random.getstate() != self._python_random

    def replaced_buffers(self) -> list[str]:
        """Return the names of buffers that were added, removed, or replaced by another tensor."""
        return [
            name
            for module, buffers, _ in self._registered
            for name in {**buffers, **module._buffers}
            if module._buffers.get(name) is not buffers.get(name)
        ]

    def changed_attributes(self) -> list[str]:
        """Return `Class.name` of attributes that were added or replaced, or whose list or dict was changed."""
        return [f"{type(module).__name__}.{name}" for module, name, _ in self._changed()]

    def changed_values(self) -> list[Any]:
        """Return the values of the attributes that `changed_attributes` names."""
        return [value for *_, value in self._changed()]

    def _changed(self) -> Iterator[tuple[nn.Module, str, Any]]:
        for module, before in self._attributes:
            for name, value in sorted(own_attributes(module).items()):
                if name not in before or not _unchanged(value, *before[name]):
                    yield module, name, value


def _tensors_in(attributes: dict[str, Any]) -> list[Tensor]:
    """Return the plain tensors among these attributes, and in their lists and dicts."""
    return [leaf for leaf in tree_leaves(attributes) if type(leaf) is Tensor and not leaf.requires_grad]


def _with_contents(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each value together with a shallow copy, if it is a list or dict, or else with None."""
    return {
        name: (value, copy.copy(value) if type(value) in (list, dict) else None) for name, value in attributes.items()
    }


def _restore_attributes(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    for name in own_attributes(module).keys() - before.keys():
        del vars(module)[name]

    # Put back the original objects, and refill lists and dicts that were changed in place.
    for name, (value, contents) in before.items():
        vars(module)[name] = value
        if type(value) is list:
            value[:] = contents
        elif contents is not None:
            value.clear()
            value.update(contents)


def _unchanged(now: Any, before: Any, contents: Any) -> bool:
    # A different object counts as unchanged only if it is an equal plain value, such as a recomputed float.
    if now is not before:
        return type(now) is type(before) and type(now) in PLAIN_TYPES and now == before
    return contents is None or _member_ids(now) == _member_ids(contents)


def _member_ids(container: Any) -> list[int]:
    # Include the keys: a dict may map different keys to the same values.
    members = [*container, *container.values()] if isinstance(container, dict) else container
    return [id(member) for member in members]


# ---- trial calls ----


class TrialCall:
    """One forward and backward of a model on copies of its inputs. It leaves no gradient on any parameter.

    It is used to find out what a call does before it is trusted: which outputs get gradients, whether two runs agree,
    whether its backward can be captured. The model's state must be restored by the caller (`StateSnapshot`).
    """

    def __init__(
        self,
        call: Callable[..., Any],  # usually the `inner` call of a link (chain.py)
        parameters: list[nn.Parameter],  # the model's trainable parameters
        tensors: Sequence[Tensor],  # tensors and spec: the flattened (args, kwargs)
        spec: Hashable,
        device_type: str,  # the model's device type, for autocast
    ):
        self.call = call
        self.spec = spec
        self.device_type = device_type
        self.grad = torch.is_grad_enabled()

        # Copies, since a call may change its inputs in place.
        self.inputs = [t.detach().clone().requires_grad_(self.grad and t.requires_grad) for t in tensors]
        self.parameters = parameters if self.grad else []

        # The tensors that get a gradient: the inputs that require one, then all parameters.
        self.sources: list[Tensor] = [t for t in self.inputs if t.requires_grad] + self.parameters

        # The gradient of each source, or None, by the pattern of the backward that computed it.
        self.gradients: dict[Pattern, list[Tensor | None]] = {}

    def forward(self) -> None:
        """Run the call. Sets `outputs`, `output_spec` and `keeps_arguments`."""
        args, kwargs = unflatten(self.inputs, self.spec)

        # Autocast caches converted weights. A trial must neither use copies from outside nor leave its own behind.
        torch.clear_autocast_cache()
        with torch.set_grad_enabled(self.grad):
            self.outputs, self.output_spec = flatten(self.call(*args, **kwargs))

        torch.clear_autocast_cache()

        self.keeps_arguments = self._holds_inputs(args, kwargs)

    def _holds_inputs(self, args: Any, kwargs: Any) -> bool:
        """Whether the arguments still hold the same tensors as before the call. A KV cache, for example, does not."""
        try:
            tensors, spec = flatten((args, kwargs))
        except OpaqueValue:
            return False

        return spec == self.spec and all(a is b for a, b in zip(tensors, self.inputs, strict=True))

    @property
    def differentiable(self) -> list[Tensor]:
        """The outputs that require a gradient."""
        return [output for output in self.outputs if output.requires_grad]

    def backward(self, grad_outputs: Sequence[Tensor | None], retain_graph: bool = False) -> None:
        """Compute `gradients`. `grad_outputs` has one entry per differentiable output, None for no gradient."""
        pattern = tuple(gradient is not None for gradient in grad_outputs)
        outputs = [output for output, has_gradient in zip(self.differentiable, pattern, strict=True) if has_gradient]
        present = [gradient for gradient in grad_outputs if gradient is not None]

        if not present:
            self.gradients[pattern] = [None] * len(self.sources)
            return

        with torch.autocast(self.device_type, enabled=False):  # as in autograd's own threads
            # Not backward(), which would leave gradients on the parameters.
            gradients = torch.autograd.grad(outputs, self.sources, present, retain_graph, allow_unused=True)
            self.gradients[pattern] = list(gradients)

    def sources_reached(self) -> list[set[int]]:
        """Return, for each differentiable output, the indices of the `sources` that it depends on.

        Call it between forward and backward.
        """
        reached = []
        for output in self.differentiable:
            leaves = {id(leaf) for leaf in leaves_reached([output.grad_fn])}
            reached.append({index for index, source in enumerate(self.sources) if id(source) in leaves})

        return reached

    @property
    def has_compiled_backward(self) -> bool:
        """Whether a part of the backward is compiled, and can therefore run only once. Call it before the backward."""
        nodes = autograd_nodes(output.grad_fn for output in self.differentiable)
        return any(type(node).__name__.startswith("CompiledFunction") for node in nodes)


def leaves_reached(starts: Iterable[Any]) -> list[Tensor]:
    """Return the leaf tensors that get a gradient from a backward that starts at the nodes `starts`."""
    return [node.variable for node in autograd_nodes(starts) if type(node).__name__ == "AccumulateGrad"]
