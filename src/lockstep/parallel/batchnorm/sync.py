"""SyncBatchNorm for CPUs, which torch's does not support: it normalises over the micro-batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import UserError
from lockstep.runtime.context import Runtime


class HostSyncBatchNorm(_BatchNorm):
    """The CPU counterpart of torch's SyncBatchNorm. In eval mode its forward is not collective.

    It is not a subclass of SyncBatchNorm, because DistributedDataParallel refuses that class on a CPU.
    """

    # The collectives would break the compiled graph anyway.
    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` (B, C, *). Collective in train mode: every rank must call it."""
        if not self.training:
            return super().forward(input)

        self._check_input_dim(input)
        output, mean, squares, count = _Normalise.apply(input, self.weight, self.bias, self.eps)
        if self.track_running_stats:
            self._update_running_statistics(mean, squares / (count - 1))

        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running mean, and the running variance with the unbiased variance, as torch does."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None

        self.num_batches_tracked.add_(1)

        # momentum=None is the mean over all updates.
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


def is_synchronised(module: nn.Module) -> bool:
    """Whether `module` is a SyncBatchNorm, whose forward is collective in train mode."""
    return isinstance(module, nn.SyncBatchNorm | HostSyncBatchNorm)


class _Normalise(torch.autograd.Function):
    """Normalise (B, C, *) over all dimensions but C, and over all ranks.

    The forward runs one all-gather, the backward one all-reduce.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, bias: Any, eps: float) -> Any:
        """`input` is (B, C, *), `weight` and `bias` are (C,) or None. B may be 0 on some ranks.

        Returns the output, and for the running statistics: mean (C,), sum of squared deviations (C,), count ().
        """
        # At least float32. `shape` spreads (C,) to the dimensions of the input.
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        others = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)

        # Send each rank's mean, and the sum of squared deviations from it: E[x^2] - mean^2 would lose precision.
        count = input.numel() // input.shape[1]
        local_mean = values.mean(others) if count else values.new_zeros(input.shape[1])
        local_squares = (values - local_mean.view(shape)).square().sum(others)
        packed = torch.cat([local_mean, local_squares, local_mean.new_full((1,), count)])

        # One message per rank: (2 C + 1) numbers.
        gathered = packed.new_empty(dist.get_world_size(), len(packed))
        dist.all_gather(list(gathered.unbind()), packed)

        means, squares, counts = gathered.split([len(local_mean), len(local_mean), 1], dim=1)  # (ranks, C), (ranks, 1)
        total = counts.sum()
        _check_several(int(total))

        # Put together, they are exact for any split of the samples.
        mean = (means * counts).sum(0) / total
        squares = squares.sum(0) + (counts * (means - mean).square()).sum(0)
        scale = (squares / total + eps).rsqrt()

        normalised = (values - mean.view(shape)) * scale.view(shape)
        output = normalised if weight is None else normalised * weight.to(values.dtype).view(shape)
        output = output if bias is None else output + bias.to(values.dtype).view(shape)

        ctx.save_for_backward(normalised, scale, weight, total)
        ctx.others = others
        ctx.shape = shape
        ctx.dtype = input.dtype
        ctx.mark_non_differentiable(mean, squares, total)
        return output.to(input.dtype), mean, squares, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:  # pyrefly: ignore[bad-override]
        # This rank's sums, (C,) each.
        normalised, scale, weight, total = ctx.saved_tensors
        grad = grad.to(normalised.dtype)
        grad_bias = grad.sum(ctx.others)
        grad_weight = (grad * normalised).sum(ctx.others)

        # The gradients of weight and bias stay local: DDP reduces them later. The gradient of the input needs sums over
        # all ranks, since the losses of all ranks depend on it through the shared statistics.
        sums = torch.stack([grad_bias, grad_weight])
        dist.all_reduce(sums)
        means = [row.view(ctx.shape) for row in (sums / total).unbind()]

        # The derivative of (x - mean) * scale: what the mean and the scale contribute is subtracted.
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        grad_input = (grad - means[0] - normalised * means[1]) * factor.view(ctx.shape)

        if weight is None:
            return grad_input.to(ctx.dtype), None, None, None

        return grad_input.to(ctx.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None


def _check_several(values: int) -> None:
    """Refuse to compute the variance of a single value, as torch does."""
    if values < 2:
        raise ValueError("Expected more than 1 value per channel when training, over all ranks together")


# ---- layers of a model ----


def synchronise_batchnorm(model: nn.Module, runtime: Runtime) -> None:
    """Turn every BatchNorm into a SyncBatchNorm, in place: the modules, their parameters, hooks and names stay.

    A SyncBatchNorm normalises over the micro-batches of all ranks together, so a single process needs none.
    """
    if runtime.world.alone:
        return

    named = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if not named:
        raise UserError(
            f"ddp.sync_batchnorm=true, but {type(model).__name__} contains no BatchNorm",
            "",
            "leave ddp.sync_batchnorm out",
        )

    kind = nn.SyncBatchNorm if runtime.on_gpu else HostSyncBatchNorm
    for name, module in named:
        # SyncBatchNorm's forward would replace a forward that computes more, such as an activation.
        if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward, HostSyncBatchNorm.forward):
            raise UserError(
                f"ddp.sync_batchnorm=true cannot replace {name!r}: a {type(module).__name__} has its own forward",
                "SyncBatchNorm would replace that forward, with everything else that it computes",
                "use nn.BatchNorm and a separate module for the rest, or leave ddp.sync_batchnorm out",
            )

        module.__class__ = kind
        vars(module)["process_group"] = None  # all ranks


def adapt_sync_batchnorm(model: nn.Module, runtime: Runtime, pipelined: bool) -> None:
    """Make the model's own SyncBatchNorm layers work on a CPU, and refuse them in a pipeline, where they would hang."""
    if runtime.world.alone:
        return

    for name, module in model.named_modules():
        if not isinstance(module, nn.SyncBatchNorm):
            continue

        if pipelined:
            raise UserError(
                f"{name!r} is a SyncBatchNorm, which cannot be used in a pipeline (mesh.pp)",
                "its forward waits for all ranks, but the ranks of other stages never call it",
                "use nn.BatchNorm or GroupNorm; or set strategy=ddp",
            )

        if not runtime.on_gpu and module.process_group is None:
            module.__class__ = HostSyncBatchNorm  # pyrefly: ignore[bad-argument-type]
