"""The sections of a configuration: the keys with a dot, such as `lr.peak`. The other keys are in `schema.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lockstep.config.value_types import NONE_WORD, OFF_WORD, ConfigSection, Group, LossCheck, key


class LrConfig(ConfigSection):
    # Steps are optimizer steps in all keys, however many micro-batches they take.
    peak: float | None = key(
        None, "highest learning rate; null: the rate that the task's optimizer was made with", example=0.001, ge=0
    )
    schedule: str = key("constant", "how the rate changes after the warm-up")
    warmup: int = key(0, "optimizer steps in which the rate rises linearly from 0", ge=0)
    min_ratio: float = key(0.0, "rate at the end of the run, as a fraction of lr.peak", ge=0, le=1)
    # A fifth of the run is the usual length of the decay in warmup-stable-decay schedules.
    decay: float = key(0.2, "schedule wsd: fraction of the run, at its end, in which the rate falls", ge=0, le=1)
    scaling: Annotated[Literal["none", "sqrt", "linear"], NONE_WORD] = key(
        "none", "how lr.peak grows with the global batch, relative to lr.reference_batch"
    )
    reference_batch: int | None = key(
        None, "global batch that lr.peak was tuned for; needed by lr.scaling", example=256, ge=1
    )


class OptimConfig(ConfigSection):
    groups: list[Group] = key(
        [],
        "parameter groups by name, the first match decides: a pattern, lr or lr_scale, and options of the optimizer",
        example=[{"match": "*.bias", "weight_decay": 0}],
    )


class ClipConfig(ConfigSection):
    """Gradient clipping; at most one of the three."""

    norm: float | None = key(None, "largest global L2 norm of the gradient", example=1.0, gt=0)
    value: float | None = key(None, "largest absolute value of a gradient element", example=0.5, gt=0)
    adaptive: float | None = key(None, "largest gradient norm / weight norm of a parameter", example=0.01, gt=0)


class NonfiniteConfig(ConfigSection):
    # Skipping survives a rare overflow. After five in a row the run would hardly recover.
    policy: Literal["skip", "rewind", "stop"] = key("skip", "what to do with a step whose gradient is NaN or infinite")
    max_in_a_row: int = key(5, "end the run after this many skipped steps or rewinds in a row", ge=1)


class SpikeConfig(ConfigSection):
    # Off by default: what counts as a spike depends on the data, and skipping a step changes the training.
    policy: Annotated[Literal["off", "skip", "rewind", "stop"], OFF_WORD] = key(
        "off", "what to do with a step whose loss is a spike"
    )
    factor: float = key(10.0, "a spike is this many median absolute deviations above the median loss", gt=0)
    window: int = key(64, "number of recent steps that the median is taken over", ge=8)


class ScalerConfig(ConfigSection):
    # The values of torch.amp.GradScaler, but half its initial scale, and bounds, which it does not have.
    initial: float = key(2.0**15, "fp16: loss scale at the start", gt=0)
    growth: float = key(2.0, "fp16: the loss scale grows by this factor after scaler.interval finite steps", ge=1)
    backoff: float = key(0.5, "fp16: the loss scale is multiplied by this after an overflow", gt=0, lt=1)
    interval: int = key(2000, "fp16: finite steps in a row before the scale grows", ge=1)
    minimum: float = key(1.0, "fp16: smallest loss scale", gt=0)
    maximum: float = key(2.0**24, "fp16: largest loss scale", gt=0)
    hysteresis: int = key(1, "fp16: number of overflows after which the loss scale shrinks", ge=1)


class EvaluateConfig(ConfigSection):
    # Any of these three makes an evaluation due. Without them there is only the one at the end.
    every: int | None = key(None, "optimizer steps between evaluations", example=100, ge=1)
    epochs: float | None = key(None, "epochs between evaluations", example=0.5, gt=0)
    minutes: float | None = key(
        None,
        "minutes between evaluations, by the clock of rank 0; another run evaluates after other steps",
        example=10,
        gt=0,
    )
    monitor: str | None = key(
        None,
        "of several evaluation sets, the one that early stopping, the best checkpoint and schedulers follow; null: the "
        "first",
        example="val",
    )
    batch: int | None = key(
        None,
        "samples per forward of an evaluation; null: micro_batch if it is set, otherwise at most 32",
        example=8,
        ge=1,
    )
    at_end: bool = key(True, "evaluate after the last step")


class StopConfig(ConfigSection):
    patience: int | None = key(
        None, "stop after this many evaluations without an improvement; null: train to the last step", example=5, ge=1
    )
    metric: str = key("eval_loss", "what must improve: eval_loss, or the name of another metric of the evaluation")
    mode: Literal["min", "max"] = key("min", "whether a smaller or a larger value of stop.metric is an improvement")
    min_delta: float = key(0.0, "an improvement must be larger than this", ge=0)
    max_minutes: float | None = key(
        None, "stop after this many minutes of training, those before a resume included", example=120, gt=0
    )


class EmaConfig(ConfigSection):
    decay: float | None = key(
        None,
        "average the weights, with this share of the old average in each step; evaluations use the average; null: off",
        example=0.999,
        ge=0,
        lt=1,
    )


class DataConfig(ConfigSection):
    # No workers by default: most small datasets load faster than processes start.
    workers: int = key(0, "worker processes per rank that load samples; 0: the training process loads them", ge=0)
    prefetch: int = key(2, "micro-batches that each worker prefetches", ge=1)
    pin_memory: Literal["auto"] | bool = key("auto", "load batches into page-locked host memory; auto: on for CUDA")
    shuffle: bool = key(True, "shuffle the samples again in every epoch")
    # Otherwise random transforms, and so the trained model, depend on the number of ranks.
    seed_samples: bool = key(
        True, "seed random transforms for each sample, so that they do not depend on ranks and workers"
    )
    balance: Annotated[Literal["none", "length"], NONE_WORD] = key(
        "none", "how a step is divided into micro-batches; length: by the lengths of its samples, at equal cost"
    )
    sharding: Literal["stride", "own"] = key(
        "stride", "how an iterable dataset is sharded; stride: by Lockstep; own: by the dataset itself"
    )
    resume: Literal["state", "reread"] = key(
        "state",
        "how a stream resumes; state: by its state_dict, and without one its epoch begins again; reread: the epoch is "
        "read again up to the position",
    )


class DDPConfig(ConfigSection):
    bucket_mb: Literal["auto"] | Annotated[float, Field(gt=0)] = key(
        "auto",
        "size of the gradient buckets, each of which is one all-reduce, in MiB; auto: a quarter of the gradients, and "
        "from 1 to 25",
    )
    find_unused_parameters: bool = key(
        False, "allow parameters that get no gradient; gradients are then all-reduced after the backward"
    )
    hook: Annotated[Literal["none", "fp16", "bf16", "powersgd"], NONE_WORD] = key(
        "none", "gradient compression for the all-reduce; every choice but none is lossy"
    )
    # PowerSGD approximates a gradient matrix by one of low rank; the first steps are too rough for that.
    powersgd_rank: int = key(4, "powersgd: rank of the compressed gradient matrices", ge=1)
    powersgd_start: int = key(100, "powersgd: optimizer steps at the start that are not compressed", ge=0)
    error_feedback: bool = key(True, "powersgd: add the compression error of a step to the next one")
    gradient_as_bucket_view: bool = key(
        True, "gradients share the memory of the buckets; false: they take as much memory again"
    )
    # A promise that torch relies on and does not check.
    static_graph: bool = key(False, "promise that every step uses the same parameters in the same way")
    broadcast_buffers: bool = key(False, "broadcast rank 0's buffers at the start of every step")
    sync_batchnorm: bool = key(False, "compute BatchNorm statistics over the micro-batches of all ranks together")


class FSDPConfig(ConfigSection):
    """Options of the strategies that shard parameters."""

    offload: bool = key(False, "keep parameters and optimizer state in host memory")
    replicas: int | None = key(
        None, "hsdp: number of replica groups, each with a full copy; null: one per host, at least 2", ge=1
    )


class MeshConfig(ConfigSection):
    """The device mesh: how many ranks along each axis."""

    # In the order of the mesh's dimensions: neighbours along the last axis are closest, as tensor parallelism needs.
    pp: int | None = key(None, "ranks of a pipeline, each with a part of the layers", example=2, ge=1)
    dp: int | None = key(
        None, "groups of ranks that train on different samples; null: all ranks that pp and tp leave", example=2, ge=1
    )
    tp: int | None = key(
        None, "ranks that share each layer (tensor parallelism, see Task.tensor_plan)", example=2, ge=1
    )


class PPConfig(ConfigSection):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = key(
        "1f1b", "order of the forwards and backwards in a pipeline"
    )
    stages_per_rank: int | None = key(
        None, "stages of the model on each rank; null: 2 if pp.schedule is interleaved, otherwise 1", example=2, ge=1
    )


class CheckpointConfig(ConfigSection):
    # By time rather than by steps, because what a failure costs is time.
    every: int | None = key(None, "optimizer steps between checkpoints", example=500, ge=1)
    minutes: float | None = key(10.0, "minutes between checkpoints; null: only checkpoint.every decides", gt=0)
    at_end: bool = key(True, "save a checkpoint after the last step, from which the run can be continued")
    asynchronous: bool = key(True, "write checkpoints in the background while training continues")
    keep: int = key(3, "how many of the newest checkpoints to keep", ge=1)
    keep_every: int | None = key(None, "also keep checkpoints whose step is a multiple of this", example=10000, ge=1)
    best: str | None = key(
        None,
        "also keep the checkpoint that is best by this metric: eval_loss, or the name of another",
        example="eval_loss",
    )
    best_mode: Literal["min", "max"] = key(
        "min", "whether the smallest or the largest value of checkpoint.best is the best"
    )
    final: Literal["last", "best"] = key(
        "last", "which weights model.safetensors holds: of the last step, or of the best checkpoint"
    )
    store: str | None = key(
        None,
        "URL of a store for the tensors of checkpoints, which are otherwise in run_dir",
        example="s3://bucket/folder",
    )
    # A store that is gone for longer needs a person.
    timeout: float = key(
        600.0,
        "seconds to wait for files: of the other ranks in a save; of a checkpoint that cannot be read at a resume",
        gt=0,
    )
    # A large frozen backbone need not be in every checkpoint.
    frozen: bool = key(
        True,
        "save frozen parameters too; false: save only a digest of them, to compare on resume, and leave them out of "
        "model.safetensors",
    )


class WeightsConfig(ConfigSection):
    """What `init_from` does with tensors that do not fit. By default any mismatch is refused, with a list."""

    rename: dict[str, str] = key(
        {},
        "init_from: regular expressions and their replacements, applied in order to the names in the file",
        example={"^module[.]": ""},
    )
    allow_missing: list[str] = key(
        [],
        "init_from: names in the model, as patterns, that keep their initial values if the file does not have them, or "
        "has another shape",
        example=["head.*"],
    )
    allow_extra: list[str] = key(
        [], "init_from: names in the file, as patterns, that are left out", example=["decoder.*"]
    )
    allow_reshape: list[str] = key(
        [],
        "init_from: names in the model, as patterns, whose shape may differ: equal elements are reshaped; otherwise "
        "the part that both have is copied",
        example=["*.embed.weight"],
    )


class RestartConfig(ConfigSection):
    # A failure that recurs more often needs a person.
    per_hour: int = key(10, "restarts after failures that are allowed within an hour; 0: none", ge=0)
    # Where nothing is ever saved, an hourly rate would let the same hang repeat for ever.
    max_in_a_row: int = key(5, "restarts after failures that are allowed without a new checkpoint between them", ge=1)
    grace: float = key(600.0, "seconds that preempted ranks get to save and exit", gt=0)


class HangConfig(ConfigSection):
    action: Literal["restart", "stop"] = key("restart", "what the watchdog does when no rank makes progress")
    # Nothing is known about a phase before it has run once; afterwards its own times set the timeout.
    first: float = key(
        900.0,
        "timeout of a phase that runs for the first time, in seconds; start, compile and the like always have it",
        gt=0,
    )
    least: float = key(
        5.0, "shortest timeout of a step, in seconds; loading, evaluating and saving get at least six times this", gt=0
    )
    factor: float = key(5.0, "timeout of a phase, as a multiple of the longest time that it has taken so far", ge=1)


class LogConfig(ConfigSection):
    every: int = key(10, "optimizer steps between metric lines", ge=1)
    samples: bool = key(False, "log which samples every step was trained on")
    sinks: list[str] = key(
        [],
        "where the metrics go besides metrics.jsonl",
        example=["tensorboard"],
    )
    prometheus_port: int = key(
        0, "port on this machine at which the sink prometheus serves its numbers; 0: any free one", ge=0, le=65535
    )
    progress: Annotated[Literal["auto", "live", "plain", "off"], OFF_WORD] = key(
        "auto", "how progress is shown; auto: live on a terminal, otherwise plain"
    )


class ProfileConfig(ConfigSection):
    count: int | None = key(None, "steps to trace, for RUN/profile and the report; null: none", example=5, ge=1)
    # Later than compilation and the first allocations.
    after: int = key(5, "steps before the first traced one", ge=1)


class ChecksConfig(ConfigSection):
    # Cheap enough to be always on: the first is one gather, the second an occasional digest of the weights.
    first_batch: bool = key(
        True,
        "check in the first step that the ranks read different samples, that worker processes read the right ones, and "
        "that a resumed run reads the same data",
    )
    loss: LossCheck = key(
        "all",
        "checks of the loss before the first step; off: none; or the findings that you intend, which are then accepted",
        example="batch-coupled",
    )
    every: int = key(500, "optimizer steps between checks that replicated weights are equal on all ranks", ge=1)
    slow_rank: float = key(1.3, "report a rank that takes this many times as long as the others", gt=1)
