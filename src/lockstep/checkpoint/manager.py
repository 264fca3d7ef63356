"""The checkpoint manager: one object for everything that a run does with its checkpoints.

    resume                               before the first step
    rewinder.ensure_checkpoint           before the first step: a policy that rewinds needs a checkpoint of the start
    prepare                              after the first step, so that the first save is as short as later saves
    pending.poll                         after each step: did the save in flight fail on this rank?
    save_due, wants_save                 after each step: is a save due?
    pending.add_metrics, is_new_best     after an evaluation
    save                                 between two steps
    pending.abort_if_failed              when the control word says that a rank failed to write its file
    rewind                               when a step was not applied and the policy is rewind
    pending.settle                       at the end, and before the next save or a rewind
    best, last_location, pending.close   after that

`RunState.contents_of_rank` collects what a rank writes, `saving` writes it, and `loading` finds and loads a checkpoint.
All ranks call these methods at the same step. `pending` is the save in flight (`PendingSave`), and `rewinder` takes the
run back during training (`Rewinder`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from typing import Any

import torch

import lockstep
from lockstep.checkpoint.loading.resume import Resumed, Resumer
from lockstep.checkpoint.loading.rewind import Rewinder
from lockstep.checkpoint.preflight import check_room, check_same_names, check_store
from lockstep.checkpoint.retention import BestCheckpoint, best_checkpoint, score
from lockstep.checkpoint.saving.context import SaveContext
from lockstep.checkpoint.saving.outcome import SaveError, TakenOver
from lockstep.checkpoint.saving.pending import PendingSave, taken_over_error
from lockstep.checkpoint.saving.save import Saver
from lockstep.checkpoint.state.run_state import RunState
from lockstep.checkpoint.storage.checkpoint import Checkpoint
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.checkpoint.storage.retry import WRITE_FIX, fix_or_wait, retry_on_rank0
from lockstep.checkpoint.storage.transitions import claim, delete_leftovers, update_latest
from lockstep.config import RunConfig
from lockstep.config.changes import settings_as_text
from lockstep.errors import UserError
from lockstep.optim.optimizers import Update
from lockstep.plan.plan import Plan
from lockstep.run_folder.opened import RunFolder
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.seeds import reseed_at
from lockstep.task import StepResult


class CheckpointManager:
    """Saves and restores one run."""

    def __init__(
        self,
        folder: RunFolder,
        state: RunState,
        config: RunConfig,
        runtime: Runtime,
        log_event: EventLogger,
        update: Update,
        fixed_settings: Collection[str] = (),
    ):
        """Keep references to the objects of a run. Nothing is read or written here.

        `update` waits, in the next step, until a save has copied the optimizers' state. `fixed_settings`: see `Task`.
        """
        # The objects of the run.
        self.folder = folder
        self.state = state
        self.config = config
        self.runtime = runtime
        self.log_event = log_event
        self.update = update

        # The parts of this manager, each with one job.
        checkpoint_config = config.checkpoint
        self.storage = storage = CheckpointStorage.of_run(folder.path, checkpoint_config.store)
        self._context = SaveContext(
            storage=storage,
            rank=runtime.world.rank,
            world_size=runtime.world.size,
            token=folder.token,
            checkpoint_config=checkpoint_config,
            on_commit=folder.end_going_back,
        )
        self._saver = Saver(self._context, checkpoint_config.asynchronous)
        self.pending = PendingSave(self._saver, self._context, runtime, log_event, folder.as_shown)
        self._resumer = Resumer(folder, storage, state, config, runtime, log_event, fixed_settings)
        self.rewinder = Rewinder(state.source, config, self.pending, self._resumer, log_event)

        # When a checkpoint was last saved or loaded; before that, when the run began.
        self._last_time = time.monotonic()

    # ---- resuming ----

    def resume(self) -> Resumed | None:
        """Claim the storage, and load the checkpoint from which the run starts. Return None if there is none.

        Collective. Raise a UserError if the ranks do not save the same objects, if the store of the checkpoints keeps
        nothing, if the settings ask for checkpoints and there is no room for one, or if the storage cannot be read or
        written for `checkpoint.timeout` seconds.
        """
        # Check this before anything is changed, and not at the first save, which may come hours later.
        check_same_names(self.state.registered, self.runtime)

        problem = f"the checkpoints in {self.storage.root} cannot be claimed"
        retry_on_rank0(self.runtime, self.config.checkpoint.timeout, self._claim, problem)

        # Any run may save on request, so this is checked in all of them.
        check_store(self.storage, self.runtime, self.config.checkpoint.timeout)

        # A run that may never save does not need the room.
        if self._saves_by_settings():
            check_room(self.storage, self.state, self.runtime, self.config.checkpoint.timeout, self.log_event)

        reader = self._resumer.find(self.folder.start_from)
        if reader is None:
            return None

        resumed = self._resumer.load(reader)
        self.pending.note_loaded(resumed.own_step)
        self._last_time = time.monotonic()
        return resumed

    def _saves_by_settings(self) -> bool:
        """Return whether the settings ask for checkpoints. The user's code and signals may ask for more."""
        config = self.config.checkpoint
        return bool(config.every or config.minutes or config.at_end or config.best or self.rewinder.policy)

    def _claim(self) -> None:
        """Make this attempt the only writer. Rank 0 calls it, before any checkpoint is written.

        After an OSError it may be called again.
        """
        claim(self.storage, self.folder.token)

        # Free the space of what killed attempts left behind.
        delete_leftovers(self.storage, self.folder.token)

        # If rank 0 was killed right after a commit, `latest` names an older checkpoint.
        update_latest(self.storage)

    # ---- is a save due? ----

    def save_due(self, step: int, requested: bool) -> bool:
        """Return whether to save the state after `step` steps: it is `requested`, or due by `checkpoint.every`. Local.

        The same state is not saved twice, unless its first save was aborted.
        """
        if self.pending.has_step(step):
            return False

        every = self.config.checkpoint.every
        return requested or (every is not None and step % every == 0)

    def wants_save(self) -> bool:
        """Return whether rank 0 requests a save: after `checkpoint.minutes`, or because the last one failed. Local."""
        # Clocks differ between machines, so only rank 0's is used. The control word carries its request.
        if not self.runtime.is_main:
            return False

        minutes = self.config.checkpoint.minutes
        is_time = minutes is not None and time.monotonic() - self._last_time > 60 * minutes
        return is_time or self.pending.retry_due()

    def is_new_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether these metrics are better than all checkpoints' metrics, by `checkpoint.best`. Collective.

        All ranks get the same answer, because rank 0 alone looks at the checkpoints.
        """
        found = score(self.config.checkpoint, metrics)
        if found is None:
            return False

        best = self.runtime.collectives.run_on_rank0(self._best_score)
        return best is not None and found > best

    def _best_score(self) -> float | None:
        """Return the best score of all checkpoints and of the save in flight; -inf if none has a score. Local.

        Return None if the checkpoints cannot be listed or read, which must not end the run: the next evaluation tries
        again.
        """
        try:
            saved = self._context.metrics_cache.by_step()
        except OSError:
            return None

        scores = [score(self.config.checkpoint, metrics) for metrics in (*saved.values(), self.pending.metrics)]
        return max((found for found in scores if found is not None), default=-math.inf)

    # ---- rewinding ----

    def rewind(self, result: StepResult, span: tuple[int, int] | None) -> None:
        """Rewind to the last checkpoint, as `Rewinder.rewind` says. Collective."""
        self.rewinder.rewind(result, span)
        self._last_time = time.monotonic()

    # ---- saving ----

    def prepare(self) -> None:
        """Allocate the buffer for snapshots early, so that the first save is as short as later saves. Collective.

        It holds all that this rank writes, in pinned memory, so a run that may never save does without it.
        """
        if self._saves_by_settings():
            self._saver.reserve(self.state.shards_of(self.state.capture_tensors(), self.runtime))

    def save(self, step: int, plan: Plan, metrics: dict[str, float]) -> None:
        """Copy the state after `step` steps, and write it in the background while training continues. Collective.

        `metrics` are saved with the checkpoint; `checkpoint.best` compares them. Python's and numpy's generators get a
        new seed (`reseed_at`).
        """
        self.pending.settle()
        with self.runtime.heartbeat.visit("snapshot", step):
            contents = self.state.contents_of_rank(self.runtime, self.log_event, self._run_values(plan))
            save = self.pending.copy_and_write(step, contents, metrics)

        # The next update changes the optimizers' state, which may still be copied.
        self.update.before_next_update(save.wait_for_copy)

        self._last_time = time.monotonic()
        reseed_at(self.config.seed, step)

    def _run_values(self, plan: Plan) -> dict[str, Any]:
        """Return what the manifest says about the run besides its state: settings, plan, versions."""
        # The keys are part of the file format (see CONTRIBUTING).
        return {
            "config": settings_as_text(self.config),
            "plan": plan.as_record(),
            "world": self.runtime.world.size,
            "versions": {"lockstep": lockstep.__version__, "torch": str(torch.__version__)},
        }

    # ---- at the end ----

    def check_owner(self) -> None:
        """Raise a UserError if another attempt has taken over the run. Local: rank 0 calls it before it writes."""
        try:
            self._context.check_owner()
        except TakenOver as error:
            raise taken_over_error(str(error)) from None
        except SaveError:
            pass  # somebody has deleted the checkpoints: nobody else has the run
        except OSError as error:
            raise UserError(
                f"the owner of the run cannot be read, so its files are not changed: {error}",
                "",
                fix_or_wait(WRITE_FIX),
            ) from error

    def best(self) -> BestCheckpoint | None:
        """Return the best committed checkpoint by `checkpoint.best`. Local. Raise OSError if one cannot be read now."""
        return best_checkpoint(self._context.metrics_cache, self.config.checkpoint)

    def last_location(self) -> str | None:
        """Return where the last committed checkpoint of this run is; None if there is none. Local."""
        step = self.pending.last_committed
        return None if step is None else str(Checkpoint.of(self.storage, step).path)
