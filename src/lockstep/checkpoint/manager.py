"""The checkpoint manager: it makes the objects with which a run saves and restores itself, and carries out a save.

    open, resume                         before the first step
    rewinder.ensure_checkpoint           before the first step: a policy that rewinds needs a checkpoint of the start
    prepare                              after the first step, so that the first save is as short as later saves
    pending.poll                         after each step: did the save in flight fail on this rank?
    decision.ask_if_due, is_due          after each step: is a save due?
    evaluated                            after an evaluation
    save                                 between two steps
    pending.abort_if_failed              when the control word says that a rank failed to write its file
    rewinder.rewind                      when a step was not applied and the policy is rewind
    pending.settle                       at the end, and before the next save or a rewind
    check_owner                          before the weights are written
    best, last_location, close           after that

All ranks call these at the same step. The engine uses four of the objects itself: `state` is the state of the run
(`RunState`), `decision` decides whether to save (`SaveDecision`), `pending` is the save in flight (`PendingSave`), and
`rewinder` takes the run back during training (`Rewinder`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

import lockstep
from lockstep.checkpoint.loading.resume import Resumed, Resumer
from lockstep.checkpoint.loading.rewind import Rewinder
from lockstep.checkpoint.preflight import check_room, check_same_names, check_store
from lockstep.checkpoint.retention import BestCheckpoint, best_checkpoint, score
from lockstep.checkpoint.saving.context import SaveContext
from lockstep.checkpoint.saving.decision import SaveDecision
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
        ask_for_save: Callable[[bool], None],
        fixed_settings: Collection[str] = (),
    ):
        """Keep references to the objects of a run. Nothing is read or written here.

        `update` waits, in the next step, until a save has copied the optimizers' state. `ask_for_save`: see
        `SaveDecision`. `fixed_settings`: see `Task`.
        """
        # The objects of the run.
        self.state = state
        self._folder = folder
        self._config = config
        self._runtime = runtime
        self._log_event = log_event
        self._update = update
        self._said_best_unknown = False  # whether a warning says that the best checkpoint cannot be looked up

        # The parts of this manager, each with one job.
        self._storage = storage = CheckpointStorage.of_run(folder.path, config.checkpoint.store)
        self._context = SaveContext(
            storage=storage,
            rank=runtime.world.rank,
            world_size=runtime.world.size,
            token=folder.token,
            checkpoint_config=config.checkpoint,
            on_commit=folder.end_going_back,
        )
        self._saver = Saver(self._context)
        self.pending = PendingSave(self._context, runtime, log_event, folder.as_shown)
        self.decision = SaveDecision(config, runtime, self.pending, ask_for_save)
        self._resumer = Resumer(folder, storage, state, config, runtime, log_event, fixed_settings)
        self.rewinder = Rewinder(state.source, config, self.pending, self._resumer, log_event)

    # ---- before the first step ----

    def open(self) -> None:
        """Claim the storage, and check that it can take checkpoints. Collective.

        Raise a UserError if the ranks do not save the same objects, if the store of the checkpoints keeps nothing, if
        the settings ask for checkpoints and there is no room for one, or if the storage cannot be read or written for
        `checkpoint.timeout` seconds.
        """
        # Check this before anything is changed, and not at the first save, which may come hours later.
        check_same_names(self.state.registered, self._runtime)

        timeout_s = self._config.checkpoint.timeout
        problem = f"the checkpoints in {self._storage.root} cannot be claimed"
        retry_on_rank0(self._runtime, timeout_s, self._claim, problem)

        # Any run may save on request, so this is checked in all of them.
        check_store(self._storage, self._runtime, timeout_s)

        # A run that may never save does not need the room.
        if self.decision.by_settings:
            check_room(self._storage, self.state, self._runtime, timeout_s, self._log_event)

    def _claim(self) -> None:
        """Make this attempt the only writer. Rank 0 calls it, before any checkpoint is written.

        After an OSError it may be called again.
        """
        claim(self._storage, self._folder.token)

        # Free the space of what killed attempts left behind.
        delete_leftovers(self._storage, self._folder.token)

        # If rank 0 was killed right after a commit, `latest` names an older checkpoint.
        update_latest(self._storage)

    def resume(self) -> Resumed | None:
        """Load the checkpoint from which the run starts. Return None if there is none. Call `open` first. Collective.

        Raise a UserError if it cannot be loaded, or cannot be read for `checkpoint.timeout` seconds.
        """
        reader = self._resumer.find(self._folder.start_from)
        if reader is None:
            return None

        resumed = self._resumer.load(reader)
        self.pending.note_loaded(resumed.own_step)
        return resumed

    # ---- after an evaluation ----

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation to the checkpoint of this step, or save it if they are the best. Collective.

        The best checkpoint belongs to the best evaluation, so it is saved now, and not when the next save is due.
        """
        if not self.pending.add_metrics(step, metrics) and self._is_new_best(metrics):
            self.decision.agree()

    def _is_new_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether these metrics are better than all checkpoints' metrics, by `checkpoint.best`. Collective.

        All ranks get the same answer, because rank 0 alone looks at the checkpoints.
        """
        found = score(self._config.checkpoint, metrics)
        if found is None:
            return False

        best = self._runtime.collectives.run_on_rank0(self._best_score)
        return best is not None and found > best

    def _best_score(self) -> float | None:
        """Return the best score of all checkpoints and of the save in flight; -inf if none has a score. Local.

        Return None if the checkpoints cannot be listed or read, which must not end the run: the next evaluation tries
        again. A warning says so, once until they can be read again.
        """
        try:
            saved = self._context.metrics_cache.by_step()
        except OSError as error:
            if not self._said_best_unknown:
                reason = f"the last evaluation may be the best so far, but is not saved: {error}"
                self._log_event("warning", reason=reason)
                self._said_best_unknown = True

            return None

        self._said_best_unknown = False
        scores = [score(self._config.checkpoint, metrics) for metrics in (*saved.values(), self.pending.metrics)]
        return max((found for found in scores if found is not None), default=-math.inf)

    # ---- saving ----

    def prepare(self) -> None:
        """Allocate the buffer for snapshots early, so that the first save is as short as later saves. Collective.

        It holds all that this rank writes, in pinned memory, so a run that may never save does without it.
        """
        if self.decision.by_settings:
            self._saver.reserve(self.state.shards_of(self.state.capture_tensors(), self._runtime))

    def save(self, step: int, plan: Plan, metrics: dict[str, float]) -> None:
        """Copy the state after `step` steps, and write it in the background while training continues. Collective.

        `metrics` are saved with the checkpoint; `checkpoint.best` compares them. Python's and numpy's generators get a
        new seed (`reseed_at`).
        """
        began = time.perf_counter()
        self.pending.settle()
        with self._runtime.heartbeat.visit("snapshot", step):
            contents = self.state.contents_of_rank(self._runtime, self._log_event, self._about_run(plan))
            waited = time.perf_counter() - began
            save = self._saver.copy_and_write(step, contents, metrics)
            save.stall_s += waited

        self.pending.note_begun(save)

        # The next update changes the optimizers' state, which may still be copied.
        self._update.before_next_update(save.wait_for_copy)

        self.decision.carried_out()
        reseed_at(self._config.seed, step)

    def _about_run(self, plan: Plan) -> dict[str, Any]:
        """Return what the manifest says about the run besides its state: settings, plan, versions."""
        # The keys are part of the file format (see CONTRIBUTING).
        return {
            "config": settings_as_text(self._config),
            "plan": plan.as_record(),
            "world": self._runtime.world.size,
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
            pass  # the checkpoints were deleted, and no other attempt has the run
        except OSError as error:
            raise UserError(
                f"the owner of the run cannot be read, so its files are not changed: {error}",
                "",
                fix_or_wait(WRITE_FIX),
            ) from error

    def best(self) -> BestCheckpoint | None:
        """Return the best committed checkpoint by `checkpoint.best`. Local. Raise OSError if one cannot be read now."""
        return best_checkpoint(self._context.metrics_cache, self._config.checkpoint)

    def last_location(self) -> str | None:
        """Return where the last committed checkpoint of this run is; None if there is none. Local."""
        step = self.pending.last_committed
        return None if step is None else str(Checkpoint.of(self._storage, step).path)

    def close(self, timeout: float = 0.0) -> None:
        """Give the save in flight `timeout` seconds to end, then abort it, and free the buffer. Local."""
        self.pending.close(timeout)
        self._saver.close()
