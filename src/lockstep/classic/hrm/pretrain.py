"""What `pretrain.py` runs: the recipe hrm, with the keys of its own document."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

import lockstep
from lockstep.classic.hrm.messages import help_text, translate
from lockstep.classic.hrm.pretrain_config import PRETRAIN_KEYS, TASK_KEYS, check_values, load_synced_config
from lockstep.classic.process_group import GroupMembership, check_announced, current_world
from lockstep.errors import UserError
from lockstep.recipes.hrm import HRM
from lockstep.recipes.hrm.arguments import overrides
from lockstep.runtime.context import choose_device

SOURCE = ("model.py", "losses.py", "task.py")  # copied into the run folder


def main(arguments: Sequence[str]) -> None:
    """Train, as one of several ranks under torchrun, otherwise alone."""
    if {"--help", "-h"} & {*arguments}:
        usage = "usage: torchrun --nproc-per-node N pretrain.py data_path=FOLDER key=value ..."
        print(help_text(usage, PRETRAIN_KEYS))
        return

    try:
        check_announced()
        world = current_world()
        rank, world_size = world.rank, world.size

        values = overrides(arguments)
        # Checked before the other ranks wait for rank 0.
        if rank == 0:
            check_values(values)

        GroupMembership().join(world, choose_device("auto", world), "nccl")
        config = load_synced_config(values, rank, world_size)
        # The original code reads this variable.
        if os.environ.get("DISABLE_COMPILE", "0") not in ("", "0"):
            config.rest.setdefault("compile", False)

        done = lockstep.fit(HRM, config.settings(), resume_command=_command_to_resume)

        if rank == 0:
            copy_source(done.run_dir)
    except UserError as error:
        print(f"pretrain: {translate(str(error), TASK_KEYS)}", file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _command_to_resume(run_dir: Path) -> str:
    return f"the same command with checkpoint_path={run_dir} resume=auto"


def copy_source(run_dir: Path) -> None:
    """Copy the code of the model into the run folder: it may have changed when the weights are used again."""
    (run_dir / "source").mkdir(exist_ok=True)
    for name in SOURCE:
        shutil.copy(Path(inspect.getfile(HRM)).with_name(name), run_dir / "source" / name)
