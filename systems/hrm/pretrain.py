"""Train HRM as its document does: torchrun --nproc-per-node 8 pretrain.py data_path=FOLDER lr=1e-4 ...

The names of the document can be imported from this file, for your own training loop.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import UserError
from lockstep.recipes.hrm import HRM
from lockstep.recipes.hrm.arguments import overrides
from lockstep.recipes.hrm.model import HierarchicalReasoningModel
from lockstep.recipes.hrm.optimizers import CastedSparseEmbeddingSignSGD_Distributed
from messages import help_text, translate
from pretrain_config import (
    PRETRAIN_KEYS,
    TASK_KEYS,
    PretrainConfig,
    check_values,
    generate_name,
    load_synced_config,
)
from puzzle_dataset import PuzzleDataset, PuzzleDatasetConfig
from train_loop import (
    TrainState,
    compute_metrics,
    create_model,
    evaluate,
    init_train_state,
    process_aggregated_metrics,
    save_train_state,
    train_batch,
)

__all__ = [
    "CastedSparseEmbeddingSignSGD_Distributed",
    "HierarchicalReasoningModel",
    "PretrainConfig",
    "PuzzleDataset",
    "PuzzleDatasetConfig",
    "TrainState",
    "compute_metrics",
    "create_model",
    "evaluate",
    "generate_name",
    "init_train_state",
    "load_synced_config",
    "process_aggregated_metrics",
    "save_train_state",
    "train_batch",
]

SOURCE = ("model.py", "losses.py", "task.py")  # copied into the run folder


def main(arguments: Sequence[str]) -> None:
    """Train, as one of several ranks under torchrun, otherwise alone."""
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if {"--help", "-h"} & {*arguments}:
        usage = "usage: torchrun --nproc-per-node N pretrain.py data_path=FOLDER key=value ..."
        print(help_text(usage, PRETRAIN_KEYS))
        return

    try:
        values = overrides(arguments)
        # Checked before the other ranks wait for rank 0.
        if rank == 0:
            check_values(values)
        if world_size > 1:
            _join()
        config = load_synced_config(values, rank, world_size)
        # The original code reads this variable.
        if os.environ.get("DISABLE_COMPILE", "0") not in ("", "0"):
            config.rest.setdefault("compile", False)
        done = lockstep.fit(HRM, config.settings(), again=_command_to_resume)
        if rank == 0:
            copy_source(done.run_dir)
    except UserError as error:
        print(f"pretrain: {translate(str(error), TASK_KEYS)}", file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join() -> None:
    """Join the process group: NCCL if every rank of this machine has a GPU of its own, else gloo."""
    backend = "gloo"
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        # Ranks that share a GPU have to use gloo: NCCL refuses two ranks on one device.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % gpus)
        if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
            backend = "nccl"
    dist.init_process_group(backend)


def _command_to_resume(run_dir: Path) -> str:
    return f"the same command with checkpoint_path={run_dir} resume=auto"


def copy_source(run_dir: Path) -> None:
    """Copy the code of the model into the run folder: it may have changed when the weights are used again."""
    (run_dir / "source").mkdir(exist_ok=True)
    for name in SOURCE:
        shutil.copy(Path(inspect.getfile(HRM)).with_name(name), run_dir / "source" / name)


if __name__ == "__main__":
    main(sys.argv[1:])
