"""SyncBatchNorm on a CPU, where torch has none: the statistics are those of the micro-batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class HostSyncBatchNorm(_BatchNorm):
    """What torch's SyncBatchNorm is on a GPU. In eval mode it needs no other rank.

    It is no subclass of torch's, which DistributedDataParallel refuses on a CPU.
    """

    # Compiled code would have to be cut at the collectives anyway.
    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)

        self._check_input_dim(input)
        output, mean, squares, count = _Normalise.apply(input, self.weight, self.bias, self.eps)
        if self.track_running_stats:
            self._remember(mean, squares / (count - 1))
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics, with the unbiased variance, as torch does."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        # momentum=None is the mean over all updates.
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


def is_synchronised(module: nn.Module) -> bool:
    """Whether it is a BatchNorm whose forward waits for the other ranks, since they share its statistics."""
    return isinstance(module, nn.SyncBatchNorm | HostSyncBatchNorm)


class _Normalise(torch.autograd.Function):
    """Normalise (B, C, *) over all dimensions but C, and over all ranks: one gather forward, one sum backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, bias: Any, eps: float) -> Any:
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        others = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)

        # Each rank's mean and sum of squares around it: sums of plain squares would lose the small differences.
        count = input.numel() // input.shape[1]
        own_mean = values.mean(others) if count else values.new_zeros(input.shape[1])
        own_squares = (values - own_mean.view(shape)).square().sum(others)
        own = torch.cat([own_mean, own_squares, own_mean.new_full((1,), count)])
        gathered = own.new_empty(dist.get_world_size(), len(own))
        dist.all_gather(list(gathered.unbind()), own)

        means, squares, counts = gathered.split([len(own_mean), len(own_mean), 1], dim=1)  # (ranks, C), (ranks, 1)
        total = counts.sum()
        _check_several(int(total))
        mean = (means * counts).sum(0) / total
        squares = squares.sum(0) + (counts * (means - mean).square()).sum(0)
        scale = (squares / total + eps).rsqrt()

        normalised = (values - mean.view(shape)) * scale.view(shape)
        output = normalised if weight is None else normalised * weight.to(values.dtype).view(shape)
        output = output if bias is None else output + bias.to(values.dtype).view(shape)
        ctx.save_for_backward(normalised, scale, weight, total)
        ctx.others, ctx.shape, ctx.dtype = others, shape, input.dtype
        ctx.mark_non_differentiable(mean, squares, total)
        return output.to(input.dtype), mean, squares, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:  # pyrefly: ignore[bad-override]
        normalised, scale, weight, total = ctx.saved_tensors
        grad = grad.to(normalised.dtype)
        grad_bias = grad.sum(ctx.others)
        grad_weight = (grad * normalised).sum(ctx.others)

        # Of the parameters each rank has its own gradient, which is reduced with all others; of the input, all ranks'
        # losses have one, since they share the statistics.
        sums = torch.stack([grad_bias, grad_weight])
        dist.all_reduce(sums)
        means = [row.view(ctx.shape) for row in (sums / total).unbind()]
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        grad_input = (grad - means[0] - normalised * means[1]) * factor.view(ctx.shape)

        if weight is None:
            return grad_input.to(ctx.dtype), None, None, None
        grads = grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)
        return grad_input.to(ctx.dtype), *grads, None


def _check_several(values: int) -> None:
    """As torch does, refuse to take the variance of one value."""
    if values < 2:
        raise ValueError("Expected more than 1 value per channel when training, over all ranks together")
