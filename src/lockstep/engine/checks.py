"""Checks at the start of a run and while it runs, which turn silent mistakes into errors.

A check that compares ranks is collective and raises the same error on every rank.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from lockstep.config import RunConfig, flatten
from lockstep.data.streams import StreamSource
from lockstep.errors import UserError, plural
from lockstep.optim.optimizers import Optimizers
from lockstep.parallel.batchnorm.sync import is_synchronised
from lockstep.parallel.driver import RankRole
from lockstep.parallel.hooks.parameter_hooks import hook_ids
from lockstep.plan.plan import Plan
from lockstep.runtime.context import Runtime
from lockstep.runtime.layout import local
from lockstep.task import BatchSource

# A model must not be wrapped in these; the values say what to type instead.
WRAPPERS: dict[type, str] = {
    DistributedDataParallel: "strategy=ddp",
    nn.DataParallel: "strategy=ddp",
    FullyShardedDataParallel: "strategy=fsdp",
    FSDPModule: "strategy=fsdp",
}

# torch's functions that change several tensors in place, by name.
FOREACH_IN_PLACE = {
    name: getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")
}

# Checksums reinterpret elements as integers of the same width. The keys are element sizes in bytes.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ---- the configuration ----


def check_same_config(config: RunConfig, runtime: Runtime) -> None:
    """Check that all ranks have the same settings. Otherwise they would train different models, or deadlock."""
    # The default run_dir contains a time, which differs between ranks. Rank 0 chooses it for all of them.
    values = {key: repr(value) for key, value in flatten(config).items() if key != "run_dir"}
    sources = {} if runtime.world.alone else digests_of_sources()
    everyone = runtime.collectives.gather_json({"config": values, "sources": sources})
    _check_same_sources([local["sources"] for local in everyone])
    first, *others = [local["config"] for local in everyone]
    for rank, theirs in enumerate(others, start=1):
        different = sorted(key for key in first.keys() | theirs.keys() if first.get(key) != theirs.get(key))
        if different:
            key = different[0]
            raise UserError(
                "the ranks have different configurations: "
                f"{key} is {first.get(key)} on rank 0 and {theirs.get(key)} on rank {rank}",
                f"{len(different)} keys differ" if len(different) > 1 else "",
                "pass every rank the same file and the same key=value arguments",
            )


def digests_of_sources() -> dict[str, str]:
    """Return a digest of the file of each imported module that is neither Python's nor installed: the user's own."""
    prefix = str(Path(__file__).parents[1])
    installed = tuple(f"{folder}{os.sep}" for folder in {*sysconfig.get_paths().values(), prefix})
    digests = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not os.path.abspath(file).startswith(installed):
            with suppress(OSError):  # a file that was removed after the import
                digests[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]

    return digests


def _check_same_sources(everyone: list[dict[str, str]]) -> None:
    """Check that the ranks have imported the same sources: machines with copies of their own may have an old one."""
    for rank, theirs in enumerate(everyone[1:], start=1):
        # A rank may have imported more than another: only what both have is compared.
        common = sorted(everyone[0].keys() & theirs.keys())
        if different := [name for name in common if everyone[0][name] != theirs[name]]:
            raise UserError(
                f"the ranks run different code: the file of module {different[0]} is not the same on rank 0 and rank "
                f"{rank}",
                f"{len(different)} modules differ: {', '.join(different[:8])}" if len(different) > 1 else "",
                "copy the same files to every machine",
            )


def check_evaluations(needed: bool, every: int | None, evaluates: bool) -> None:
    """If the learning rate depends on evaluations, check that there are some: otherwise it would never change."""
    if needed and not every:
        raise UserError(
            "ReduceLROnPlateau follows the loss of evaluations, and there is no evaluation before the end",
            "" if evaluates else "eval_data() returns None",
            "set evaluate.every=100" + ("" if evaluates else ", and return a dataset from eval_data()"),
        )


def check_best(config: RunConfig, evaluates: bool) -> None:
    """If checkpoint.best is set, check that there are evaluations: otherwise there would never be a best checkpoint."""
    if config.checkpoint.best and not (evaluates and config.evaluate.every):
        raise UserError(
            f"checkpoint.best={config.checkpoint.best} compares evaluations, and there is no evaluation during the run",
            "" if evaluates else "eval_data() returns None",
            "set evaluate.every=100" + ("" if evaluates else ", and return a dataset from eval_data()"),
        )


def check_sample_log(config: RunConfig, source: BatchSource) -> None:
    """If log.samples is set, check that the samples have ids."""
    if config.log.samples and isinstance(source, StreamSource):
        raise UserError(
            "log.samples=true needs sample ids, and the samples of a stream have none",
            "",
            "return a dataset with __getitem__ and __len__ from data(), or leave log.samples out",
        )


def check_before_batch(config: RunConfig, role: RankRole, alone: bool) -> None:
    """Check that each rank gets the same positions of every global batch, because before_batch() may depend on them."""
    if not role.runs_whole_model:
        raise UserError(
            "the task has before_batch(), which cannot be used in a pipeline (mesh.pp)",
            "all micro-batches of a step are in flight together, so none directly precedes its loss",
            "set strategy=ddp, without mesh.pp",
        )

    if config.load_balance == "auto" and not alone:
        raise UserError(
            "the task has before_batch(), which cannot be used with load_balance=auto",
            "micro-batches move to other ranks once the speeds are measured, but the state that the task keeps for "
            "them does not",
            "leave load_balance out, or give one number for each rank, such as [1, 2]",
        )


def check_steps_left(steps: int, done: int) -> None:
    """Check that a resumed run has not passed `steps` already: its last records would be overwritten."""
    if done > steps:
        raise UserError(
            f"steps={steps} leaves nothing to train: the checkpoint is from step {done}",
            "",
            f"set steps={2 * done}, with the run's other settings (they do not come from the checkpoint)",
        )


# ---- the model ----


def check_not_wrapped(model: Any) -> None:
    """Check that the model is a plain nn.Module: wrappers would reduce gradients twice or rename parameters."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model() must return an nn.Module; it returned a {type(model).__name__}", "", "return the module itself"
        )

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
    """Check that all ranks run the same number of micro-batches with SyncBatchNorm, whose forward is collective."""
    if plan.data_size == 1 or not any(map(is_synchronised, model.modules())):
        return

    short = tail == "short" and (plan.samples or 0) % plan.global_batch > 0
    if plan.micro_batches % plan.data_size or short:
        raise UserError(
            "SyncBatchNorm needs the same number of micro-batches on every rank: its forward waits for all ranks",
            f"{plan.micro_batches} on {plan.data_size} data-parallel ranks{', and a short last step' if short else ''}",
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

    handles: dict[str, RemovableHandle] = {}
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or is_synchronised(module):
            continue

        def check_input(module: nn.Module, args: Any, name: str = name) -> None:
            if not module.training:
                return
            handles[name].remove()
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
    """Return what to type so that no micro-batch has one sample."""
    sizes = _step_sizes(plan, tail)
    max_micro_batch = plan.global_batch // plan.data_size
    possible = [micro for micro in range(2, max_micro_batch + 1) if all(size % micro != 1 for size in sizes)]
    fixes = ["use GroupNorm, which needs no other sample"]
    if len(sizes) > 1 and plan.micro_batch > 1 and plan.global_batch % plan.micro_batch != 1:
        fixes.insert(0, "set tail=drop")

    if possible:
        closest = min(possible, key=lambda micro: abs(micro - plan.micro_batch))
        fixes.insert(0, f"set micro_batch={closest}")

    return "; or ".join(fixes)


def check_enough_micro_batches(plan: Plan) -> None:
    """Check that a pipeline has at least two micro-batches per step: with one, all stages but one would be idle."""
    if plan.micro_batches // plan.data_size >= 2:
        return

    # Two micro-batches for each pipeline, if the batch has that many samples.
    smaller = plan.global_batch // (2 * plan.data_size)
    fix = f"set micro_batch={smaller} or less" if smaller else "set a larger batch"
    raise UserError(
        f"a step has {plural(plan.micro_batches, 'micro-batch', 'micro-batches')} of {plan.micro_batch} samples "
        f"for {plural(plan.data_size, 'pipeline')}; each (mesh.pp) needs at least two",
        "",
        f"{fix}: at least one for each stage is best",
    )


class LateHooks:
    """Detects hooks that are set on parameters after the model was wrapped: sharded parameters never call them."""

    def __init__(self, model: nn.Module, parameters_before: Mapping[str, nn.Parameter]):
        """`parameters_before` are the parameters from before the model was wrapped."""
        self._parameters = dict(model.named_parameters())
        self._known = {name: hook_ids(p) for name, p in self._parameters.items()}  # hooks that Lockstep carried over
        self._replaced = {
            name: weakref.ref(p) for name, p in parameters_before.items() if self._parameters.get(name) is not p
        }

    def check(self) -> None:
        """Raise if there is a late hook. Not called in every step, because there may be thousands of parameters."""
        late = [name for name, p in self._parameters.items() if hook_ids(p) - self._known[name]]
        for name, original in self._replaced.items():
            p = original()  # None if the original parameter was freed
            if p is not None and hook_ids(p):
                late.append(name)

        if late:
            raise UserError(
                f"a hook was set on {late[0]!r} after the model was wrapped",
                "the hooks of parameters are carried over when Lockstep gets the model, and a later one might never be "
                "called",
                "set it in model(), or before run.setup(...)",
                cause="hook",
            )


class TrainableGuard:
    """Detects parameters that are frozen, unfrozen or replaced during the run.

    The set of trainable parameters is fixed when the model is wrapped: the gradients of a layer that is unfrozen later
    would never be all-reduced.
    """

    def __init__(self, model: nn.Module, late_hooks: LateHooks):
        self.model = model
        self.named = dict(model.named_parameters())
        self.trainable = [p.requires_grad for p in self.named.values()]
        self.late_hooks = late_hooks

    def check(self) -> None:
        """Raise if a parameter was frozen or unfrozen. Called in every step."""
        if [p.requires_grad for p in self.named.values()] == self.trainable:
            return

        # Search for the changed parameter only now: every step pays just for the comparison above.
        for (name, p), before in zip(self.named.items(), self.trainable, strict=True):
            if p.requires_grad != before:
                raise _trainable_changed(f"{name!r} was {'frozen' if before else 'unfrozen'}")

    def check_structure(self) -> None:
        """Raise if a parameter was added, removed or replaced. This is slower, so it is not called in every step."""
        now = dict(self.model.named_parameters())
        for name, p in self.named.items():
            if now.pop(name, None) is not p:
                raise _trainable_changed(f"parameter {name!r} was replaced or removed")

        if now:
            raise _trainable_changed(f"parameter {next(iter(now))!r} was added")

        self.late_hooks.check()


def _trainable_changed(change: str) -> UserError:
    return UserError(
        f"{change} after the model was wrapped",
        "the trainable parameters must stay the same during the run",
        "freeze, unfreeze and replace parameters in model(), before Lockstep gets it; to change them later, "
        "start a second run from the saved weights. Two models in turn need no freezing: step.apply(optimizer) drops "
        "the gradients of the other",
        cause="changed-structure",
    )


class GradientGuard:
    """Detects in a custom loop that gradients were dropped or changed between two calls of the step.

    It watches up to three parameters of each optimizer and raises only if all of them changed, as zero_grad() and
    clip_grad_norm_() do: setting the gradient of one parameter to None may be intended. torch counts changes in place,
    but not those of torch._foreach_* functions on shards, which all clipping uses. These are intercepted, between
    `note` and `check` only: a fingerprint of the shards would make the host wait for the device.
    """

    def __init__(self, optimizers: Optimizers):
        self._watched: list[list[Tensor]] = []  # for each optimizer
        for groups in optimizers.groups:
            parameters = [p for group in groups for p in group if p.requires_grad]
            if parameters:
                some = (parameters[0], parameters[len(parameters) // 2], parameters[-1])
                self._watched.append(list({id(p): p for p in some}.values()))

        # For each optimizer: parameter, gradient, and the gradient's version counters.
        self._noted: list[list[tuple[Tensor, Tensor, tuple[int, int]]]] = []
        has_shards = any(isinstance(p, DTensor) for parameters in self._watched for p in parameters)
        self._detectors = {name: self._detecting(name) for name in FOREACH_IN_PLACE} if has_shards else {}
        self._changed: set[int] = set()  # ids of the tensors that these functions changed

        # Dynamo remembers torch's functions for the life of the process, when it first traces: that must not be ours.
        tracing_rules = sys.modules.get("torch._dynamo.trace_rules")
        if self._detectors and tracing_rules is not None:
            tracing_rules.get_torch_obj_rule_map()

    def _detecting(self, name: str) -> Callable[..., Any]:
        function = FOREACH_IN_PLACE[name]

        def detect(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._changed.update(map(id, tensors))
            return function(tensors, *args, **kwargs)

        return detect

    def note(self) -> None:
        """Record the current gradients as the expected ones."""
        self._changed.clear()
        self._noted = [
            [(p, p.grad, _versions(p.grad)) for p in watched if p.grad is not None] for watched in self._watched
        ]
        for name, detect in self._detectors.items():
            setattr(torch, name, detect)

    def release(self) -> None:
        """Give torch its functions back."""
        for name, detect in self._detectors.items():
            # Another loop may have started before this one was closed.
            if getattr(torch, name) is detect:
                setattr(torch, name, FOREACH_IN_PLACE[name])

    def check(self, call: str) -> None:
        """Raise if all watched gradients of an optimizer have changed since `note`."""
        self.release()
        for noted in self._noted:
            if noted and all(
                p.grad is not grad or _versions(grad) != versions or id(grad) in self._changed
                for p, grad, versions in noted
            ):
                raise UserError(
                    f"the gradients of this step were dropped or changed before {call}",
                    "they are sums over the batches so far, not yet divided: zero_grad() loses the earlier batches, "
                    "and clip_grad_norm_() compares its limit with a sum",
                    "remove zero_grad() and clip_grad_norm_(): step.apply() does both, with clip.norm=1; other changes "
                    "of gradients belong in weight.register_hook(...) before run.setup if they are linear, or in the "
                    "step() of a custom optimizer",
                )


def _versions(gradient: Tensor) -> tuple[int, int]:
    """Return how often torch saw a gradient change in place, and its shard: one change counts in one of them only."""
    return gradient._version, local(gradient)._version


def check_replicas(model: nn.Module, runtime: Runtime, only_frozen: bool = False) -> None:
    """Check that all ranks hold the same bits, with a checksum per parameter. Collective."""
    # Parameters on the meta device have no data yet.
    named = {name: p for name, p in model.named_parameters() if not (p.is_meta or (only_frozen and p.requires_grad))}
    if runtime.world.alone or not named:
        return

    first, *others = runtime.collectives.gather_json(checksums(named.values()))
    for rank, other in enumerate(others, start=1):
        for name, expected, actual in zip(named, first, other, strict=True):
            if expected != actual:
                raise UserError(
                    f"{name!r} differs between rank 0 and rank {rank}",
                    "every rank must hold the same weights",
                    "load or initialise frozen parts equally on all ranks; look for code that changes parameters on "
                    "one rank only (`if rank == 0`)",
                    cause="not-synchronised",
                )


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return for each tensor, or this rank's shard of it, the sum of its elements read as integers.

    Unlike a norm, this sum changes with any single bit.
    """
    sums = [
        local(t.detach())
        .contiguous()
        .reshape(-1)
        .view(INTEGERS.get(t.element_size(), torch.uint8))
        .sum(dtype=torch.int64)
        for t in tensors
    ]

    # Read all sums at once, so that the host waits once. A model on several devices cannot do that.
    if len({total.device for total in sums}) == 1:
        return torch.stack(sums).tolist()
    return [int(total) for total in sums]
