"""Progressive sizes: small images or short sequences first, larger ones later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from lockstep.errors import UserError
from lockstep.task import MicroBatch, RunView


class ProgressiveSizes:
    """Resizes each micro-batch by the step: `ProgressiveSizes({0: 128, 5000: 224}, resize_images)`.

    Keys are steps, from 0, and values the size from that step on. `resize(batch, size)` returns the batch for a
    forward; it runs where the batch is, so on a GPU if there is one. The size is a function of the step, so it needs no
    state, and it is right for batches that workers have read ahead. Evaluations see full batches.
    """

    follows_places = False  # the size is the same for all samples of a step

    def __init__(self, sizes: Mapping[int, int], resize: Callable[[Any, int], Any]):
        if 0 not in sizes:
            raise UserError(
                f"ProgressiveSizes({dict(sizes)}) has no size for step 0", "", "give a size for 0: {0: 128, 5000: 224}"
            )

        for step in sizes:
            if not isinstance(step, int) or step < 0:
                raise UserError(
                    f"ProgressiveSizes({dict(sizes)}): {step!r} is no step",
                    "",
                    "give whole numbers: {0: 128, 5000: 224}",
                )

        self.sizes = dict(sorted(sizes.items()))
        self.resize = resize

    def size_at(self, step: int) -> int:
        return [size for first, size in self.sizes.items() if first <= step][-1]

    def before_batch(self, run: RunView, micro: MicroBatch) -> None:
        micro.data = self.resize(micro.data, self.size_at(run.steps_done))


def resize_images(batch: Any, size: int) -> Any:
    """Return the batch with all images (N, C, H, W) resized to (N, C, size, size)."""

    def resized(leaf: Any) -> Any:
        is_image = isinstance(leaf, Tensor) and leaf.dim() == 4 and leaf.is_floating_point()
        if not is_image or leaf.shape[-2:] == (size, size):
            return leaf
        return F.interpolate(leaf, (size, size), mode="bilinear", antialias=True)

    return tree_map(resized, batch)


def crop_sequences(batch: Any, size: int) -> Any:
    """Return the batch with all sequences (N, length, ...) cut off after `size` positions."""
    return tree_map(lambda leaf: leaf[:, :size] if isinstance(leaf, Tensor) and leaf.dim() >= 2 else leaf, batch)
