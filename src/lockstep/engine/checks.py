"""What is checked at the start of a run and while it runs, so that silent mistakes stop loudly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lockstep.checkpoint.state_tree import digest
from lockstep.config import RunConfig, flatten
from lockstep.data.sources import MapSource, StreamSource
from lockstep.errors import UserError
from lockstep.plan.plan import Plan
from lockstep.runtime.context import Runtime
from lockstep.task import BatchSource, Loss, StepBatches

WRAPPERS: dict[type, str] = {  # and what to type instead
    DistributedDataParallel: "strategy=ddp",
    nn.DataParallel: "strategy=ddp",
    FullyShardedDataParallel: "strategy=fsdp",
    FSDPModule: "strategy=fsdp",
}


def check_same_config(config: RunConfig, runtime: Runtime) -> None:
    """Ranks with different settings train different models, or wait for each other for ever."""
    mine = {key: repr(value) for key, value in flatten(config).items() if key != "run_dir"}
    everybody = runtime.collectives.gather_json(mine)
    for rank, theirs in enumerate(everybody):
        different = sorted(key for key in mine.keys() | theirs.keys() if everybody[0].get(key) != theirs.get(key))
        if different:
            key = different[0]
            raise UserError(
                "the same configuration on every rank",
                f"{key} is {everybody[0].get(key)} on rank 0 and {theirs.get(key)} on rank {rank}"
                + (f" ({len(different)} keys differ)" if len(different) > 1 else ""),
                "pass every rank the same file and the same key=value arguments",
            )


def first_share(source: BatchSource, runtime: Runtime, data_rank: int) -> StepBatches:
    """The first share of every rank, or the same error on every rank.

    Two ranks that read the same samples double their weight, and nothing else would ever show it. Those of one
    `data_rank` must read the same ones.
    """
    share, problem, mine = None, None, None
    try:
        share = source.take()
        share.batches = batches = list(share)
        mine = None if batches[0].padding else digest(batches[0].data)
    except UserError as error:
        problem = error
    everybody = runtime.collectives.gather_json(
        [mine, problem and [problem.problem, problem.found, problem.fix], data_rank]
    )
    for rank, (_, trouble, _) in enumerate(everybody):
        if trouble:
            raise problem or UserError(trouble[0], f"rank {rank}: {trouble[1]}", trouble[2])
    assert share is not None
    firsts = _first_batches([(place, value) for value, _, place in everybody])
    # Known ids differ by construction, and a small dataset may well hold equal samples: look at more of them.
    if not isinstance(source, MapSource) or len({digest(sample) for sample in source.some_samples()}) == 1:
        check_different(
            list(firsts.values()),
            "let Lockstep shard the data: return the plain dataset from data(); with data.sharding=own, split by "
            "RANK and by worker. If equal batches are right here, type checks.first_batch=false",
        )
    return share


def _first_batches(found: list[tuple[int, str | None]]) -> dict[int, str | None]:
    """One digest per data rank."""
    firsts: dict[int, str | None] = {}
    for rank, (place, value) in enumerate(found):
        if firsts.setdefault(place, value) != value:
            raise UserError(
                "the same samples on all ranks that share a layer or follow each other as stages",
                f"rank {rank} read another first batch than the first rank of its group",
                "let Lockstep deal the data: no split by RANK, data.sharding=stride, and data.seed_samples=true for "
                "samples that draw random numbers",
            )
    return firsts


def check_different(digests: list[str | None], fix: str) -> None:
    """The first batches of all ranks; None: that rank has none."""
    seen: dict[str, int] = {}
    for rank, value in enumerate(digests):
        if value is not None and value in seen:
            raise UserError(
                "different samples on every rank",
                f"ranks {seen[value]} and {rank} read the same first batch",
                fix,
            )
        if value is not None:
            seen[value] = rank


def check_loss(loss: Loss) -> None:
    if not isinstance(loss, Loss):
        raise UserError(
            "a loss with its weight",
            f"loss() returned a {type(loss).__name__}",
            "return lockstep.Loss(total, weight=...): the SUM over the micro-batch, and how many terms it has",
        )
    if loss.total.dim() != 0 or not loss.total.requires_grad:
        raise UserError(
            "a loss: one number, the SUM over the micro-batch, that depends on the parameters",
            f"a tensor of shape {tuple(loss.total.shape)}, requires_grad={loss.total.requires_grad}",
            "return Loss(per_sample_loss.sum(), weight=len(batch)), computed with gradients on",
        )
    on_gpu = isinstance(loss.weight, torch.Tensor) and loss.weight.is_cuda  # looking at it would make the host wait
    if not on_gpu and not 0 <= float(loss.weight) < math.inf:
        raise UserError(
            "a loss weight: how many terms the sum has", f"{loss.weight}", "return a finite weight of 0 or more"
        )


def check_plain(model: Any) -> None:
    """Lockstep wraps and compiles by itself: a model that is wrapped already would be exchanged twice, or renamed."""
    if not isinstance(model, nn.Module):
        raise UserError("a model: an nn.Module", f"a {type(model).__name__}", "return the module itself from model()")
    for name, module in model.named_modules():
        typed = [word for kind, word in WRAPPERS.items() if isinstance(module, kind)]
        typed += ["compile=true"] * hasattr(module, "_orig_mod")
        if typed:
            raise UserError(
                "a plain model, which Lockstep wraps by itself",
                f"a {type(module).__name__}" + f" as {name!r}" * bool(name),
                f"return the model inside it, and type {typed[0]}",
            )


def check_supported(model: nn.Module) -> None:
    """What the step cannot carry yet is refused by name."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UserError(
                "dense gradients", f"{name!r} has sparse=True", "leave sparse=True out: its gradient is then dense"
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise UserError(
                "real trainable parameters", f"{name!r} is complex", "store it as real numbers (torch.view_as_real)"
            )


def check_even_work(model: nn.Module, plan: Plan, tail: str) -> None:
    """SyncBatchNorm talks to all ranks in every forward, so all must run equally many."""
    if plan.world == 1 or not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return
    short = tail == "short" and (plan.samples or 0) % plan.global_batch
    if plan.micro_batches % plan.world or short:
        raise UserError(
            "SyncBatchNorm, whose forward waits for all ranks",
            f"ranks that run different numbers of micro-batches ({plan.micro_batches} on {plan.world} ranks"
            + (", and a short last step" if short else "")
            + ")",
            f"type tail=drop and a global_batch that is a multiple of {plan.world} x micro_batch; or use GroupNorm",
        )


def check_best(config: RunConfig, evaluates: bool) -> None:
    """The best checkpoint is one whose weights were evaluated: without evaluations none would ever be kept."""
    if config.checkpoint.best and not (evaluates and config.evaluate.every):
        raise UserError(
            f"checkpoint.best={config.checkpoint.best}",
            "no evaluation during the run to compare checkpoints by" + "; eval_data() gives none" * (not evaluates),
            "type evaluate.every=100" + ", and return a dataset from eval_data()" * (not evaluates),
        )


def check_logged(config: RunConfig, source: BatchSource) -> None:
    if config.log.samples and isinstance(source, StreamSource):
        raise UserError(
            "log.samples=true",
            "a stream, whose samples have no numbers to write down",
            "return a dataset with __getitem__ and __len__ from data(), or leave log.samples out",
        )


def check_places(config: RunConfig, staged: bool, alone: bool) -> None:
    """For a task with `before_batch`, which keeps something for every place of the global batch, on the rank that runs
    it."""
    asked = "before_batch(), with which the task keeps something for every place in the global batch"
    if staged:
        raise UserError(
            f"{asked}, in a pipeline (mesh.pp)",
            "all micro-batches of a step at once, so that none is the one before its loss",
            "type strategy=ddp, without mesh.pp",
        )
    if config.load_balance == "auto" and not alone:
        raise UserError(
            f"{asked}, with load_balance=auto",
            "places that move to other ranks when the speeds have been measured",
            "leave load_balance out, or give one number for each rank, such as [1, 2]",
        )


def check_enough_work(plan: Plan) -> None:
    """A pipeline with one micro-batch is a queue of one: all stages but one wait at any time."""
    if plan.micro_batches // plan.world < 2:
        several = max(1, plan.global_batch // (2 * plan.world))
        fix = f"type micro_batch={several} or less" if plan.global_batch >= 2 * plan.world else "type a larger batch"
        raise UserError(
            "a pipeline (mesh.pp), in which several micro-batches are on their way at once",
            f"{plan.micro_batches} micro-batch{'es' * (plan.micro_batches > 1)} of {plan.micro_batch} samples in a "
            f"step, for {plan.world} "
            f"pipeline{'s' * (plan.world > 1)}",
            f"{fix}: at least one for each stage is best",
        )


class TrainableGuard:
    """What is trainable was fixed when the model was wrapped: a layer unfrozen later would never be exchanged."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [p for _, p in model.named_parameters()]
        self.trainable = [p.requires_grad for p in self.parameters]

    def check(self) -> None:
        if [p.requires_grad for p in self.parameters] != self.trainable:
            pairs = zip(self.names, self.parameters, self.trainable, strict=True)
            name, p = next((name, p) for name, p, before in pairs if p.requires_grad != before)
            raise self._changed(
                f"{name!r} was {'unfrozen' if p.requires_grad else 'frozen'} after the model was wrapped"
            )

    def check_structure(self) -> None:
        """Slower, so only now and then: parameters added, removed or replaced."""
        now = dict(self.model.named_parameters())
        for name, p in zip(self.names, self.parameters, strict=True):
            if now.pop(name, None) is not p:
                raise self._changed(f"parameter {name!r} was replaced or removed after the model was wrapped")
        if now:
            raise self._changed(f"parameter {next(iter(now))!r} was added after the model was wrapped")

    def _changed(self, found: str) -> UserError:
        return UserError(
            "the same trainable parameters during the whole run",
            found,
            "freeze, unfreeze and replace parameters in model(), before Lockstep gets it; to change them later, "
            "start a second run from the saved weights",
        )


def _checksum(parameter: nn.Parameter) -> torch.Tensor:
    """The sum of its bits as whole numbers: any single change shows, which a norm in floating point may swallow."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    return parameter.detach().contiguous().view(whole).sum(dtype=torch.int64)


def check_replicas(model: nn.Module, runtime: Runtime, only_frozen: bool = False) -> None:
    """Replicas must hold the same bits. Compares a checksum per parameter; names the first that differs."""
    pairs = [(name, p) for name, p in model.named_parameters() if not (p.is_meta or (only_frozen and p.requires_grad))]
    if runtime.world.alone or not pairs:
        return
    names, parameters = zip(*pairs, strict=True)
    everybody = runtime.collectives.gather_json(torch.stack([_checksum(p) for p in parameters]).tolist())
    for rank, theirs in enumerate(everybody):
        for name, mine, other in zip(names, everybody[0], theirs, strict=True):
            if mine != other:
                raise UserError(
                    "the same weights on every rank",
                    f"{name!r} differs between rank 0 and rank {rank}",
                    "load or initialise frozen parts equally on all ranks; look for code that changes parameters on "
                    "one rank only (`if rank == 0`)",
                )


def check_something_left(steps: int, done: int) -> None:
    """A run that has been trained for longer than is asked now was not meant: its record would be overwritten."""
    if done > steps:
        raise UserError(
            f"steps = {steps}",
            f"a checkpoint of step {done}: nothing is left to train",
            f"type steps={2 * done}, with the run's other settings (they do not come from the checkpoint)",
        )
