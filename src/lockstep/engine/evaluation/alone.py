"""An evaluation without training, for `lockstep evaluate`: there is a model with its driver, and no Run.

The evaluator is the one of training, so the same weights give the same numbers as during the run.
"""

from __future__ import annotations

from torch import nn

from lockstep.checkpoint.choose import checkpoints_at
from lockstep.checkpoint.manifest import EMA
from lockstep.checkpoint.manifest_reader import read_manifest
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.state.encoding import unpack
from lockstep.checkpoint.state.stateful import restore_parameter_tensors
from lockstep.checkpoint.storage.folder import Checkpoint
from lockstep.engine.evaluation.evaluator import MAX_EVALUATION_BATCH, Evaluation, evaluation_batch, evaluation_sets
from lockstep.engine.hooks.calls import Hooks
from lockstep.engine.hooks.view import BuiltRunView
from lockstep.engine.run import Run
from lockstep.engine.setup import RunBuilder
from lockstep.engine.trained_model import TrainedModel
from lockstep.errors import Preempted, UserError
from lockstep.parallel.meta.init import init_as_configured
from lockstep.task import Task


def evaluate(task: Task, builder: RunBuilder, global_batch: int | None) -> list[Evaluation]:
    """Evaluate the weights at `init_from` on the task's evaluation sets. Collective.

    `global_batch` is that of the run whose weights they are; the batch of an evaluation may follow from it.
    """
    config, runtime = builder.config, builder.runtime
    sets = evaluation_sets(task, config.evaluate.monitor)
    if not sets:
        raise UserError(
            "the task has nothing to evaluate: its eval_data() returns None", "", "return a dataset from eval_data()"
        )

    # The model, with the weights and the state that its evaluation may depend on.
    with init_as_configured(config):
        model = task.model()

    trained = builder.setup_model(model, task.optimizer, task, task.data)
    steps_done = _restore_more(task, trained, builder)

    # The loss may need what this hook keeps.
    Hooks(EvaluatedView(builder, trained, steps_done), task).before_training()

    # A file of weights does not say its global batch. We take the one that a run with these settings would have.
    local_batch = config.local_batch and config.local_batch * trained.driver.role.data_world.size
    batch = evaluation_batch(config, global_batch or config.global_batch or local_batch or MAX_EVALUATION_BATCH)
    with trained.averaged_weights():
        evaluations = trained.evaluator.evaluate(sets, batch, steps_done, may_preempt=True)

    # There is nothing to save: the command can be repeated.
    if evaluations is None:
        raise Preempted(steps_done, runtime.notice.signal or "SIGTERM", None)

    # The ranks end together, and the folder is free for another command.
    builder.recorder.close()
    runtime.collectives.final_barrier()
    builder.folder.release_lock()
    return evaluations


class EvaluatedView(BuiltRunView):
    """The argument of a task's `before_training` here, where there is a model and there are no steps."""

    def __init__(self, builder: RunBuilder, trained: TrainedModel, steps_done: int):
        super().__init__(builder)
        self._model = trained.driver.model
        self._steps_done = steps_done

    @property
    def steps_done(self) -> int:
        return self._steps_done

    @property
    def model(self) -> nn.Module:
        return self._model

    def _started(self, name: str) -> Run:
        raise UserError(
            f"run.{name} cannot be used in lockstep evaluate, which trains nothing",
            "",
            "use it in after_step(), which only training calls",
        )


def _restore_more(task: Task, trained: TrainedModel, builder: RunBuilder) -> int:
    """Restore the averages of the weights, and the task's own state, on which its evaluation may depend.

    Return the number of steps that trained the weights; 0 for a file.
    """
    assert builder.init_from is not None
    storage, name = checkpoints_at(builder.init_from)
    if name is None:
        return 0

    # `init_from` has verified its bytes.
    checkpoint = Checkpoint(storage, name)
    manifest = read_manifest(checkpoint)
    reader = CheckpointReader(checkpoint, manifest)

    # A run without averages left none. Those of the model are then equal to its weights.
    if trained.average:
        restore_parameter_tensors(EMA, trained.average, reader)

    saved = manifest.state_of("task")
    if saved and hasattr(task, "load_state_dict"):
        task.load_state_dict(unpack(saved, reader.read, builder.runtime.device))

    return manifest.step
