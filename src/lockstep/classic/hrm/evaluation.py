"""Evaluate a trained HRM: python evaluate.py checkpoint=runs/NAME; or under torchrun, with save_outputs=true.

The run is rebuilt from its own configuration, and nothing is trained. With `save_outputs=true` each rank also writes
the answers that it has computed, `answers-rank-0.safetensors` and so on. Further keys are settings of the run
(`task.eval_steps=8`).
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import lockstep
from lockstep import recipes
from lockstep.checkpoint.choose import choose, run_folder_of
from lockstep.classic.hrm.messages import check_names, help_text, translate
from lockstep.classic.hrm.pretrain_config import generate_name
from lockstep.errors import UserError
from lockstep.recipes.hrm import HRM
from lockstep.recipes.hrm.arguments import overrides
from lockstep.run_folder.checkpoint_names import step_in
from lockstep.task import Loss

KEYS = {"checkpoint": "(needed: a run, or one of its checkpoints)", "save_outputs": False}


class Recording(HRM):
    """HRM that also records this rank's answers in an evaluation."""

    answers: list[dict[str, Tensor]]

    def eval_loss(self, model: Any, batch: dict[str, Tensor]) -> Loss:
        # Only the last of all segments counts: each call replaces the answer of the one before.
        last: dict[str, Tensor] = {}
        hook = model.register_forward_hook(
            lambda module, inputs, thought: last.update(predictions=thought.logits.argmax(dim=-1))
        )

        try:
            loss = super().eval_loss(model, batch)
        finally:
            hook.remove()

        answer = {"inputs": batch["inputs"], "labels": batch["labels"], **last}
        self.answers = [*getattr(self, "answers", []), {name: rows.cpu() for name, rows in answer.items()}]
        return loss


def main(arguments: Sequence[str]) -> None:
    """Evaluate, as one of several ranks under torchrun, otherwise alone."""
    if {"--help", "-h"} & {*arguments}:
        print(help_text("usage: python evaluate.py checkpoint=RUN key=value ...", KEYS))
        return

    try:
        values = overrides(arguments)
        check_names(values, KEYS)

        if "checkpoint" not in values:
            raise UserError(
                "checkpoint is not set: it names the run to evaluate",
                "",
                "set checkpoint=runs/NAME",
            )

        # What is left are settings of the run.
        checkpoint = Path(values.pop("checkpoint"))
        done = evaluate_checkpoint(checkpoint, bool(values.pop("save_outputs", False)), **values)
    except UserError as error:
        print(f"evaluate: {translate(str(error))}", file=sys.stderr)
        sys.exit(2)

    if os.environ.get("RANK", "0") == "0":
        metrics = done.summary["eval_metrics"]
        print("  ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items())))


def evaluate_checkpoint(checkpoint: Path, save_outputs: bool = False, **settings: Any) -> lockstep.RunResult:
    """Evaluate `checkpoint`, a run folder or one of its checkpoints, as a new run that takes no step."""
    run, weights, step = _find_checkpoint(checkpoint)
    values: dict[str, Any] = {
        "run_dir": str(Path("runs") / f"{run.name}-at-{step}-{generate_name()}"),
        "resume": str(weights),
        "steps": step,
        "goals": [],
        "evaluate.at_end": True,
        **settings,
    }
    done = lockstep.fit(Recording if save_outputs else HRM, str(run / "config.yaml"), **values)

    # Each rank has evaluated its own share of the samples.
    answers = getattr(done.task, "answers", [])
    if answers:
        name = f"answers-rank-{os.environ.get('RANK', 0)}.safetensors"
        save_file({key: torch.cat([answer[key] for answer in answers]) for key in answers[0]}, done.run_dir / name)

    return done


def _find_checkpoint(checkpoint: Path) -> tuple[Path, Path, int]:
    """Return the run folder, the checkpoint to load, and its step."""
    run = run_folder_of(checkpoint)
    chosen = None
    found = "" if checkpoint.exists() else "no such folder"
    if (run / "config.yaml").exists():
        try:
            chosen = choose(checkpoint)
        except UserError as error:
            found = error.problem

    # One that was set aside has no step.
    if chosen is None or step_in(chosen.name) is None:
        raise UserError(
            f"checkpoint={checkpoint} is not a run with a checkpoint",
            found,
            "set checkpoint=RUN or checkpoint=RUN/checkpoints/step-NNNNNNNN, where RUN is the folder of a run",
        )

    if other := _other_recipe(run):
        raise UserError(f"checkpoint={checkpoint} is a run of {other}", "", "give the folder of a run of hrm")

    return run, chosen.path, chosen.step


def _other_recipe(run: Path) -> str | None:
    """Return the recipe of the run if it is not hrm. A custom task, derived from HRM, may have any name."""
    with (run / "events.jsonl").open() as lines:
        events = [json.loads(line) for line in lines]

    # A resumed run has several starts. A class that was passed to `fit` is recorded without underscores.
    starts = [event["task"].replace("_", "") for event in events if event["event"] == "start"]
    for package in pkgutil.iter_modules(recipes.__path__):
        if package.ispkg and package.name != "hrm" and starts[-1:] == [package.name.replace("_", "")]:
            return package.name

    return None
