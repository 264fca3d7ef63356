"""The manager of a run's checkpoints: it makes the parts, and has the calls in which several of them take part.

    open                                 before the first step: claim the storage, and resume
    rewinder.ensure_checkpoint           before the first step: a policy that rewinds needs a checkpoint of the start
    prepare                              after the first step, so that the first save is as short as later saves
    pending.poll                         after each step: did the save in flight fail on this rank?
    decision.request_if_due, is_due      after each step: is a save due?
    decision.note_evaluation             after an evaluation
    save                                 between two steps
    pending.abort_if_failed              when the control word says that a rank failed to write its file
    rewinder.rewind                      when a step was not applied and the policy is rewind
    pending.settle                       at the end, and before the next save or a rewind
    check_owner                          before the weights are written
    best, close                          after that

All ranks call these at the same step. What one part does alone, the engine asks of that part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import torch

import lockstep
from lockstep.checkpoint.loading.resume import Resumed, Resumer
from lockstep.checkpoint.loading.rewind import Rewinder
from lockstep.checkpoint.preflight import check_room, check_same_names, check_store
from lockstep.checkpoint.retention import BestCheckpoint, best_checkpoint
from lockstep.checkpoint.saving.decision import SaveDecision
from lockstep.checkpoint.saving.draft import SaveContext
from lockstep.checkpoint.saving.outcome import SaveFailed
from lockstep.checkpoint.saving.pending import PendingSave, taken_over_error
from lockstep.checkpoint.saving.save import Saver
from lockstep.checkpoint.state.run_state import RunState
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
    """Saves and restores one run. Its parts are

    state        the state of the run
    decision     whether to save
    pending      the save in flight, until all ranks agree on its outcome
    rewinder     takes the run back to its last checkpoint during training
    """

    def __init__(
        self,
        folder: RunFolder,
        state: RunState,
        config: RunConfig,
        runtime: Runtime,
        log_event: EventLogger,
        update: Update,
        set_save_flag: Callable[[bool], None],
        fixed_settings: Collection[str] = (),
    ):
        """Keep references to the objects of a run. Nothing is read or written here.

        `update` waits, in the next step, until a save has copied the optimizers' state. `set_save_flag`: see
        `SaveDecision`. `fixed_settings`: see `Task`.
        """
        self._folder = folder
        self._config = config
        self._runtime = runtime
        self._log_event = log_event
        self._update = update
        self._storage = storage = CheckpointStorage.of_run(folder.path, config.checkpoint.store)
        self._context = context = SaveContext(
            storage=storage,
            rank=runtime.world.rank,
            world_size=runtime.world.size,
            token=folder.token,
            checkpoint_config=config.checkpoint,
            on_commit=folder.end_going_back,
        )
        self._saver = Saver(context)

        self.state = state
        self.pending = PendingSave(context, runtime, log_event, folder.as_shown)
        self.decision = SaveDecision(config, runtime, self.pending, context.all_metrics, log_event, set_save_flag)
        self._resumer = Resumer(folder, storage, state, self.pending, config, runtime, log_event, fixed_settings)
        self.rewinder = Rewinder(self._resumer)

    # ---- before the first step ----

    def open(self) -> Resumed | None:
        """Claim the storage, check that it can take checkpoints, and load the one from which the run starts, if any.

        Raise a UserError if the ranks do not save the same objects, if the store of the checkpoints keeps nothing, if
        the settings ask for checkpoints and there is no room for one, if the checkpoint cannot be loaded, or if the
        storage cannot be read or written for `checkpoint.timeout` seconds. Collective.
        """
        # Check this before anything is changed, and not at the first save, which may come hours later.
        check_same_names(self.state.registered, self._runtime)

        timeout_s = self._config.checkpoint.timeout
        problem = f"the checkpoints in {self._storage.root} cannot be claimed"
        retry_on_rank0(self._runtime, timeout_s, self._claim, problem)

        # Any run may save on request, so this is checked in all of them.
        check_store(self._storage, self._runtime, timeout_s)

        # A run that may never save does not need the room.
        if self.decision.settings_ask:
            check_room(self._storage, self.state, self._runtime, timeout_s, self._log_event)

        reader = self._resumer.find(self._folder.start_from)
        return None if reader is None else self._resumer.load(reader)

    def _claim(self) -> None:
        """Make this attempt the only writer. Rank 0 calls it, before any checkpoint is written.

        After an OSError it may be called again.
        """
        claim(self._storage, self._folder.token)

        # Free the space of what killed attempts left behind.
        delete_leftovers(self._storage, self._folder.token)

        # If rank 0 was killed right after a commit, `latest` names an older checkpoint.
        update_latest(self._storage)

    # ---- saving ----

    def prepare(self) -> None:
        """Allocate the buffer for snapshots early, so that the first save is as short as later saves. Collective.

        It holds all that this rank writes, in pinned memory, so a run that may never save does without it.
        """
        if self.decision.settings_ask:
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
            save = self._saver.copy_and_write(step, contents, metrics)
            save.stall_s = time.perf_counter() - began

        self.pending.note_begun(save)

        # The next update changes the optimizers' state, which may still be copied.
        self._update.before_next_update(save.wait_for_copy)

        self.decision.note_begun()
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
        except SaveFailed as failed:
            # If the checkpoints were deleted, no other attempt has the run.
            if failed.taken_over:
                raise taken_over_error(failed.reason) from None
        except OSError as error:
            raise UserError(
                f"the owner of the run cannot be read, so its files are not changed: {error}",
                "",
                fix_or_wait(WRITE_FIX),
            ) from error

    def best(self) -> BestCheckpoint | None:
        """Return the best committed checkpoint by `checkpoint.best`. Local. Raise OSError if one cannot be read now."""
        return best_checkpoint(self._context.all_metrics, self._config.checkpoint)

    def close(self, timeout: float = 0.0) -> None:
        """Give the save in flight `timeout` seconds to end, then abort it, and free the buffer. Local."""
        self.pending.close(timeout)
        self._saver.close()
