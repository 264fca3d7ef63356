"""Every key of a configuration: its type, default and meaning. The table in docs/configuration.md is made from it.

A key is a field of a dataclass, with its default, its limits and one line of meaning. It has no other place: the
checks, the command line, the table in the documentation and the resume check all read this schema.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from lockstep.config.strategies import STRATEGIES, Strategy, StrategyName

# Old key -> new key. An old one is refused with its new name.
RENAMED = {"speed_weights": "load_balance"}


def _key(default: Any, about: str, *, example: Any = None, **limits: Any) -> Any:
    """Declare one key: its default, its meaning with its unit, and an example of a value if that helps."""
    return Field(default, description=about, examples=None if example is None else [example], **limits)


class Section(BaseModel):
    """A group of keys: frozen, and strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# ---- types ----


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


# Keys of a rule of `optim.groups` that are not options of the optimizer.
GROUP_KEYS = ("match", "lr", "lr_scale")


def _group(value: Any) -> dict[str, Any]:
    known = isinstance(value, Mapping) and isinstance(value.get("match"), str) and len(value) > 1
    if not known or ("lr" in value and "lr_scale" in value):
        raise PydanticCustomError(
            "group",
            "Input should have a pattern (match), at least one option, and not both lr and lr_scale",
        )

    for key in ("lr", "lr_scale"):
        rate = value.get(key, 0)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or rate < 0:
            raise PydanticCustomError("group", "Input should have a number of 0 or more as its lr or lr_scale")

    return dict(value)


# These undo YAML's reading of the words `none` and `off` as null and false.
_NONE = BeforeValidator(lambda value: "none" if value is None else value)
_OFF = BeforeValidator(lambda value: "off" if value is False else value)

Remat = Annotated[str, BeforeValidator(_remat)]
Goal = Annotated[str, BeforeValidator(_goal)]
Group = Annotated[dict[str, Any], BeforeValidator(_group)]
LoadBalance = Annotated[Literal["none", "auto"] | list[Annotated[float, Field(gt=0)]], _NONE]
PathText = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
# Causes (see causes.py) that the check at the start of a run finds, and that a user may intend.
LossTrait = Literal[
    "mean-of-means",
    "mean-for-sum",
    "loss-weight",
    "penalty",
    "batch-coupled",
    "changed-in-forward",
    "randomness",
    "nondeterminism",
    "carried-state",
    "average",
    "schedule",
    "gradient",
    "rank-in-loss",
]
LossCheck = Annotated[Literal["all", "off"] | LossTrait | list[LossTrait], _OFF]
PrecisionName = Literal[
    "auto", "fp32", "tf32", "bf16", "fp16", "fp8", "bf16-master", "bf16-pure-stochastic", "bf16-pure-compensated"
]


# ---- sections ----


class LrConfig(Section):
    # Steps are optimizer steps in all keys, however many micro-batches they take.
    peak: float | None = _key(
        None, "highest learning rate; null: the rate that the task's optimizer was made with", example=0.001, ge=0
    )
    schedule: str = _key("constant", "how the rate changes after the warm-up")
    warmup: int = _key(0, "optimizer steps in which the rate rises linearly from 0", ge=0)
    min_ratio: float = _key(0.0, "rate at the end of the run, as a fraction of lr.peak", ge=0, le=1)
    # A fifth of the run is the usual length of the decay in warmup-stable-decay schedules.
    decay: float = _key(0.2, "schedule wsd: fraction of the run, at its end, in which the rate falls", ge=0, le=1)
    scaling: Annotated[Literal["none", "sqrt", "linear"], _NONE] = _key(
        "none", "how lr.peak grows with the global batch, relative to lr.reference_batch"
    )
    reference_batch: int | None = _key(
        None, "global batch that lr.peak was tuned for; needed by lr.scaling", example=256, ge=1
    )


class OptimConfig(Section):
    groups: list[Group] = _key(
        [],
        "parameter groups by name, the first match decides: a pattern, lr or lr_scale, and options of the optimizer",
        example=[{"match": "*.bias", "weight_decay": 0}],
    )


class ClipConfig(Section):
    """Gradient clipping; at most one of the three."""

    norm: float | None = _key(None, "largest global L2 norm of the gradient", example=1.0, gt=0)
    value: float | None = _key(None, "largest absolute value of a gradient element", example=0.5, gt=0)
    adaptive: float | None = _key(None, "largest gradient norm / weight norm of a parameter", example=0.01, gt=0)


class NonfiniteConfig(Section):
    # Skipping survives a rare overflow. After five in a row the run would hardly recover.
    policy: Literal["skip", "rewind", "stop"] = _key("skip", "what to do with a step whose gradient is NaN or infinite")
    max_in_a_row: int = _key(5, "end the run after this many skipped steps or rewinds in a row", ge=1)


class SpikeConfig(Section):
    # Off by default: what counts as a spike depends on the data, and skipping a step changes the training.
    policy: Annotated[Literal["off", "skip", "rewind", "stop"], _OFF] = _key(
        "off", "what to do with a step whose loss is a spike"
    )
    factor: float = _key(10.0, "a spike is this many median absolute deviations above the median loss", gt=0)
    window: int = _key(64, "number of recent steps that the median is taken over", ge=8)


class ScalerConfig(Section):
    # The values of torch.amp.GradScaler, but half its initial scale, and bounds, which it does not have.
    initial: float = _key(2.0**15, "fp16: loss scale at the start", gt=0)
    growth: float = _key(2.0, "fp16: the loss scale grows by this factor after scaler.interval finite steps", ge=1)
    backoff: float = _key(0.5, "fp16: the loss scale is multiplied by this after an overflow", gt=0, lt=1)
    interval: int = _key(2000, "fp16: finite steps in a row before the scale grows", ge=1)
    minimum: float = _key(1.0, "fp16: smallest loss scale", gt=0)
    maximum: float = _key(2.0**24, "fp16: largest loss scale", gt=0)
    hysteresis: int = _key(1, "fp16: number of overflows after which the loss scale shrinks", ge=1)


class EvaluateConfig(Section):
    # Any of these three makes an evaluation due. Without them there is only the one at the end.
    every: int | None = _key(None, "optimizer steps between evaluations", example=100, ge=1)
    epochs: float | None = _key(None, "epochs between evaluations", example=0.5, gt=0)
    minutes: float | None = _key(
        None,
        "minutes between evaluations, by the clock of rank 0; another run evaluates after other steps",
        example=10,
        gt=0,
    )
    decides: str | None = _key(
        None,
        "of several evaluation sets, the one that early stopping, the best checkpoint and schedulers follow; null: the "
        "first",
        example="val",
    )
    batch: int | None = _key(
        None,
        "samples per forward of an evaluation; null: micro_batch if it is set, otherwise at most 32",
        example=8,
        ge=1,
    )
    at_end: bool = _key(True, "evaluate after the last step")


class StopConfig(Section):
    patience: int | None = _key(
        None, "stop after this many evaluations without an improvement; null: train to the last step", example=5, ge=1
    )
    metric: str = _key("eval_loss", "what must improve: eval_loss, or the name of another metric of the evaluation")
    mode: Literal["min", "max"] = _key("min", "whether a smaller or a larger value of stop.metric is an improvement")
    min_delta: float = _key(0.0, "an improvement must be larger than this", ge=0)
    max_minutes: float | None = _key(
        None, "stop after this many minutes of training, those before a resume included", example=120, gt=0
    )


class EmaConfig(Section):
    decay: float | None = _key(
        None,
        "average the weights, with this share of the old average in each step; evaluations use the average; null: off",
        example=0.999,
        ge=0,
        lt=1,
    )


class DataConfig(Section):
    # No workers by default: most small datasets load faster than processes start.
    workers: int = _key(0, "worker processes per rank that load samples; 0: the training process loads them", ge=0)
    prefetch: int = _key(2, "micro-batches that each worker prefetches", ge=1)
    pin_memory: Literal["auto"] | bool = _key("auto", "load batches into page-locked host memory; auto: on for CUDA")
    shuffle: bool = _key(True, "shuffle the samples again in every epoch")
    # Otherwise random transforms, and so the trained model, depend on the number of ranks.
    seed_samples: bool = _key(
        True, "seed random transforms for each sample, so that they do not depend on ranks and workers"
    )
    balance: Annotated[Literal["none", "length"], _NONE] = _key(
        "none", "how a step is divided into micro-batches; length: by the lengths of its samples, at equal cost"
    )
    sharding: Literal["stride", "own"] = _key(
        "stride", "how an iterable dataset is sharded; stride: by Lockstep; own: by the dataset itself"
    )
    resume: Literal["state", "reread"] = _key(
        "state",
        "how a stream resumes; state: by its state_dict, and without one its epoch begins again; reread: the epoch is "
        "read again up to the position",
    )


class DDPConfig(Section):
    # 25 MiB is torch's default.
    bucket_mb: float = _key(25.0, "size of the gradient buckets, each of which is one all-reduce, in MiB", gt=0)
    find_unused_parameters: bool = _key(
        False, "allow parameters that get no gradient; gradients are then all-reduced after the backward"
    )
    hook: Annotated[Literal["none", "fp16", "bf16", "powersgd"], _NONE] = _key(
        "none", "gradient compression for the all-reduce; every choice but none is lossy"
    )
    # PowerSGD approximates a gradient matrix by one of low rank; the first steps are too rough for that.
    powersgd_rank: int = _key(4, "powersgd: rank of the compressed gradient matrices", ge=1)
    powersgd_start: int = _key(100, "powersgd: optimizer steps at the start that are not compressed", ge=0)
    error_feedback: bool = _key(True, "powersgd: add the compression error of a step to the next one")
    gradient_as_bucket_view: bool = _key(
        True, "gradients share the memory of the buckets; false: they take as much memory again"
    )
    # A promise that torch relies on and does not check.
    static_graph: bool = _key(False, "promise that every step uses the same parameters in the same way")
    broadcast_buffers: bool = _key(False, "broadcast rank 0's buffers at the start of every step")
    sync_batchnorm: bool = _key(False, "compute BatchNorm statistics over the micro-batches of all ranks together")


class FSDPConfig(Section):
    """Options of the strategies that shard parameters."""

    offload: bool = _key(False, "keep parameters and optimizer state in host memory")
    replicas: int | None = _key(
        None, "hsdp: number of replica groups, each with a full copy; null: one per host, at least 2", ge=1
    )


class MeshConfig(Section):
    """The device mesh: how many ranks along each axis."""

    # In the order of the mesh's dimensions: neighbours along the last axis are closest, as tensor parallelism needs.
    pp: int | None = _key(None, "ranks of a pipeline, each with a part of the layers", example=2, ge=1)
    dp: int | None = _key(
        None, "groups of ranks that train on different samples; null: all ranks that pp and tp leave", example=2, ge=1
    )
    tp: int | None = _key(
        None, "ranks that share each layer (tensor parallelism, see Task.tensor_plan)", example=2, ge=1
    )


class PPConfig(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = _key(
        "1f1b", "order of the forwards and backwards in a pipeline"
    )
    stages_per_rank: int | None = _key(
        None, "stages of the model on each rank; null: 2 if pp.schedule is interleaved, otherwise 1", example=2, ge=1
    )


class CheckpointConfig(Section):
    # By time rather than by steps, because what a failure costs is time.
    every: int | None = _key(None, "optimizer steps between checkpoints", example=500, ge=1)
    minutes: float | None = _key(10.0, "minutes between checkpoints; null: only checkpoint.every decides", gt=0)
    at_end: bool = _key(True, "save a checkpoint after the last step, from which the run can be continued")
    asynchronous: bool = _key(True, "write checkpoints in the background while training continues")
    keep: int = _key(3, "how many of the newest checkpoints to keep", ge=1)
    keep_every: int | None = _key(None, "also keep checkpoints whose step is a multiple of this", example=10000, ge=1)
    best: str | None = _key(
        None,
        "also keep the checkpoint that is best by this metric: eval_loss, or the name of another",
        example="eval_loss",
    )
    best_mode: Literal["min", "max"] = _key(
        "min", "whether the smallest or the largest value of checkpoint.best is the best"
    )
    final: Literal["last", "best"] = _key(
        "last", "which weights model.safetensors holds: of the last step, or of the best checkpoint"
    )
    # A large frozen backbone need not be in every checkpoint.
    frozen: bool = _key(
        True,
        "save frozen parameters too; false: save only a digest of them, to compare on resume, and leave them out of "
        "model.safetensors",
    )


class WeightsConfig(Section):
    """What `init_from` does with tensors that do not fit. By default any mismatch is refused, with a list."""

    rename: dict[str, str] = _key(
        {},
        "init_from: regular expressions and their replacements, applied in order to the names in the file",
        example={"^module[.]": ""},
    )
    allow_missing: list[str] = _key(
        [],
        "init_from: names in the model, as patterns, that keep their initial values if the file does not have them, or "
        "has another shape",
        example=["head.*"],
    )
    allow_extra: list[str] = _key(
        [], "init_from: names in the file, as patterns, that are left out", example=["decoder.*"]
    )
    allow_reshape: list[str] = _key(
        [],
        "init_from: names in the model, as patterns, whose shape may differ: equal elements are reshaped; otherwise "
        "the part that both have is copied",
        example=["*.embed.weight"],
    )


class RestartConfig(Section):
    # A failure that recurs more often needs a person.
    per_hour: int = _key(10, "restarts after failures that are allowed within an hour; 0: none", ge=0)
    grace: float = _key(600.0, "seconds that preempted ranks get to save and exit", gt=0)


class HangConfig(Section):
    action: Literal["restart", "stop"] = _key("restart", "what the watchdog does when no rank makes progress")
    # Nothing is known about a phase before it has run once; afterwards its own times set the timeout.
    first: float = _key(
        900.0,
        "timeout of a phase that runs for the first time, in seconds; start, compile and the like always have it",
        gt=0,
    )
    least: float = _key(
        5.0, "shortest timeout of a step, in seconds; loading, evaluating and saving get at least six times this", gt=0
    )
    factor: float = _key(5.0, "timeout of a phase, as a multiple of the longest time that it has taken so far", ge=1)


class LogConfig(Section):
    every: int = _key(10, "optimizer steps between metric lines", ge=1)
    samples: bool = _key(False, "log which samples every step was trained on")
    sinks: list[str] = _key(
        [],
        "where the metrics go besides metrics.jsonl",
        example=["tensorboard"],
    )
    prometheus_port: int = _key(
        0, "port on this machine at which the sink prometheus serves its numbers; 0: any free one", ge=0, le=65535
    )
    progress: Annotated[Literal["auto", "live", "plain", "off"], _OFF] = _key(
        "auto", "how progress is shown; auto: live on a terminal, otherwise plain"
    )


class ProfileConfig(Section):
    count: int | None = _key(None, "steps to trace, for RUN/profile and the report; null: none", example=5, ge=1)
    # Later than compilation and the first allocations.
    after: int = _key(5, "steps before the first traced one", ge=1)


class ChecksConfig(Section):
    # Cheap enough to be always on: the first is one gather, the second an occasional digest of the weights.
    first_batch: bool = _key(
        True,
        "check in the first step that the ranks read different samples, and that worker processes read the right ones",
    )
    loss: LossCheck = _key(
        "all",
        "checks of the loss before the first step; off: none; or the findings that you intend, which are then accepted",
        example="batch-coupled",
    )
    every: int = _key(500, "optimizer steps between checks that replicated weights are equal on all ranks", ge=1)
    slow_rank: float = _key(1.3, "report a rank that takes this many times as long as the others", gt=1)


# ---- the configuration ----


class RunConfig(Section):
    """Everything a run was asked to do. Values that follow from these are in the Plan."""

    # How long, and how much per step.
    preset: str | None = _key(None, "name of a preset of the task", example="tiny")
    steps: int | None = _key(None, "optimizer steps to train; set this or epochs", example=1000, ge=1)
    epochs: float | None = _key(None, "passes over the data to train; set this or steps", example=3, gt=0)
    seed: int = _key(0, "seed of all random streams", ge=0)
    global_batch: int | None = _key(None, "samples per optimizer step, on all ranks together", example=64, ge=1)
    local_batch: int | None = _key(None, "samples per optimizer step on each rank", example=8, ge=1)
    micro_batch: Literal["auto"] | Annotated[int, Field(ge=1)] | None = _key(
        None,
        "samples per forward and backward; null: the batch is divided evenly; auto: halved when memory runs out",
        example=8,
    )
    load_balance: LoadBalance = _key(
        "none",
        "divide micro-batches by the speed of the ranks; auto: as measured; or one number per rank",
        example=[1, 2],
    )
    tail: Literal["short", "drop"] = _key(
        "short", "last, incomplete step of an epoch; short: train it; drop: leave it out"
    )

    # How the model is computed and shared.
    precision: PrecisionName = _key("auto", "number format to compute in; with bf16-*, parameters are stored in it too")
    optimizer: str = _key("task", "task: the task's own; any other replaces it and keeps its parameter groups")
    strategy: StrategyName = _key("ddp", "how the ranks share the model")
    blocks: list[str] | None = _key(
        None, "class names of the modules to shard or recompute as a unit; null: detected", example=["Block"]
    )
    init: Literal["host", "meta"] = _key(
        "host", "device for model construction; `meta` allocates and initialises one block at a time (fsdp only)"
    )
    remat: Remat = _key(
        "none", "activation checkpointing: none, full, selective, or every-N for every N-th block", example="full"
    )
    compile: Literal["auto"] | bool = _key(
        "auto", "torch.compile the loss with the model, or as much of it as can be; auto: on CUDA, if it pays"
    )
    graph: Literal["auto"] | bool = _key(
        "auto", "capture the model's calls as CUDA graphs and replay them; auto: if it is launch-bound"
    )
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = _key(
        "auto", "kernels of scaled_dot_product_attention; auto: on Hopper cuDNN's first, elsewhere torch's choice"
    )
    device: Literal["auto", "cpu", "cuda"] = _key("auto", "device to train on")
    backend: Literal["auto", "nccl", "gloo", "cpu:gloo,cuda:nccl", "mpi"] = _key(
        "auto", "backend of the process group; auto: nccl if every rank has a GPU of its own, otherwise gloo"
    )
    gpu_memory: float | None = _key(None, "most GPU memory that a rank may allocate, in GiB", example=20, gt=0)
    exact: bool = _key(False, "give identical bits on any number of ranks, from 1 to the number of micro-batches")
    deterministic: bool = _key(False, "use deterministic kernels; fail where torch has none")

    # Where it starts and ends.
    resume: PathText = _key("never", "resume from a checkpoint: auto, never, or the folder of a run or a checkpoint")
    init_from: PathText | None = _key(
        None,
        "weights to start a new run from: a .safetensors or torch file, a run, a checkpoint, or a Hugging Face folder",
        example="runs/first",
    )
    run_dir: PathText | None = _key(None, "folder of the run; null: runs/<name>-<time>", example="runs/first")
    goals: list[Goal] = _key(
        [], "values that the last evaluation should reach; the summary says whether it did", example=["accuracy >= 0.9"]
    )
    threads: int | None = _key(
        None, "CPU threads per rank; null: one for small layers, otherwise cores / ranks of a host", example=1, ge=1
    )

    # Sections, and the options of the task, which only the task can check.
    lr: LrConfig = LrConfig()
    optim: OptimConfig = OptimConfig()
    clip: ClipConfig = ClipConfig()
    nonfinite: NonfiniteConfig = NonfiniteConfig()
    spike: SpikeConfig = SpikeConfig()
    scaler: ScalerConfig = ScalerConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    stop: StopConfig = StopConfig()
    ema: EmaConfig = EmaConfig()
    data: DataConfig = DataConfig()
    ddp: DDPConfig = DDPConfig()
    fsdp: FSDPConfig = FSDPConfig()
    mesh: MeshConfig = MeshConfig()
    pp: PPConfig = PPConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    restart: RestartConfig = RestartConfig()
    hang: HangConfig = HangConfig()
    log: LogConfig = LogConfig()
    checks: ChecksConfig = ChecksConfig()
    profile: ProfileConfig = ProfileConfig()
    task: dict[str, Any] = _key({}, "keyword arguments of the task's constructor")

    @property
    def strategy_record(self) -> Strategy:
        """What the strategy shards, and what it can be combined with."""
        return STRATEGIES[self.strategy]

    def uses_axis(self, *axes: str) -> bool:
        """Return whether the model is shared along one of these mesh axes, "tp" or "pp"."""
        return any(self.strategy_record.axis == axis or (getattr(self.mesh, axis) or 1) > 1 for axis in axes)

    # -- checks --

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        """Refuse conflicts in a RunConfig that is built directly; `resolve` reports the same ones with sources."""
        from lockstep.config.conflicts import conflicts, exclusive  # that module reads this one's keys

        settings = {key: Setting(key, value, "argument") for key, value in flatten(self).items()}
        problems = [*exclusive(settings), *conflicts(settings)]
        if problems:
            raise ValueError("; ".join(problem.problem for problem in problems))
        return self


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _keys(field.annotation, f"{name}.")
        elif name != "task":
            yield prefix + name, field


KEYS = dict(_keys(RunConfig))  # every dotted key but task.*; `KEYS[key].description` says what it means
SECTIONS = {key.split(".")[0] for key in KEYS if "." in key} | {"task"}


# ---- values with their sources ----


class Setting(NamedTuple):
    key: str  # dotted
    value: Any
    source: str

    def __str__(self) -> str:
        return f"{self.key} = {typed(self.value)} ({self.source})"


def typed(value: Any) -> str:
    """Return a value as a user would type it after `key=`."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str, skipkeys=True)


# ---- nested and dotted ----


def nested(config: BaseModel, only_set: bool = False) -> dict[str, Any]:
    """Return nested values as they are (`model_dump` would take apart objects that a user put under `task`)."""
    names = [name for name in type(config).model_fields if not only_set or name in config.model_fields_set]
    values = {name: getattr(config, name) for name in names}
    return {name: nested(v, only_set) if isinstance(v, Section) else v for name, v in values.items()}


def walk(items: Iterable[tuple[Any, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf. A mapping whose names cannot be part of a dotted key is one value."""
    for name, value in items:
        key = f"{prefix}{name}"
        # `optimizer` is often mistaken for a section: the error then names the keys inside it.
        may_hold_keys = key not in KEYS or key == "optimizer"
        inner = value if isinstance(value, Mapping) and may_hold_keys else {}
        spelled = inner and all(isinstance(n, str) and n and "." not in n for n in inner)
        if spelled or (key in SECTIONS and isinstance(value, Mapping)):
            yield from walk(inner.items(), f"{key}.")
        else:
            yield key, value


def flatten(values: Mapping[str, Any] | RunConfig) -> dict[str, Any]:
    """{"lr": {"peak": 1}} -> {"lr.peak": 1}"""
    mapping = nested(values) if isinstance(values, RunConfig) else values
    return dict(walk(mapping.items()))
