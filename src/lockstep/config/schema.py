"""Every key of a configuration: its type, default and meaning. The table in docs/configuration.md is made from it.

A key is a field, with its default, its limits and one line of meaning: here, or in a section (`sections.py`). It has no
other place: the checks, the command line, the table in the documentation and the resume check all read this schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic.fields import FieldInfo

from lockstep.config.sections import (
    CheckpointConfig,
    ChecksConfig,
    ClipConfig,
    DataConfig,
    DDPConfig,
    EmaConfig,
    EvaluateConfig,
    FSDPConfig,
    HangConfig,
    LogConfig,
    LrConfig,
    MeshConfig,
    NonfiniteConfig,
    OptimConfig,
    PPConfig,
    ProfileConfig,
    RestartConfig,
    ScalerConfig,
    SpikeConfig,
    StopConfig,
    WeightsConfig,
)
from lockstep.config.strategies import STRATEGIES, Strategy, StrategyName
from lockstep.config.value_types import ConfigSection, Goal, LoadBalance, PathText, PrecisionName, Remat, key

# Old key -> new key. An old one is refused with its new name.
RENAMED = {
    "speed_weights": "load_balance",
    "evaluate.decides": "evaluate.monitor",
    "checkpoint.storage": "checkpoint.store",
}


# ---- the configuration ----


class RunConfig(ConfigSection):
    """Everything a run was asked to do. Values that follow from these are in the Plan."""

    # How long, and how much per step.
    preset: str | None = key(None, "name of a preset of the task", example="tiny")
    steps: int | None = key(None, "optimizer steps to train; set this or epochs", example=1000, ge=1)
    epochs: float | None = key(None, "passes over the data to train; set this or steps", example=3, gt=0)
    seed: int = key(0, "seed of all random streams", ge=0)
    global_batch: int | None = key(None, "samples per optimizer step, on all ranks together", example=64, ge=1)
    local_batch: int | None = key(None, "samples per optimizer step on each rank", example=8, ge=1)
    micro_batch: Literal["auto"] | Annotated[int, Field(ge=1)] | None = key(
        None,
        "samples per forward and backward; null: the batch is divided evenly; auto: halved when memory runs out",
        example=8,
    )
    load_balance: LoadBalance = key(
        "none",
        "divide micro-batches by the speed of the ranks; auto: as measured; or one number per rank",
        example=[1, 2],
    )
    tail: Literal["short", "drop"] = key(
        "short", "last, incomplete step of an epoch; short: train it; drop: leave it out"
    )

    # How the model is computed and shared.
    precision: PrecisionName = key("auto", "number format to compute in; with bf16-*, parameters are stored in it too")
    optimizer: str = key("task", "task: the task's own; any other replaces it and keeps its parameter groups")
    strategy: StrategyName = key("ddp", "how the ranks share the model")
    blocks: list[str] | None = key(
        None,
        "class names of the modules to shard, recompute, compile or split between as a unit; null: detected",
        example=["Block"],
    )
    init: Literal["host", "meta"] = key(
        "host", "device for model construction; `meta` allocates and initialises one block at a time (fsdp only)"
    )
    remat: Remat = key(
        "none", "activation checkpointing: none, full, selective, or every-N for every N-th block", example="full"
    )
    compile: Literal["auto"] | bool = key(
        "auto",
        "torch.compile the loss with the model, or as much of it as can be; auto: on CUDA, if it pays"
        "; in any case where forwards wait for other ranks (fsdp, tp, pp, SyncBatchNorm), with deterministic=true and "
        "with fp8",
    )
    graph: Literal["auto"] | bool = key(
        "auto", "capture the model's calls as CUDA graphs and replay them; auto: if it is launch-bound"
    )
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = key(
        "auto", "kernels of scaled_dot_product_attention; auto: on Hopper cuDNN's first, elsewhere torch's choice"
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "device to train on")
    backend: Literal["auto", "nccl", "gloo", "cpu:gloo,cuda:nccl", "mpi"] = key(
        "auto", "backend of the process group; auto: nccl if every rank has a GPU of its own, otherwise gloo"
    )
    gpu_memory: float | None = key(None, "most GPU memory that a rank may allocate, in GiB", example=20, gt=0)
    exact: bool = key(False, "give identical bits on any number of ranks, from 1 to the number of micro-batches")
    deterministic: bool = key(False, "use deterministic kernels; fail where torch has none")

    # Where it starts and ends.
    resume: PathText = key("never", "resume from a checkpoint: auto, never, or the folder of a run or a checkpoint")
    init_from: PathText | None = key(
        None,
        "weights to start a new run from: a .safetensors or torch file, a run, a checkpoint, or a Hugging Face folder",
        example="runs/first",
    )
    run_dir: PathText | None = key(None, "folder of the run; null: runs/<name>-<time>", example="runs/first")
    goals: list[Goal] = key(
        [], "values that the last evaluation should reach; the summary says whether it did", example=["accuracy >= 0.9"]
    )
    threads: int | None = key(
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
    task: dict[str, Any] = key({}, "keyword arguments of the task's constructor")

    @property
    def strategy_record(self) -> Strategy:
        """What the strategy shards, and what it can be combined with."""
        return STRATEGIES[self.strategy]

    def uses_axis(self, *axes: str) -> bool:
        """Return whether the model is shared along one of these mesh axes, "tp" or "pp"."""
        return any(self.strategy_record.axis == axis or (getattr(self.mesh, axis) or 1) > 1 for axis in axes)

    @property
    def uses_ddp(self) -> bool:
        """Whether every rank runs the full model, under torch's DDP or its equivalent."""
        return self.strategy_record.uses_ddp and not self.uses_axis("tp", "pp")

    # -- checks --

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        """Refuse conflicts in a RunConfig that is built directly; `resolve` reports the same ones with sources."""
        # These modules read the keys of this one.
        from lockstep.config.conflicts import conflicts, exclusive
        from lockstep.config.settings import Setting, flatten

        settings = {key: Setting(key, value, "argument") for key, value in flatten(self).items()}
        problems = [*exclusive(settings), *conflicts(settings)]
        if problems:
            raise ValueError("; ".join(problem.problem for problem in problems))

        return self


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, ConfigSection):
            yield from _keys(field.annotation, f"{name}.")
        elif name != "task":
            yield prefix + name, field


KEYS = dict(_keys(RunConfig))  # every dotted key but task.*; `KEYS[key].description` says what it means
SECTIONS = {key.split(".")[0] for key in KEYS if "." in key} | {"task"}
