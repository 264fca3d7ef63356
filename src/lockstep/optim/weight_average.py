"""The exponential moving average (EMA) of the weights: `ema.decay`.

The average of an element depends on that element alone, and each operation below is rounded by itself. So the bits are
the same however the parameters are sharded, and on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.runtime.shards import to_local


class WeightAverage:
    """Averages of the trainable parameters. Each is sharded like its parameter, and at least float32.

    It keeps one more tensor for each parameter, on the device of the parameter. `update` adds no collective: every rank
    averages what it holds. Checkpoints hold it as a `PerParameter`.
    """

    copy_later = True  # `Update` waits for the copy of a save before each step, and so before this update

    def __init__(self, model: nn.Module, decay: float, held_elsewhere: Collection[str] = ()):
        """Begin with the current weights. In a pipeline, other ranks hold and average `held_elsewhere`."""
        self.decay = decay
        self.parameters: dict[str, nn.Parameter] = {
            name: p for name, p in model.named_parameters() if p.requires_grad and name not in held_elsewhere
        }

        # At least float32: small changes are lost in 16 bits.
        self.parameter_tensors: Mapping[str, Tensor] = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def update(self, not_applied: bool | Tensor = False) -> None:
        """Move every average towards its parameter, unless the step was not applied. Call it once per step.

        On a GPU the host may not know yet: `not_applied` is then a tensor () on the device, and the host does not wait.
        """
        if not_applied is True:
            return

        # By dtype, because a factor on the device must have the dtype of the tensors that it multiplies.
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for average, p in zip(self.parameter_tensors.values(), self.parameters.values(), strict=True):
            averages, weights = by_dtype.setdefault(average.dtype, ([], []))
            averages.append(to_local(average))
            weights.append(to_local(p).to(average.dtype))

        # Not `lerp`: it may use a fused multiply-add for some elements and not for others, depending on their place.
        for dtype, (averages, weights) in by_dtype.items():
            kept, added = self._factors(not_applied, dtype)
            torch._foreach_mul_(averages, kept)
            torch._foreach_add_(averages, torch._foreach_mul(weights, added))

    def _factors(self, not_applied: bool | Tensor, dtype: torch.dtype) -> tuple[Any, Any]:
        """Return the factors of the averages and of the weights: 1 and 0 if the device has not applied the step."""
        if not isinstance(not_applied, Tensor):
            return self.decay, 1 - self.decay

        # Rounded to `dtype` as a number of Python is in the multiplication, so that the bits are the same.
        kept, added = (not_applied.new_full((), factor, dtype=dtype) for factor in (self.decay, 1 - self.decay))

        # Not `torch.where`, which copies a number to the device: the host would wait.
        return kept.masked_fill_(not_applied, 1.0), added.masked_fill_(not_applied, 0.0)

    @torch.no_grad()
    def restart(self, names: Collection[str]) -> None:
        """Let these averages begin with the current weights."""
        for name in names:
            to_local(self.parameter_tensors[name]).copy_(to_local(self.parameters[name]))

    def state_dict(self) -> dict[str, Any]:
        return {}  # the tensors are all of its state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the tensors are restored in place."""

    @contextmanager
    def swapped_in(self, before_change: Callable[[], None]) -> Iterator[None]:
        """Give the model the averages for a while. `before_change` drops full parameters gathered from shards."""
        weights = [to_local(p).detach().clone() for p in self.parameters.values()]
        before_change()
        self._set(to_local(average) for average in self.parameter_tensors.values())
        try:
            yield
        finally:
            before_change()
            self._set(iter(weights))

    @torch.no_grad()
    def _set(self, values: Iterator[Tensor]) -> None:
        for p, value in zip(self.parameters.values(), values, strict=True):
            to_local(p).copy_(value)
