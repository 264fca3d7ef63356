"""The configuration of pretrain.py.

Its arguments become a `PretrainConfig` on rank 0, which broadcasts it to the other ranks; the settings of a run follow
from it. Keys that it does not know are settings of the run (`log.every=10`, `precision=bf16`, `task.variant=trm`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.classic.hrm.messages import check_names
from lockstep.errors import UserError, nearest_name
from lockstep.recipes.hrm.data import read_metadata

ADJECTIVES = (
    "amber", "brisk", "calm", "dusky", "eager", "frosty", "gentle", "ivory", "keen", "lucid", "nimble", "quiet",
)  # fmt: skip
NOUNS = (
    "badger", "cedar", "delta", "ember", "falcon", "glacier", "harbour", "juniper", "kestrel", "maple", "otter",
)  # fmt: skip

# Options of the task that have a key of their own in PretrainConfig.
TASK_KEYS = ("data_path", "lr", "weight_decay", "puzzle_emb_lr", "puzzle_emb_weight_decay")


@dataclass
class PretrainConfig:
    """The keys of pretrain.py."""

    data_path: str  # a folder with puzzles in the published layout
    epochs: int = 20_000
    eval_interval: int | None = None  # epochs between two evaluations; None: only at the end
    global_batch_size: int = 768
    lr: float = 1e-4
    lr_min_ratio: float = 1.0  # the last learning rate as a share of lr
    lr_warmup_steps: int = 2000
    weight_decay: float = 1.0
    puzzle_emb_lr: float = 1e-4
    puzzle_emb_weight_decay: float = 1.0
    seed: int = 0
    project_name: str = ""  # a folder around the folders of its runs
    run_name: str = ""
    checkpoint_path: str = ""  # the run folder, if not runs/PROJECT/NAME
    use_distributed_checkpoint: bool = False  # save a checkpoint, written by all ranks, with every evaluation
    rest: dict[str, Any] = field(default_factory=dict)  # settings of the run that have no other name here

    def steps(self, epochs: int) -> int:
        """Count steps as the document does: an epoch is the number of groups times the mean examples per puzzle."""
        metadata = read_metadata(Path(self.data_path) / "train")
        return int(epochs * metadata.total_groups * metadata.mean_puzzle_examples) // self.global_batch_size

    def settings(self) -> dict[str, Any]:
        """Return the settings for `lockstep.fit`."""
        # Epochs become steps; less than one step between evaluations is one.
        evaluate_every = None
        if self.eval_interval is not None:
            evaluate_every = max(1, self.steps(self.eval_interval))

        steps = self.steps(self.epochs)
        if steps < 1:
            raise UserError(
                f"epochs={self.epochs} with global_batch_size={self.global_batch_size} is less than one step",
                f"fewer examples in {self.data_path} than one step takes",
                "set a smaller global_batch_size, or more epochs",
            )

        # A ratio of 1 means that the rate never falls.
        constant = self.lr_min_ratio == 1.0
        return {
            "preset": None,
            "run_dir": self.checkpoint_path or str(Path("runs") / self.project_name / self.run_name),
            "steps": steps,
            "global_batch": self.global_batch_size,
            "seed": self.seed,
            "lr.schedule": "constant" if constant else "cosine",
            "lr.min_ratio": 0.0 if constant else self.lr_min_ratio,
            "lr.warmup": self.lr_warmup_steps,
            "evaluate.every": evaluate_every,
            "checkpoint.every": evaluate_every if self.use_distributed_checkpoint else None,
            # Settings of the run that were typed override those that follow from our own keys.
            **{key: value for key, value in self.rest.items() if not key.startswith("task.")},
            "task": self.options(),
        }

    def options(self) -> dict[str, Any]:
        """Return the options of the task."""
        typed = {key.removeprefix("task."): value for key, value in self.rest.items() if key.startswith("task.")}
        return {name: getattr(self, name) for name in TASK_KEYS} | typed


PRETRAIN_KEYS = {key.name: key.default for key in fields(PretrainConfig) if key.name != "rest"}
PRETRAIN_KEYS["data_path"] = "(needed)"


def check_values(values: Mapping[str, Any]) -> None:
    """Check everything about the arguments of pretrain.py that can be known before any file is read."""
    if "data_path" not in values:
        similar = nearest_name("data_path", values)
        raise UserError(
            "data_path is not set: it names the folder of the puzzles",
            f"{similar} instead" if similar else "",
            "set data_path=FOLDER; python -m lockstep.recipes.hrm.build makes one",
        )

    check_names(values, PRETRAIN_KEYS)
    named = any(values.get(key) for key in ("run_name", "checkpoint_path", "run_dir"))
    if values.get("resume") == "auto" and not named:
        raise UserError(
            "resume=auto cannot find the run: run_name is not set",
            "without a name every run gets a new folder, so there is nothing to resume",
            "add run_name=NAME, the same each time",
        )


def generate_name() -> str:
    return f"{secrets.choice(ADJECTIVES)}-{secrets.choice(NOUNS)}-{secrets.token_hex(2)}"


def load_synced_config(hydra_config: Mapping[str, Any], rank: int, world_size: int) -> PretrainConfig:
    """Return rank 0's configuration on every rank, whatever arguments the others have.

    Collective: every rank must call it.
    """
    objects: list[Any] = [None]
    if rank == 0:
        check_values(hydra_config)
        config = PretrainConfig(
            **{key: value for key, value in hydra_config.items() if key in PRETRAIN_KEYS},
            rest={key: value for key, value in hydra_config.items() if key not in PRETRAIN_KEYS},
        )

        # The run gets its name here: otherwise each rank would draw another one.
        config.run_name = config.run_name or generate_name()
        objects = [config]

    if world_size > 1:
        dist.broadcast_object_list(objects, src=0)

    return objects[0]
