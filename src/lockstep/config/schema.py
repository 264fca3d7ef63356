"""Every key of a configuration: its type, default and meaning."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from lockstep.config.values import Setting


def _key(default: Any, about: str, *, example: Any = None, **limits: Any) -> Any:
    """One configuration key: its default, its meaning with the unit, and (where it helps) a value to type."""
    return Field(default, description=about, examples=None if example is None else [example], **limits)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _remat(value: Any) -> str:
    if value is None:
        return "none"
    if not re.fullmatch(r"none|full|selective|every-[1-9]\d*", str(value)):
        raise PydanticCustomError("remat", "Input should be 'none', 'full', 'selective' or 'every-2'")
    return value


def _goal(value: Any) -> str:
    if not re.fullmatch(r"\S+ (>=|<=) [-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", str(value)):
        raise PydanticCustomError("goal", "Input should be a metric, >= or <=, and a number: 'accuracy >= 0.9'")
    return value


# `none` and `off` reach us as null and false, because that is how YAML reads these words.
Scaling = Annotated[Literal["none", "sqrt", "linear"], BeforeValidator(lambda v: "none" if v is None else v)]
SpikePolicy = Annotated[Literal["off", "skip", "rewind", "stop"], BeforeValidator(lambda v: "off" if v is False else v)]
Progress = Annotated[Literal["auto", "live", "plain", "off"], BeforeValidator(lambda v: "off" if v is False else v)]
Remat = Annotated[str, BeforeValidator(_remat)]
Goal = Annotated[str, BeforeValidator(_goal)]
SpeedWeights = Annotated[
    Literal["none", "auto"] | list[Annotated[float, Field(gt=0)]], BeforeValidator(lambda v: "none" if v is None else v)
]
GradientHook = Annotated[
    Literal["none", "fp16", "bf16", "powersgd"], BeforeValidator(lambda v: "none" if v is None else v)
]
PathText = Annotated[str, BeforeValidator(lambda v: os.fspath(v) if isinstance(v, os.PathLike) else v)]


class LrConfig(Section):
    peak: float | None = _key(None, "highest learning rate; null: the optimizer's own", example=0.001, ge=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = _key("constant", "shape after the warm-up")
    warmup: int = _key(0, "optimizer steps of linear warm-up", ge=0)
    min_ratio: float = _key(0.0, "final rate as a share of the peak", ge=0, le=1)
    decay: float = _key(0.2, "wsd: last share of the run, in which the rate falls", ge=0, le=1)
    scaling: Scaling = _key("none", "how the peak follows global batch / reference_batch")
    reference_batch: int | None = _key(None, "samples per step that lr.peak was tuned for", example=256, ge=1)


class ClipConfig(Section):
    norm: float | None = _key(None, "largest global L2 norm of the gradient", example=1.0, gt=0)
    value: float | None = _key(None, "largest absolute value of a gradient element", example=0.5, gt=0)
    adaptive: float | None = _key(None, "largest gradient norm / weight norm of a parameter", example=0.01, gt=0)


class NonfiniteConfig(Section):
    policy: Literal["skip", "rewind", "stop"] = _key("skip", "what a step with a NaN or infinite gradient does")
    max_in_a_row: int = _key(5, "skipped steps, or rewinds, in a row that end the run", ge=1)


class SpikeConfig(Section):
    policy: SpikePolicy = _key("off", "what a step does whose loss stands out from the ones before it")
    factor: float = _key(10.0, "spike: loss above the median by this many typical deviations", gt=0)
    window: int = _key(64, "steps that the median is taken over", ge=8)


class ScalerConfig(Section):
    initial: float = _key(2.0**15, "fp16: loss scale at the start", gt=0)
    growth: float = _key(2.0, "fp16: factor after `interval` good steps", ge=1)
    backoff: float = _key(0.5, "fp16: factor after an overflow", gt=0, lt=1)
    interval: int = _key(2000, "fp16: good steps in a row before the scale grows", ge=1)
    minimum: float = _key(1.0, "fp16: smallest loss scale", gt=0)
    maximum: float = _key(2.0**24, "fp16: largest loss scale", gt=0)
    hysteresis: int = _key(1, "fp16: overflows before the scale shrinks", ge=1)


class EvaluateConfig(Section):
    every: int | None = _key(None, "optimizer steps between evaluations; null: at the end only", example=100, ge=1)
    batch: int | None = _key(
        None, "samples per evaluation forward; null: micro_batch if set, else at most 32", example=8, ge=1
    )
    at_end: bool = _key(True, "evaluate after the last step")


class DataConfig(Section):
    workers: int = _key(0, "loader processes per rank; 0: load in the training process", ge=0)
    prefetch: int = _key(2, "micro-batches each worker prepares ahead", ge=1)
    pin_memory: Literal["auto"] | bool = _key("auto", "page-locked host memory; auto: on for CUDA")
    shuffle: bool = _key(True, "a new order of the samples in every epoch")
    seed_samples: bool = _key(True, "seed the randomness of each sample by itself, whatever the ranks")
    sharding: Literal["stride", "own"] = _key("stride", "iterable datasets: we deal the samples, or they do")


class DDPConfig(Section):
    bucket_mb: float = _key(25.0, "gradient bucket of one all-reduce, in MiB", gt=0)
    find_unused_parameters: bool = _key(False, "allow parameters without a gradient; exchanges after backward")
    hook: GradientHook = _key("none", "how gradients are made smaller to travel; all but none lose a little")
    powersgd_rank: int = _key(4, "powersgd: rank that a gradient matrix is sent with", ge=1)
    powersgd_start: int = _key(100, "powersgd: steps at the start that are exchanged in full", ge=0)
    error_feedback: bool = _key(True, "powersgd: add what a step left out to the next one")
    gradient_as_bucket_view: bool = _key(True, "gradients live in the buckets; false: one more copy of them")
    static_graph: bool = _key(False, "promise that every step uses the same parameters in the same way")
    broadcast_buffers: bool = _key(False, "rank 0's buffers for all ranks at the start of every step")
    sync_batchnorm: bool = _key(False, "BatchNorm over the micro-batches of all ranks (CUDA)")


class FSDPConfig(Section):
    offload: bool = _key(False, "keep parameters and optimizer state in host memory")
    replicas: int | None = _key(
        None, "hsdp: groups of ranks with a whole copy each; null: one per host, at least 2", ge=1
    )


class MeshConfig(Section):
    pp: int | None = _key(None, "stages of the model, one after another", example=2, ge=1)
    dp: int | None = _key(None, "groups of ranks with samples of their own; null: what is left", example=2, ge=1)
    tp: int | None = _key(None, "ranks that share every layer (the task's tensor_plan)", example=2, ge=1)


class PPConfig(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = _key("1f1b", "order of forwards and backwards")
    stages_per_rank: int | None = _key(
        None, "stages of the model on each rank; null: interleaved 2, otherwise 1", example=2, ge=1
    )


class CheckpointConfig(Section):
    every: int | None = _key(None, "optimizer steps between checkpoints", example=500, ge=1)
    minutes: float | None = _key(10.0, "minutes between checkpoints; null: only by steps", gt=0)
    at_end: bool = _key(True, "a checkpoint after the last step, so that the run can be prolonged")
    asynchronous: bool = _key(True, "write in the background while training goes on")
    keep: int = _key(3, "newest checkpoints to keep", ge=1)
    keep_every: int | None = _key(None, "also keep those whose step is a multiple of this", example=10000, ge=1)
    best: str | None = _key(None, "also keep the best by this: eval_loss, or a metric's name", example="eval_loss")
    best_mode: Literal["min", "max"] = _key("min", "whether the best is the smallest or the largest")
    frozen: bool = _key(True, "save frozen parameters too; false: only their digest, compared on resume")


class RestartConfig(Section):
    per_hour: int = _key(10, "restarts after failures that an hour may see; 0: none", ge=0)
    grace: float = _key(600.0, "seconds the ranks get to save and leave when asked to", gt=0)


class HangConfig(Section):
    action: Literal["restart", "stop"] = _key("restart", "what follows when no rank advances any more")
    first: float = _key(900.0, "seconds for what was never done before: start, compilation, ...", gt=0)
    least: float = _key(5.0, "shortest limit, in seconds, for a step; others get six times it", gt=0)
    factor: float = _key(5.0, "limit in terms of the longest time the phase has taken so far", ge=1)


class LogConfig(Section):
    every: int = _key(10, "optimizer steps between metric lines", ge=1)
    samples: bool = _key(False, "write down which samples every step was trained on")
    progress: Progress = _key("auto", "how progress is shown; auto: live on a terminal, else plain")


class ChecksConfig(Section):
    first_batch: bool = _key(True, "check on the first step that the ranks hold different samples")
    every: int = _key(500, "optimizer steps between checks that all ranks hold the same weights", ge=1)
    slow_rank: float = _key(1.3, "name a rank that takes this many times as long as the others", gt=1)


class RunConfig(Section):
    """Everything a run was asked to do. Values that follow from these live in the Plan."""

    preset: str | None = _key(None, "name of a preset of the task", example="tiny")
    steps: int | None = _key(None, "optimizer steps to train (this or epochs)", example=1000, ge=1)
    epochs: float | None = _key(None, "passes over the data to train (this or steps)", example=3, gt=0)
    seed: int = _key(0, "seed of all random streams", ge=0)
    global_batch: int | None = _key(None, "samples per optimizer step, all ranks together", example=64, ge=1)
    local_batch: int | None = _key(None, "samples per optimizer step and rank", example=8, ge=1)
    micro_batch: Literal["auto"] | Annotated[int, Field(ge=1)] | None = _key(
        None, "samples per forward and backward; null: derived; auto: halved when memory runs out", example=8
    )
    speed_weights: SpeedWeights = _key(
        "none", "micro-batches by the speed of a rank: auto measures it; or one number per rank", example=[1, 2]
    )
    tail: Literal["short", "drop"] = _key("short", "what happens to an incomplete last step of an epoch")
    precision: Literal[
        "auto", "fp32", "tf32", "bf16", "fp16", "fp8", "bf16-master", "bf16-pure-stochastic", "bf16-pure-compensated"
    ] = _key("auto", "number format of the compute; bf16-*: also of the stored parameters")
    optimizer: Literal["task", "adamw8bit", "adafactor"] = _key(
        "task", "which optimizer: the task's own, or one whose state is small, with its groups"
    )
    strategy: Literal["ddp", "zero1", "fsdp-grads", "fsdp", "hsdp", "tp", "pp"] = _key(
        "ddp", "how the ranks share the model"
    )
    blocks: list[str] | None = _key(
        None, "classes of the modules that are cut, or computed again, as one; null: found", example=["Block"]
    )
    init: Literal["host", "meta"] = _key("host", "where the model is made; meta: nowhere, then block by block (fsdp)")
    remat: Remat = _key(
        "none", "compute blocks again in backward: none, full, selective, or every-N: each N-th", example="full"
    )
    compile: Literal["auto"] | bool = _key("auto", "torch.compile the model; auto: on for CUDA")
    graph: Literal["auto"] | bool = _key(
        "auto", "record the model's calls and replay them (CUDA graphs); auto: if it is launch-bound"
    )
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = _key(
        "auto", "kernels of scaled_dot_product_attention; auto: on Hopper cuDNN's first, elsewhere torch's choice"
    )
    device: Literal["auto", "cpu", "cuda"] = _key("auto", "where to train")
    gpu_memory: float | None = _key(None, "the most of its GPU's memory that a rank may take, in GiB", example=20, gt=0)
    exact: bool = _key(False, "the same bits at every number of ranks, from 1 to the number of micro-batches")
    deterministic: bool = _key(False, "refuse kernels whose result differs from run to run")
    resume: PathText = _key("never", "go on from a checkpoint: auto, never, or the folder of a run or a checkpoint")
    run_dir: PathText | None = _key(None, "folder of the run; null: runs/<name>-<time>", example="runs/first")
    goals: list[Goal] = _key(
        [], "what the last evaluation should reach; the summary says whether it did", example=["accuracy >= 0.9"]
    )
    threads: int | None = _key(None, "CPU threads per rank; null: cores / ranks of a host", example=1, ge=1)
    lr: LrConfig = LrConfig()
    clip: ClipConfig = ClipConfig()
    nonfinite: NonfiniteConfig = NonfiniteConfig()
    spike: SpikeConfig = SpikeConfig()
    scaler: ScalerConfig = ScalerConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    data: DataConfig = DataConfig()
    ddp: DDPConfig = DDPConfig()
    fsdp: FSDPConfig = FSDPConfig()
    mesh: MeshConfig = MeshConfig()
    pp: PPConfig = PPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    restart: RestartConfig = RestartConfig()
    hang: HangConfig = HangConfig()
    log: LogConfig = LogConfig()
    checks: ChecksConfig = ChecksConfig()
    task: dict[str, Any] = _key({}, "keyword arguments of the task's constructor")

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        from lockstep.config.conflicts import clashes, rivals  # that module reads this one's keys

        # `resolve` reports the same rules with sources; this guards a RunConfig that is built directly.
        leaves = {key: Setting(key, value, "argument") for key, value in flatten(self).items()}
        problems = rivals(leaves) + clashes(leaves)
        if problems:
            raise ValueError("; ".join(f"{problem.problem}: {problem.found}" for problem in problems))
        return self


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _keys(field.annotation, f"{name}.")
        elif name != "task":
            yield prefix + name, field


KEYS = dict(_keys(RunConfig))  # every dotted key but task.*; `KEYS[key].description` says what it means
SECTIONS = {key.split(".")[0] for key in KEYS if "." in key} | {"task"}


# ---- nested and dotted ----------------------------------------------------------------------------------


def nested(config: BaseModel, only_set: bool = False) -> dict[str, Any]:
    """Nested values as they are (`model_dump` would take apart objects that a user put under `task`)."""
    names = [name for name in type(config).model_fields if not only_set or name in config.model_fields_set]
    values = {name: getattr(config, name) for name in names}
    return {name: nested(v, only_set) if isinstance(v, Section) else v for name, v in values.items()}


def walk(items: Iterable[tuple[Any, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf. A mapping whose names a dotted key cannot spell is one value."""
    for name, value in items:
        key = f"{prefix}{name}"
        # `optimizer` is no section, but many take it for one: what they put into it is then named.
        inner = value if isinstance(value, Mapping) and (key not in KEYS or key == "optimizer") else {}
        spelled = inner and all(isinstance(n, str) and n and "." not in n for n in inner)
        if spelled or (key in SECTIONS and isinstance(value, Mapping)):
            yield from walk(inner.items(), f"{key}.")
        else:
            yield key, value


def flatten(values: Mapping[str, Any] | RunConfig) -> dict[str, Any]:
    """{"lr": {"peak": 1}} -> {"lr.peak": 1}"""
    return dict(walk((nested(values) if isinstance(values, RunConfig) else values).items()))
