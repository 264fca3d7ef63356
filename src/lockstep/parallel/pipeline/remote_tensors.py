"""Detect the use of parameters and buffers that only other stages of a pipeline hold, as in a penalty on all weights.

On this rank such a tensor is a placeholder: a single NaN, expanded to the tensor's shape. Everything computed with it
is NaN. Its use is detected in one of two ways: the placeholder gets a gradient; or the loss or a metric is NaN, and a
second call of the loss reads the placeholder. If only one rank raised an error, the others would wait for it. So the
ranks exchange what they found after the last micro-batch, before the optimizer's step, and all raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.errors import UserError
from lockstep.parallel.pipeline.stages import named_tensors
from lockstep.task import Loss

FIRST_PASSES = 3  # the passes that are checked for NaN on a GPU, where the host must wait for the value


class RemoteTensors:
    """The tensors for which this rank has placeholders.

    A stage holds its own layers only. A loss may still read a weight of another stage, for a penalty for example: its
    placeholder has no values, so that must be an error, not a wrong number.
    """

    def __init__(self, model: nn.Module, stages: Mapping[str, Sequence[int]], materialized: Collection[str]):
        """Find the placeholders.

        stages: by name, the stages that use a tensor, for tensors that not all stages use; the same on all ranks
        materialized: the names of the tensors that have memory on this rank
        """
        self.stages = stages
        self._passes = 0

        # Under all names of a tied tensor, so that the error has the name that the user's code uses.
        self._tensors = {
            name: tensor for name, tensor in named_tensors(model) if name in stages and name not in materialized
        }
        self._read: set[str] = set()

    def begin_pass(self) -> None:
        self._passes += 1

    def were_read(self, loss: Loss, output: Any, compute_loss: Callable[[Any], Any]) -> bool:
        """Return whether the loss read a placeholder, in this micro-batch or in an earlier one.

        `compute_loss` computes the loss from the model's `output`.
        """
        if self._read or not self._tensors or (loss.total.is_cuda and self._passes > FIRST_PASSES):
            return bool(self._read)

        # A NaN may have other causes. A second call of the loss shows which tensors it reads.
        tensors = [leaf for leaf in tree_leaves((loss.total, loss.metrics)) if isinstance(leaf, Tensor)]
        if any(bool(tensor.isnan().any()) for tensor in tensors):  # on a GPU the host waits here
            # The output itself may be needed by the backward, and a loss may change it in place.
            copy = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), output)
            with torch.no_grad(), _ReadRecorder(self._tensors) as recorder:
                compute_loss(copy)

            self._read = recorder.read

        return bool(self._read)

    def used(self) -> list[bool]:
        """Return, for each tensor in `stages`, whether its placeholder on this rank was used."""
        # A backward through a placeholder leaves a gradient on it.
        used = {name for name, tensor in self._tensors.items() if tensor.grad is not None} | self._read
        return [name in used for name in self.stages]

    def check(self, anywhere: Sequence[bool]) -> None:
        """Raise an error if a placeholder was used on any rank. `anywhere` is `used()` combined over all ranks."""
        names = [name for name, used in zip(self.stages, anywhere, strict=True) if used]
        if names:
            # One name is enough to find the line of code.
            stages = " and ".join(map(str, self.stages[names[0]]))
            more = f" (and {len(names) - 1} more)" if names[1:] else ""
            raise UserError(
                f"{names[0]!r} is used in a stage of the pipeline that does not hold it{more}",
                f"only stage {stages} holds it",
                "for a penalty on weights use the optimizer's weight_decay; compute anything else that needs the "
                "parameter in the model's forward, for every sample; or train without a pipeline (mesh.pp): set "
                "strategy=ddp, or strategy=zero1",
            )


class _ReadRecorder(TorchDispatchMode):
    """Records which of the given tensors are read by an operation. Taking a view does not count."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self._names = {_storage_address(tensor): name for name, tensor in tensors.items() if _storage_address(tensor)}
        self.read: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))

        # A view of a placeholder shares its memory. The result of a computation does not.
        is_view = isinstance(result, Tensor) and _storage_address(result) in self._names
        if not is_view:
            addresses = {_storage_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            self.read |= {name for address, name in self._names.items() if address in addresses}

        return result


def _storage_address(tensor: Tensor) -> int:
    """Return the address of the tensor's storage, or 0 if it cannot be a placeholder."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if plain else 0
