"""A snapshot of the state that a loss might change: taken before the check, compared with later state, and restored.

It covers the model's buffers and parameters, the attributes of its modules and of the task (numbers, tensors, modules,
generators, and lists and dictionaries of these), the optimizers' settings, and gradients.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lockstep.parallel.calls.state import TORCH_ATTRIBUTES
from lockstep.runtime.shards import checksums

# Larger attributes are taken for datasets and are not copied. The limit in bytes is MAX_RATIO x parameters + MIN_BYTES.
MAX_RATIO = 4
MIN_BYTES = 2**20
MAX_ELEMENTS = 10_000  # a longer list or dictionary is not copied

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_NOT_COPIED = object()


@dataclass
class Changes:
    """The names of everything that changed, by kind."""

    model: list[str] = field(default_factory=list)  # buffers and parameters
    gradients: list[str] = field(default_factory=list)  # parameters that now have a gradient
    generators: list[str] = field(default_factory=list)
    averages: list[str] = field(default_factory=list)  # tensors with the shape of a weight, as moving averages have
    settings: list[str] = field(default_factory=list)  # settings of the optimizers
    others: list[str] = field(default_factory=list)


class CheckSnapshot:
    """The state before the check."""

    def __init__(self, model: nn.Module, task: Any, optimizers: Iterable[Any], copies_parameters: bool):
        """`copies_parameters`: the forward changes parameters by design, so `restore` must restore them too."""
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._buffers = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}

        # Parameters are compared by checksums, which need no memory. Copies are made only if they must be restored.
        self._checksums = checksums(self._parameters.values())
        self._copies: dict[str, Tensor] = {}
        if copies_parameters:
            self._copies = {name: p.detach().clone() for name, p in self._parameters.items()}

        # The options of the optimizers' parameter groups.
        self._settings = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._old_settings = [_plain_settings(group) for group in self._settings]

        # The attributes of every module and of the task. Large ones are not copied.
        max_bytes = MAX_RATIO * sum(p.nbytes for p in self._parameters.values()) + MIN_BYTES
        self._owners: list[tuple[str, dict[str, Any]]] = []
        for name, module in model.named_modules():
            self._owners.append((f"model.{name}" if name else "model", vars(module)))

        if hasattr(task, "__dict__"):
            self._owners.append(("self", vars(task)))

        self._attributes = [_copy_attributes(attributes, model, max_bytes) for _, attributes in self._owners]

        # What helps to tell a moving average from something that is only recomputed.
        self._recomputed = set(_recomputed(model))
        self._shapes = {p.shape for p in self._parameters.values() if p.dim() > 1}
        self._changed: dict[str, tuple[dict[str, Any], str, Any]] = {}  # see `settled`

    def changes(self) -> Changes:
        """Return the names of everything that differs from the snapshot."""
        changes = Changes()
        changes.gradients = [name for name, p in self._parameters.items() if p.grad is not None]

        # The model: parameters are compared by their checksums, buffers with their copies.
        now = checksums(self._parameters.values())
        for name, before, after in zip(self._parameters, self._checksums, now, strict=True):
            if before != after:
                changes.model.append(name)

        buffers = dict(self._model.named_buffers())
        for name, (_, old) in self._buffers.items():
            if name not in buffers or not _same(buffers[name], old):
                changes.model.append(name)

        # The optimizers' settings.
        for group, old in zip(self._settings, self._old_settings, strict=True):
            changes.settings += [key for key, value in _plain_settings(group).items() if old.get(key) != value]

        # The attributes of the task and of every module.
        # New attributes count as well: they were None before.
        for (owner, attributes), copies in zip(self._owners, self._attributes, strict=True):
            for name in sorted({*copies, *_own_names(attributes)}):
                old = copies[name][1] if name in copies else None

                value = attributes.get(name)
                full_name = f"{owner}.{name}"
                is_changed = old is not _NOT_COPIED and not _same(value, old)

                if is_changed and full_name not in self._recomputed:
                    self._classify(full_name, value, changes)
                    self._changed[full_name] = (attributes, name, _copied(value))

        return changes

    def settled(self, name: str) -> bool:
        """Return whether an attribute in `Changes.averages` stays the same from now on and is no copy of a weight.

        Then it is no moving average, but a table made by the first forward, or an output that happens to have the
        shape of a weight.
        """
        attributes, key, after = self._changed[name]
        value = attributes.get(key)
        if not _same(value, after):
            return False

        return not any(checksums([tensor])[0] in self._checksums for tensor in _tensors(value))

    def restore(self) -> None:
        """Restore everything, in place where other code may hold a reference to the same object."""
        with torch.no_grad():
            for name, copy in self._copies.items():
                self._parameters[name].copy_(copy)

            # A buffer may have been replaced by another tensor.
            for name, (buffer, old) in self._buffers.items():
                path, _, key = name.rpartition(".")
                self._model.get_submodule(path)._buffers[key] = buffer
                if not _same(buffer, old):
                    buffer.copy_(old)

            for group, old in zip(self._settings, self._old_settings, strict=True):
                group.update(old)

            for parameter in self._parameters.values():
                parameter.grad = None

            # Attributes that are new are removed, and the others get their old values.
            for (_, attributes), copies in zip(self._owners, self._attributes, strict=True):
                for name in _own_names(attributes) - copies.keys():
                    del attributes[name]

                for name, (value, old) in copies.items():
                    attributes[name] = value
                    if old is not _NOT_COPIED and not _same(value, old):
                        attributes[name] = _restored(value, old)

    def _classify(self, name: str, value: Any, changes: Changes) -> None:
        """Add the name of a changed attribute to the list for its kind."""
        if isinstance(value, _GENERATORS):
            changes.generators.append(name)
        elif any(t.is_floating_point() and t.shape in self._shapes for t in _tensors(value)):
            changes.averages.append(name)
        else:
            changes.others.append(name)


def _recomputed(model: nn.Module) -> Iterator[str]:
    """Yield the names of plain tensors that torch's own hooks recompute from parameters before every forward.

    `model.to(...)` does not convert such tensors, so the first forward changes them.
    """
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            # The name of the tensor that the hook sets, which is a plain attribute.
            key = None
            if isinstance(hook, WeightNorm | SpectralNorm):
                key = hook.name
            elif isinstance(hook, prune.BasePruningMethod):
                key = hook._tensor_name

            if key is not None:
                yield f"model.{path}.{key}" if path else f"model.{key}"


# ---- values ----


def _own_names(attributes: dict[str, Any]) -> set[str]:
    """Return the names of all attributes except those that torch sets on every module."""
    return set(attributes) - TORCH_ATTRIBUTES


def _copy_attributes(attributes: dict[str, Any], model: nn.Module, max_bytes: int) -> dict[str, tuple[Any, Any]]:
    """Return (value, copy) by name. Attributes above `max_bytes` are not copied."""
    copies = {}
    for name in _own_names(attributes):
        value = attributes[name]
        copies[name] = (value, _NOT_COPIED)

        # A task may keep its model as an attribute. The model is in the snapshot already.
        if value is not model and sum(t.nbytes for t in _tensors(value)) <= max_bytes:
            copies[name] = (value, _copied(value))

    return copies


def _plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the plain settings of a parameter group, without its parameters."""
    return {key: value for key, value in group.items() if isinstance(value, int | float | tuple)}


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: in a module, and in nested lists and dictionaries of moderate size."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (t for t in value.state_dict().values() if isinstance(t, Tensor))
    elif isinstance(value, dict | list | tuple) and len(value) <= MAX_ELEMENTS:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)


def _copied(value: Any) -> Any:
    """Return a copy to compare with and to restore from, or _NOT_COPIED for types that are not covered."""
    match value:
        case None | bool() | int() | float() | str():
            return value

        # The model's parameters have a place of their own in the snapshot. What else holds them (`nn.LSTM` does) may
        # hold others after a forward under FSDP, which frees the storage of the first.
        case nn.Parameter():
            return _NOT_COPIED

        case Tensor():
            return value.detach().clone()

        case nn.Module():
            return {name: t.detach().clone() for name, t in value.state_dict().items() if isinstance(t, Tensor)}
        # The state of a generator, not the generator.
        case torch.Generator():
            return value.get_state()
        case np.random.Generator():
            return value.bit_generator.state
        case np.random.RandomState():
            return value.get_state(legacy=False)
        case random.Random():
            return value.getstate()
        # Containers are copied as deep as they go. Large ones are taken for datasets.
        case dict() if len(value) <= MAX_ELEMENTS:
            return {key: _copied(inner) for key, inner in value.items()}
        case list() | tuple() if len(value) <= MAX_ELEMENTS:
            return [_copied(inner) for inner in value]
        case _:
            return _NOT_COPIED


def _same(value: Any, old: Any) -> bool:
    """Return whether a value still equals `old`, which `_copied` made of it."""
    if old is _NOT_COPIED:
        return True

    match value:
        case Tensor():
            equal = isinstance(old, Tensor) and value.shape == old.shape and value.dtype == old.dtype
            return equal and checksums([value]) == checksums([old])

        case nn.Module():
            state = value.state_dict()
            return isinstance(old, dict) and all(name in state and _same(state[name], t) for name, t in old.items())

        case torch.Generator() | np.random.Generator() | np.random.RandomState() | random.Random():
            return _same_generator(_copied(value), old)

        case dict():
            same_keys = isinstance(old, dict) and value.keys() == old.keys()
            return same_keys and all(_same(inner, old[key]) for key, inner in value.items())

        case list() | tuple():
            same_length = isinstance(old, list) and len(value) == len(old)
            return same_length and all(_same(a, b) for a, b in zip(value, old, strict=True))

        case None | bool() | int() | float() | str():
            # `value != value` is true for NaN only.
            return type(value) is type(old) and (value == old or value != value)

        case _:
            return False


def _same_generator(state: Any, old: Any) -> bool:
    """Compare states of generators. Those of Python and NumPy are nested tuples and dictionaries, with arrays."""
    if isinstance(state, Tensor):
        return isinstance(old, Tensor) and torch.equal(state, old)

    return repr(state) == repr(old)


def _restored(value: Any, old: Any) -> Any:
    """Return the value with its old content. Containers and tensors are changed in place: other code may hold them."""
    if old is _NOT_COPIED:
        return value

    match value:
        case Tensor() if value.shape == old.shape:
            value.copy_(old)

        case nn.Module():
            state = value.state_dict()
            for name, t in old.items():
                state[name].copy_(t)

        case torch.Generator():
            value.set_state(old)

        case np.random.Generator():
            value.bit_generator.state = old

        case np.random.RandomState():
            value.set_state(old)

        case random.Random():
            value.setstate(old)

        case dict():
            for key in value.keys() - old.keys():
                del value[key]

            for key, inner in old.items():
                value[key] = _restored(value.get(key), inner)

        case list():
            # Elements that are missing now come from the copy.
            longer = [*value, *old[len(value) :]]
            value[:] = [_restored(a, b) for a, b in zip(longer, old, strict=False)]

        case _:
            # A tuple cannot be changed in place, and an object that was not copied cannot be restored.
            keeps = old is _NOT_COPIED or isinstance(value, tuple)
            return value if keeps else old

    return value
