"""Exercise 4: mixed precision. docs/lab/04_mixed_precision.md explains it.

Fill in LossScaler, and fix train_step, which has four mistakes. Then type

lockstep lab check 4 lab/exercises/04_mixed_precision.py

`python lab/solution/04_mixed_precision.py` shows what a finished exercise does.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

LossOf = Callable[[nn.Module, Tensor], Tensor]  # loss_of(model, batch)


class LossScaler:
    """Multiplies the loss, so that its gradients are large enough for fp16, and finds the factor by itself."""

    def __init__(self, scale: float = 65536.0, *, interval: int = 2000):
        self.scale, self.interval = scale, interval
        self.good_steps = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divide the gradients by the scale, and return whether all of them are finite."""
        raise NotImplementedError("TODO 1: divide every gradient by self.scale; torch.isfinite tells inf and nan")

    def update(self, finite: bool) -> None:
        """Halve the scale after an overflow; double it after `interval` good steps in a row."""
        raise NotImplementedError("TODO 2: change self.scale and self.good_steps")


def train_step(
    model: nn.Module,
    loss_of: LossOf,
    batch: Tensor,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    dtype: torch.dtype,
    max_norm: float = math.inf,
) -> bool:
    """Do one step in mixed precision; return False if it was skipped. The weights stay float32."""
    # TODO 3: there are four mistakes in these lines. The grader names what each of them does.
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    finite = scaler.unscale(model.parameters())
    optimizer.step()
    scaler.update(finite)
    return finite


if __name__ == "__main__":
    print(__doc__)
