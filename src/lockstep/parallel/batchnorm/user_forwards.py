"""Forwards of BatchNorm layers in the user's code, between two steps, while each rank has statistics of its own.

In eval mode such a forward gives other results on every rank. In train mode it changes statistics of this rank only.
Combining them right there would hang if only rank 0 evaluates, so the forward is noticed and the user is warned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.parallel.calls.chain import Call, CallChain, Link
from lockstep.runtime.context import EventLogger


class UserForwards(Link):
    """Notices forwards of some layers from `watch` to `end`. Between these two calls the layers have hooks.

    Compiled code that was traced before does not call them, so the call of a compiled model has a link as well.
    """

    inner: Call

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], rank: int, log_event: EventLogger):
        self._model = model
        self._rank = rank
        self._log_event = log_event

        # The indices of layers that ran in train mode since the statistics were combined.
        self.trained = set[int]()

        self._index = {id(layer): index for index, layer in enumerate(layers)}
        self._hook = LayerHook(self._note)
        self._key = RemovableHandle(OrderedDict()).id  # of our hook among those of a layer, as torch numbers them
        self._watched: list[nn.Module] = []
        self._warned = False

    def watch(self, layers: Sequence[nn.Module]) -> None:
        """Notice forwards of these layers, and of copies that are made of them from now on."""
        self.end()
        if self._warned or not layers:
            return

        # Not by `register_forward_pre_hook`, which takes some 80 times as long: this happens between any two steps.
        self._watched = [*layers]
        for layer in layers:
            layer._forward_pre_hooks[self._key] = self._hook

        if self._model._compiled_call_impl is not None:
            CallChain.of(self._model).install("watch", self)

    def end(self) -> None:
        """Let the layers run as they are again. A copy of a layer, whose statistics stay those of one rank, is left."""
        if not self._watched:
            return

        for layer in self._watched:
            layer._forward_pre_hooks.pop(self._key, None)

        self._watched = []
        CallChain.of(self._model).remove("watch")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The link of a compiled model. Which of the layers run is not known here. torch must not trace the hooks.
        watched = self._watched
        inner = self.inner
        self.end()
        for layer in watched:
            self._note(layer)

        output = inner(*args, **kwargs)
        self.watch(watched)
        return output

    def _note(self, layer: nn.Module) -> None:
        index = self._index.get(id(layer))
        if layer.training:
            # A copy has statistics of its own.
            if index is not None:
                self.trained.add(index)
        elif not self._warned:
            self._warned = True
            self._log_event(
                "warning",
                reason=f"the model was called in eval mode between two steps, with running statistics of BatchNorm "
                f"that are those of rank {self._rank} alone, so the result depends on the number of ranks; call "
                "run.sync_buffers() on every rank before the model is called or copied, or evaluate with "
                "eval_data() or run.evaluate",
            )


class LayerHook:
    """A forward hook of a BatchNorm. A copied layer shares it; in a layer that is pickled it does nothing."""

    def __init__(self, note: Callable[[nn.Module], None] | None = None):
        self._note = note

    def __call__(self, layer: nn.Module, args: Any) -> None:
        if self._note and not torch.compiler.is_compiling():
            self._note(layer)

    def __deepcopy__(self, memo: Any) -> LayerHook:
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # `{}.get(layer, args)` returns the arguments as they are: loading a pickled model needs no Lockstep.
        return getattr, ({}, "get")
