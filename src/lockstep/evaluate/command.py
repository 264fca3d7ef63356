"""The command `lockstep evaluate`: the evaluation of a task with the weights of a run, a checkpoint or a file.

It is the evaluation of training without the training: the same batches, the same sums, on any number of processes.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import api, targets
from lockstep.checkpoint.choose import choose, no_choice_error
from lockstep.checkpoint.storage.folder import CheckpointStorage, list_checkpoints
from lockstep.config import Layer, check, resolve_for
from lockstep.engine.checks.names import check_names
from lockstep.errors import UserError, shell_word
from lockstep.launch.job import Job, as_json, parse_nproc
from lockstep.launch.supervisor import supervise
from lockstep.observe.formats import columns, figures
from lockstep.run_folder.names import AVERAGED_WEIGHTS, EVALUATIONS, PLAN, WEIGHTS
from lockstep.run_folder.paths import RunPath, read_path
from lockstep.run_folder.run_dir import holds_a_run, new_run_dir, stored

if TYPE_CHECKING:
    from lockstep.engine.evaluation.evaluator import Evaluation

# What the ranks write into the folder of the evaluation.
RESULT = "evaluation.json"

# Settings of a run that its evaluation does not take over: where its weights came from, and where records went.
NOT_TAKEN_OVER = ("init_from", "weights.", "log.", "profile.", "checkpoint.", "stop.", "goals")

# The source of the settings that this command sets.
SOURCE = "lockstep evaluate"


@dataclass(frozen=True)
class EvaluateRequest:
    """What to evaluate."""

    target: str
    path: Path  # of a run, a checkpoint, or a file of weights
    step: int | None = None  # of the run's checkpoint
    best: bool = False  # the run's best checkpoint
    nproc: str | None = None
    json_file: Path | None = None  # a copy of the result


def main(request: EvaluateRequest, layers: list[Layer]) -> int:
    """Evaluate, print a table, and write the result as JSON. Return an exit code."""
    # What was typed is checked before anything is read or started.
    _check_order(request)
    targets.check(request.target)
    if targets.is_script(request.target):
        raise UserError(
            f"lockstep evaluate cannot evaluate the script {request.target}",
            "only the script itself knows its model, its data and its loss",
            "call run.evaluate(dataset, loss) in it, after run.setup: with "
            f"lockstep.start(init_from={str(request.path)!r}, evaluate={{'batch': 64}}) it needs no training; "
            "or write them as a task, and name FILE.py:CLASS",
        )

    if not request.path.exists():
        raise UserError(
            f"there is nothing to evaluate at {request.path}: no such file or folder",
            "",
            "name the folder of a run (`lockstep runs` lists them), a checkpoint, or a file of weights",
        )

    check(layers)
    check_names(layers)

    copy = request.json_file

    if copy is not None and not copy.absolute().parent.is_dir():
        raise UserError(
            f"--json {copy} cannot be written: its folder does not exist",
            "",
            f"mkdir -p {shell_word(copy.parent)}",
        )

    # The weights, and the run that they belong to, if they do.
    meant = read_path(request.path)
    weights = _weights(request, meant)
    run = meant.run if meant.run is not None and (meant.name or holds_a_run(meant.run)) else None

    # Next to the run that is evaluated, and not among the runs.
    parent = (run or Path("runs")) / EVALUATIONS

    asked = api.strongest_value(layers, "run_dir")
    run_dir = Path(asked) if asked else new_run_dir(weights.stem, make=True, parent=parent)

    # A run is evaluated with its own settings, unless they are typed again.
    if run is not None:
        layers = [*api.stored_layer(str(request.path), layers, leave_out=NOT_TAKEN_OVER), *layers]

    # The command has the last word about weights and folder.
    layers = [*layers, (SOURCE, {"init_from": str(weights), "run_dir": str(run_dir)})]

    # The batch of the run, so that its evaluations divide the data as during training.
    global_batch = stored(run, PLAN).get("global_batch") if run is not None else None
    spec = {"target": request.target, "layers": layers, "path": sys.path, "global_batch": global_batch}

    # Without --nproc this process evaluates; otherwise it launches ranks, which call `work`.
    if request.nproc is None:
        work(spec)
    else:
        job = Job(as_json(spec), run_dir, parse_nproc(request.nproc), entry="lockstep.evaluate.command:work")
        if code := supervise(job).ending.code:
            return code

    _show(run_dir, request.json_file)
    return 0


def _check_order(request: EvaluateRequest) -> None:
    """Refuse a target that comes before the run: say what is swapped."""
    first, second = str(request.path), request.target
    names_target = ":" in first or first in targets.recipes()
    if names_target and not request.path.exists() and Path(second).exists():
        raise UserError(
            f"the arguments are swapped: {second} is the run or the file of weights, and {first} the target",
            "",
            f"lockstep evaluate {shell_word(second)} {shell_word(first)}",
        )


def _weights(request: EvaluateRequest, meant: RunPath) -> Path:
    """Return the checkpoint or the file to read: of a run, its newest checkpoint unless another one is asked for."""
    path = request.path
    if meant.run is None or meant.name or not holds_a_run(meant.run):
        if request.best or request.step is not None:
            raise no_choice_error(path)

        return path

    # A run without checkpoints may still have its final weights. Training has evaluated their averages, if it had any.
    averages = meant.run / AVERAGED_WEIGHTS
    final = averages if averages.exists() else meant.run / WEIGHTS
    if (
        not request.best
        and request.step is None
        and not list_checkpoints(CheckpointStorage(meant.checkpoints))
        and final.exists()
    ):
        return final

    return choose(path, request.step, request.best).path


def work(spec: dict[str, Any]) -> None:
    """Evaluate in this process, which may be a rank. Rank 0 writes the result."""
    from lockstep.engine.evaluation.alone import evaluate

    sys.path += [folder for folder in spec["path"] if folder not in sys.path]
    task_class = targets.load_class(spec["target"])

    # The settings of the task's class are the weakest layer.
    layers = [(source, values) for source, values in spec["layers"]]
    resolved = resolve_for(task_class.defaults, task_class.presets, layers)
    task = targets.make_task(task_class, resolved.config.task)

    with api.running(resolved, targets.name_of(spec["target"]), task.unit) as builder:
        evaluations = evaluate(task, builder, spec["global_batch"])

        if builder.runtime.is_main:
            record = _record(evaluations, spec["target"], builder.config.init_from, builder.runtime.world.size)
            (builder.folder.path / RESULT).write_text(json.dumps(record, indent=2) + "\n")


def _record(evaluations: list[Evaluation], target: str, weights: str | None, world: int) -> dict[str, Any]:
    """Return the result: by set, the loss, the metrics, and how many samples they are of."""
    sets = {
        evaluation.name or "eval": {
            "loss": evaluation.loss,
            **evaluation.metrics,
            "samples": evaluation.samples,
            "weight": evaluation.weight,
        }
        for evaluation in evaluations
    }
    return {"target": target, "weights": weights, "step": evaluations[0].steps_done, "world": world, "sets": sets}


def _show(run_dir: Path, copy: Path | None) -> None:
    """Print the table, and write the copy that was asked for."""
    text = (run_dir / RESULT).read_text()
    record = json.loads(text)

    # One row for each set, one column for each number that some set has.
    names = list(dict.fromkeys(name for results in record["sets"].values() for name in results))

    rows = [[name, *(_cell(results.get(key)) for key in names)] for name, results in record["sets"].items()]

    print(columns([["set", *names], *rows]))
    print(f"weights  {record['weights']}")
    print(f"result   {os.path.relpath(run_dir / RESULT)}")

    if copy is not None:
        copy.write_text(text)


def _cell(value: Any) -> str:
    """Return a number with six digits; whole ones without a point."""
    whole = isinstance(value, int | float) and float(value).is_integer()
    return f"{value:.0f}" if whole else figures(value, 6)
