"""`evaluate.py checkpoint=FOLDER ...`: a trained model looked at again, from what its run has left.

The run is rebuilt from its own configuration; nothing is trained. `save_outputs=true` also keeps the answers: each rank
writes those it has computed, `answers-rank-0.safetensors` and so on. Further words are settings, `task.eval_steps=8`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lockstep
from lockstep.errors import UserError
from lockstep.recipes.hrm.carry import TrainedBatch
from lockstep.recipes.hrm.pretrain import generate_name, overrides
from lockstep.recipes.hrm.task import HRM
from lockstep.recipes.hrm.words import check_names, help_text, in_own_words
from lockstep.task import Loss

KEYS = {"checkpoint": "(needed: a run, or one of its checkpoints)", "save_outputs": False}


class Recording(HRM):
    """Keeps the last answer to every puzzle that this rank is asked about."""

    answers: list[dict[str, Tensor]]

    def eval_loss(self, model: Any, batch: TrainedBatch) -> Loss:
        last: list[Tensor] = []
        hook = model.register_forward_hook(lambda module, inputs, thought: last.append(thought.logits.argmax(dim=-1)))
        try:
            found = super().eval_loss(model, batch)
        finally:
            hook.remove()
        told = {"inputs": batch["inputs"], "labels": batch["labels"], "predictions": last[-1]}
        self.answers = [*getattr(self, "answers", []), {name: rows.cpu() for name, rows in told.items()}]
        return found


def evaluate_checkpoint(checkpoint: Path, save_outputs: bool = False, **more: Any) -> lockstep.RunResult:
    """`checkpoint`: a run, or one of its checkpoints."""
    run, weights, step = _found(checkpoint)
    values: dict[str, Any] = {"run_dir": str(Path("runs") / f"{run.name}-at-{step}-{generate_name()}")}
    values |= {"resume": str(weights), "steps": step, "goals": [], "evaluate.at_end": True, **more}
    done = lockstep.fit(Recording if save_outputs else HRM, str(run / "config.yaml"), **values)
    answers = getattr(done.task, "answers", [])
    if answers:
        from safetensors.torch import save_file

        name = f"answers-rank-{os.environ.get('RANK', 0)}.safetensors"
        save_file({key: torch.cat([each[key] for each in answers]) for key in answers[0]}, done.run_dir / name)
    return done


def _found(checkpoint: Path) -> tuple[Path, Path, int]:
    """The run's folder, the checkpoint to look at, and its step. Beside checkpoints there may be what a run that was
    killed has left half written."""
    run = checkpoint if _step_of(checkpoint) is None else checkpoint.resolve().parent.parent
    folders = (run / "checkpoints").glob("step-*") if run == checkpoint else [checkpoint]
    steps = {step: path for path in folders if (step := _step_of(path)) is not None}
    if not steps or not (run / "config.yaml").exists():
        raise UserError(
            f"checkpoint={checkpoint}",
            "no run with a checkpoint there" if checkpoint.exists() else "no such folder",
            "type checkpoint=RUN or checkpoint=RUN/checkpoints/step-NNNNNNNN, where RUN is the folder of a run",
        )
    if other := _other_recipe(run):
        raise UserError(f"checkpoint={checkpoint}", f"a run of {other}", "type the folder of a run of hrm")
    return run, steps[max(steps)], max(steps)


def _other_recipe(run: Path) -> str | None:
    """The recipe that the run is of, if it is none of ours. A task of your own, made from HRM, may have any name."""
    recipes = {path.parent.name for path in Path(__file__).parents[1].glob("*/__init__.py")} - {"hrm"}
    with (run / "events.jsonl").open() as lines:
        told = [event["task"] for line in lines if (event := json.loads(line))["event"] == "start"]
    return next((name for name in recipes if told and told[-1].replace("_", "") == name.replace("_", "")), None)


def _step_of(path: Path) -> int | None:
    found = re.fullmatch(r"step-(\d+)", path.name)
    return int(found[1]) if found else None


def main(words: Sequence[str]) -> None:
    """Under torchrun one of several ranks, otherwise alone."""
    if {"--help", "-h"} & {*words}:
        print(help_text("usage: python evaluate.py checkpoint=RUN key=value ...", KEYS))
        return
    try:
        values = overrides(words)
        check_names(values, KEYS)
        if "checkpoint" not in values:
            raise UserError("a model to evaluate", "no checkpoint", "type checkpoint=runs/NAME")
        done = evaluate_checkpoint(Path(values.pop("checkpoint")), bool(values.pop("save_outputs", False)), **values)
    except UserError as error:
        print(f"evaluate: {in_own_words(str(error))}", file=sys.stderr)
        sys.exit(2)
    if os.environ.get("RANK", "0") == "0":
        found = done.summary["eval_metrics"]
        print("  ".join(f"{name} {value:.4f}" for name, value in sorted(found.items())))
