"""Models that Lockstep refuses: wrapped ones, unsupported parameters, and layers that do not suit the plan.

They are refused before any parameter is moved or wrapped, with the reason and what to do instead. Each of these models
would train, and give wrong results on several ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from lockstep.errors import UserError
from lockstep.parallel.batchnorm.sync import is_synchronised
from lockstep.plan.plan import Plan

# A model must not be wrapped in these; the values say what to type instead.
WRAPPERS: dict[type, str] = {
    DistributedDataParallel: "strategy=ddp",
    nn.DataParallel: "strategy=ddp",
    FullyShardedDataParallel: "strategy=fsdp",
    FSDPModule: "strategy=fsdp",
}


def check_not_wrapped(model: Any) -> None:
    """Check that the model is a plain nn.Module: wrappers would reduce gradients twice or rename parameters."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model() must return an nn.Module; it returned a {type(model).__name__}", "", "return the module itself"
        )

    # Optimizers and buckets need the sizes of all parameters before the first forward.
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise UserError(
            f"{lazy[0]!r} has no shape yet: a lazy module gets its shapes from its first input",
            f"{len(lazy)} parameters have no shape",
            "call the model once on a small input before you return it; or write nn.Linear(in_features, ...)",
        )

    for name, module in model.named_modules():
        settings = [setting for wrapper, setting in WRAPPERS.items() if isinstance(module, wrapper)]

        # torch.compile(model) puts the model into a module of a private class.
        if hasattr(module, "_orig_mod"):
            settings.append("compile=true")

        if settings:
            raise UserError(
                f"{repr(name) if name else 'the model'} is already wrapped in {type(module).__name__}",
                "Lockstep wraps and compiles a plain model itself",
                f"return the model inside it, and set {settings[0]}",
            )


def check_supported(model: nn.Module) -> None:
    """Refuse sparse gradients and complex parameters, with the name of the first one."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UserError(
                f"sparse gradients are not supported, and {name!r} has sparse=True",
                "",
                "remove sparse=True: its gradient is then dense",
            )

    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise UserError(
                f"complex trainable parameters are not supported, and {name!r} is complex",
                "",
                "store it as real numbers (torch.view_as_real)",
            )


def check_instance_norms(model: nn.Module) -> None:
    """Refuse InstanceNorm with running statistics on several ranks.

    Unlike BatchNorm it does not count its updates. Without the count, the statistics of the ranks cannot be combined
    into those of a single process.
    """
    for name, module in model.named_modules():
        if isinstance(module, _InstanceNorm) and module.running_mean is not None:
            raise UserError(
                f"{name!r} ({type(module).__name__}) has track_running_stats=True, which cannot be trained on "
                "several ranks",
                "each rank would have the statistics of its own micro-batches",
                "leave track_running_stats=True out: evaluation then uses the statistics of each sample, as training "
                "does",
            )


def check_equal_work(model: nn.Module, plan: Plan, tail: str) -> None:
    """Check that all ranks run the same number of micro-batches with SyncBatchNorm, whose statistics include padding.

    Only the end of a stream cannot be foreseen, and is padded.
    """
    if plan.data_size == 1 or not any(map(is_synchronised, model.modules())):
        return

    short = tail == "short" and (plan.samples or 0) % plan.global_batch > 0
    if plan.global_num_micro_batches % plan.data_size or short:
        short_step = ", and a short last step" if short else ""
        raise UserError(
            "SyncBatchNorm needs the same number of micro-batches on every rank: its statistics would include padding",
            f"{plan.global_num_micro_batches} on {plan.data_size} data-parallel ranks{short_step}",
            f"set tail=drop and a global_batch that is a multiple of {plan.data_size} x micro_batch; or use GroupNorm",
        )


def refuse_single_samples(model: nn.Module, plan: Plan, tail: str) -> None:
    """Refuse micro-batches of one sample if a BatchNorm would get one value per channel, which has no variance.

    A hook on the first forward sees how many values a sample has. So the error comes before the first update, and not
    at the end of an epoch, with the first micro-batch of one sample.
    """
    reason = _single_samples(plan, tail)
    if reason is None:
        return

    # The shape of a BatchNorm's input is known only when it is called: check it once, in the first forward.
    handles: dict[str, RemovableHandle] = {}
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or is_synchronised(module):
            continue

        def check_input(module: nn.Module, args: Any, name: str = name) -> None:
            if not module.training:
                # An evaluation may come first. It uses running statistics, so its batches may have one sample.
                return

            handles[name].remove()

            # Input (N, C) or (N, C, 1, ...): each of the N samples gives a channel one value.
            if args and args[0].numel() == args[0].shape[0] * args[0].shape[1]:
                raise UserError(
                    f"{name!r} is a {type(module).__name__} that gets one value of each sample and channel, and "
                    f"{reason}: one value has no variance",
                    f"global_batch={plan.global_batch}, micro_batch={plan.micro_batch}, {plan.samples} samples",
                    _without_single_samples(plan, tail),
                )

        handles[name] = module.register_forward_pre_hook(check_input)


def _step_sizes(plan: Plan, tail: str) -> list[int]:
    """Return the samples of a full step and, if the run reaches one, of the short last step of an epoch."""
    # The last step of an epoch is short only if the data does not divide evenly, and tail=drop would leave it out.
    short = (plan.samples or 0) % plan.global_batch if tail == "short" else 0
    reached = short and plan.steps >= (plan.steps_per_epoch or 0)

    return [plan.global_batch, short] if reached else [plan.global_batch]


def _single_samples(plan: Plan, tail: str) -> str | None:
    """Return text about the micro-batches that will have one sample, or None if there are none."""
    if plan.micro_batch == 1:
        return "every micro-batch has one sample"

    for when, size in zip(("every step", "every epoch"), _step_sizes(plan, tail), strict=False):
        if size % plan.micro_batch == 1:
            return f"the last micro-batch of {when} has one sample"

    return None


def _without_single_samples(plan: Plan, tail: str) -> str:
    """Return the setting to type so that no micro-batch has one sample."""
    sizes = _step_sizes(plan, tail)

    # A micro-batch is good if neither a full step nor the short one leaves a rest of one sample.
    max_micro_batch = plan.global_batch // plan.data_size
    possible = [micro for micro in range(2, max_micro_batch + 1) if all(size % micro != 1 for size in sizes)]

    # The best fix comes first.
    fixes = ["use GroupNorm, which needs no other sample"]
    if len(sizes) > 1 and plan.micro_batch > 1 and plan.global_batch % plan.micro_batch != 1:
        fixes.insert(0, "set tail=drop")

    if possible:
        closest = min(possible, key=lambda micro: abs(micro - plan.micro_batch))
        fixes.insert(0, f"set micro_batch={closest}")

    return "; or ".join(fixes)
