"""What a rank of a pipeline has only the names of must not be used there: a penalty on all weights, in the loss, say.

Such a stand-in is one NaN in the shape of the tensor. What comes of it is NaN, and no optimizer may write into it. Two
things give its use away: it has a gradient; or the loss, or a metric, is NaN, and the loss reads it when it is called
once more. The ranks of other stages are waiting for this one then, so all of them are told after the last micro-batch,
before anything is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.errors import UserError
from lockstep.task import Loss

FIRST_STEPS = 3  # on a GPU the host must wait to see a NaN, so it looks in these only


class Absent:
    """The tensors that not all stages use. `stages`: which ones use each, by name, the same on all ranks."""

    def __init__(self, model: nn.Module, stages: Mapping[str, Sequence[int]], here: Callable[[str], bool]):
        """`here`: whether this rank has it."""
        self.stages, self.steps = stages, 0
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._tensors = {name: tensor for name, tensor in named if name in stages and not here(name)}
        self._read: set[str] = set()

    def read(self, loss: Loss, output: Any, again: Callable[[Any], Any]) -> bool:
        """Whether the loss has read any, in this micro-batch or in one before. `again` computes it once more, from a
        copy of what the model has returned."""
        if self._read or not self._tensors or (loss.total.is_cuda and self.steps > FIRST_STEPS):
            return bool(self._read)
        tensors = [leaf for leaf in tree_leaves((loss.total, loss.metrics)) if isinstance(leaf, Tensor)]
        if any(bool(tensor.isnan().any()) for tensor in tensors):  # on a GPU the host waits here
            copy = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), output)
            with torch.no_grad(), _Reads(self._tensors) as reads:
                again(copy)
            self._read = reads.found
        return bool(self._read)

    def used(self) -> list[bool]:
        """Of all tensors in `stages`, those that have been used here though they are elsewhere."""
        trained = {name for name, tensor in self._tensors.items() if tensor.grad is not None}
        return [name in trained or name in self._read for name in self.stages]

    def check(self, anywhere: Sequence[bool]) -> None:
        """`anywhere`: `used`, of all ranks together."""
        names = [name for name, used in zip(self.stages, anywhere, strict=True) if used]
        if not names:
            return
        stages = " and ".join(map(str, self.stages[names[0]]))
        more = f" (and {len(names) - 1} more like it)" if names[1:] else ""
        raise UserError(
            "a loss, and stages, that use no parameter of another stage: the model runs as a pipeline",
            f"{names[0]!r}, which only stage {stages} holds, used in another stage{more}",
            "for a penalty on weights write weight_decay in the optimizer; compute what else needs the parameter in "
            "the model's forward, for all samples alike; or train without a pipeline (mesh.pp): type strategy=ddp, or "
            "strategy=zero1",
        )


class _Reads(TorchDispatchMode):
    """Which tensors are computed with. A view of one is only a view."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self._places = {place: name for name, tensor in tensors.items() if (place := _place(tensor))}
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (isinstance(result, Tensor) and _place(result) in self._places):
            read = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            self.found |= {name for place, name in self._places.items() if place in read}
        return result


def _place(tensor: Tensor) -> int:
    """In memory. 0: of a kind that no stand-in is of."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if plain else 0
