"""The checkpoint manager: one object for everything that a run does with its checkpoints.

    resume                               before the first step
    ensure_rewind_checkpoint             before the first step: a policy that rewinds needs a checkpoint of the start
    prepare                              after the first step, so that the first save is as short as the others
    poll                                 after each step: did the save in flight fail on this rank?
    save_due, due_by_clock               after each step: is a save due?
    is_new_best                          after an evaluation
    save                                 between two steps
    abort_if_failed                      when the control word says that a rank failed to write its file
    rewind                               when a step was not applied and the policy is rewind
    settle, best, last_location, close   at the end

`state/contents.py` collects what a rank writes, `saving` writes it, and `resume.py` loads a checkpoint. All ranks call
these methods at the same step. `poll`, `save_due`, `due_by_clock`, `best`, `last_location` and `close` are local; all
others are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

import lockstep
from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.loop_state import LoopState
from lockstep.checkpoint.resume import Resumed, Resumer
from lockstep.checkpoint.retention import BestCheckpoint, Retention, best_checkpoint
from lockstep.checkpoint.saving.context import SaveContext
from lockstep.checkpoint.saving.pending import PendingSave
from lockstep.checkpoint.saving.saver import Saver
from lockstep.checkpoint.schedule import SaveSchedule
from lockstep.checkpoint.state.contents import ContentsCollector
from lockstep.checkpoint.state.run_state import RunState
from lockstep.checkpoint.storage import Checkpoint, CheckpointStorage, update_latest
from lockstep.config import RunConfig
from lockstep.config.changes import settings_as_text
from lockstep.errors import UserError, plural
from lockstep.launch.folder.checkpoint_names import LATEST, folder_name, step_in
from lockstep.launch.folder.start_from import Beginning, GoBack, Named, Newest
from lockstep.observe.run_folder import RunFolder
from lockstep.plan.plan import Plan
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.seeds import derive, seed_host
from lockstep.task import BatchSource, StepResult


class CheckpointManager:
    """Saves and restores one run."""

    def __init__(
        self,
        folder: RunFolder,
        storage: CheckpointStorage,
        state: RunState,
        config: RunConfig,
        plan: Plan,
        runtime: Runtime,
        log_event: EventLogger,
        before_next_update: Callable[[Callable[[], None]], None],
    ):
        """Keep references to the objects of a run. Nothing is read or written here.

        `log_event(event, **fields)` logs an event. `before_next_update(wait)` has the next update call `wait` first.
        """
        # The objects of the run.
        self.folder = folder
        self.storage = storage
        self.state = state
        self.config = config
        self.plan = plan
        self.runtime = runtime
        self.log_event = log_event
        self.before_next_update = before_next_update

        # The parts of this manager, each with one job.
        settings = config.checkpoint
        self._retention = Retention(
            keep=settings.keep, keep_every=settings.keep_every, best=settings.best, best_mode=settings.best_mode
        )
        self._schedule = SaveSchedule(settings, self._retention, storage, runtime)
        self._contents = ContentsCollector(state, runtime, log_event)
        self._saver = Saver(self._save_context(), settings.asynchronous)
        self._pending = PendingSave(self._saver, storage, runtime, log_event, folder.as_shown)
        self._resumer = Resumer(storage, state, config, runtime, log_event)

        self._rewinds = 0  # since the last committed checkpoint

    def _save_context(self) -> SaveContext:
        """Return what all saves of this run have in common."""
        # All ranks write. The token distinguishes their files from those of an earlier attempt.
        world = self.runtime.world
        token, on_commit = self.folder.token, self.folder.end_going_back
        return SaveContext(self.storage, world.rank, world.size, token, self._retention, on_commit=on_commit)

    # ---- resuming ----

    def resume(self) -> Resumed | None:
        """Claim the folder, and load the checkpoint from which the run starts. Return None if there is none."""
        if self.runtime.is_main:
            self._claim()

        reader = self._find_start()
        return None if reader is None else self._load(reader)

    def _find_start(self) -> CheckpointReader | None:
        """Return the checkpoint that the run's start names, None if it starts from the beginning. Collective."""
        match self.folder.start_from:
            case Beginning():
                return None

            case Named(path) | GoBack(path):
                return self._resumer.find_named(path)

            case Newest(otherwise):
                reader = self._resumer.find_newest()
                if reader is None and otherwise:
                    return self._resumer.find_named(otherwise)

                return reader

    def _load(self, reader: CheckpointReader) -> Resumed:
        """Load a checkpoint, and note what follows from it for later saves. Collective."""
        resumed = self._resumer.load(reader)

        # If it was another run's, a later attempt must load it again, until this run has saved one of its own.
        step = resumed.steps_done if resumed.in_own_folder else None
        self._schedule.loaded(step)
        self._pending.last_committed = step

        if self.runtime.is_main and resumed.in_own_folder:
            self.folder.end_going_back()

        return resumed

    def _claim(self) -> None:
        """Make this attempt the only writer. Rank 0 calls it, before any checkpoint is written."""
        self.storage.claim(self.folder.token)

        # If this attempt fails before it has gone back, the launcher announces this checkpoint. A checkpoint that was
        # set aside is not announced, because its name is not that of a step.
        start = self.folder.start_from
        goes_back_to = start.path.resolve().name if isinstance(start, GoBack) else ""

        if step_in(goes_back_to) is not None:
            self.storage.replace(LATEST, f"{goes_back_to}\n".encode())
        elif self.folder.attempt == 0:
            update_latest(self.storage)

    # ---- rewinding ----

    def ensure_rewind_checkpoint(self, save: Callable[[], None]) -> None:
        """If a policy is rewind and there is no checkpoint to go back to, call `save`."""
        policies = {"nonfinite.policy": self.config.nonfinite.policy, "spike.policy": self.config.spike.policy}
        policy = next((key for key, value in policies.items() if value == "rewind"), None)
        if policy is None:
            return

        self._check_can_skip(policy)
        if self._pending.last_committed is not None:
            return

        # The run goes back to this checkpoint if a step before the next save is not applied.
        save()
        if not self.settle():
            raise UserError(
                f"{policy}=rewind needs a checkpoint of the start, which could not be written",
                "",
                f"make room on the disk, or set {policy}=skip",
            )

    def _check_can_skip(self, policy: str) -> None:
        """Raise if the data source cannot leave out the samples of a step, as `policy`=rewind requires."""
        source = type(self.state.source)
        if source.skip is BatchSource.skip:
            raise UserError(
                f"{policy}=rewind cannot be used with this data, which cannot skip samples",
                f"the data is read by a {source.__name__}, which has no method skip",
                f"set {policy}=skip, or {policy}=stop",
            )

    def rewind(self, result: StepResult, span: tuple[int, int] | None) -> Resumed:
        """Go back to the last checkpoint, and from now on skip the samples of the step that was not applied.

        `span`: their positions in the order of the data, as (start, stop).
        """
        # The save in flight may become the last checkpoint.
        self.settle()
        self._count_rewind(result)

        reader = self._resumer.find_newest()
        if reader is None:
            raise UserError(
                f"step {result.step} was not applied, and the run cannot rewind: it has no checkpoint",
                result.skip_reason or "",
                "make room on the disk, or choose the policy skip or stop",
            )

        # `_load` resets the source, but samples that were skipped since the checkpoint must stay skipped.
        source = self.state.source
        assert span is not None
        skipped_spans = [*source.skipped_spans, span]

        resumed = self._load(reader)
        for skipped_span in skipped_spans:
            source.skip(skipped_span)

        start, stop = span
        skipped = f"{plural(stop - start, 'sample')} at positions {start} to {stop - 1}"
        self.log_event("rewind", step=result.step, to=resumed.steps_done, reason=result.skip_reason, skipped=skipped)
        return resumed

    def _count_rewind(self, result: StepResult) -> None:
        """Count a rewind, and raise if there were too many since the last checkpoint."""
        # Without a limit, a run whose steps fail for some reason other than their samples would rewind forever.
        self._rewinds += 1
        limit = self.config.nonfinite.max_in_a_row
        if self._rewinds > limit:
            raise UserError(
                f"step {result.step} was not applied, and the run has rewound {limit} times without a new checkpoint "
                f"(nonfinite.max_in_a_row={limit})",
                result.skip_reason or "",
                "lower lr.peak, set clip.norm, or look at the samples that the events name",
            )

    # ---- is a save due? ----

    def save_due(self, steps_done: int, requested: bool) -> bool:
        """Whether to save now: `SaveSchedule.due` has the rule. Local."""
        return self._schedule.due(steps_done, requested)

    def due_by_clock(self) -> bool:
        """Whether rank 0's clock requests a save; the control word carries the request. Local."""
        return self._schedule.due_by_clock()

    def is_new_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether these metrics are better than those of all checkpoints by `checkpoint.best`. Collective."""
        return self._schedule.is_new_best(metrics)

    # ---- saving ----

    def prepare(self) -> None:
        """Allocate the buffer for snapshots early, so that the first save is as short as the others."""
        self._saver.prepare(self._contents.shards())

    def save(self, steps_done: int, loop: LoopState, metrics: dict[str, float]) -> None:
        """Copy the state after `steps_done` steps, and write it in the background while training continues.

        `metrics` are saved with the checkpoint; `checkpoint.best` compares them. Also reseeds Python's and numpy's
        generators, as a resume does.
        """
        self.settle()
        with self.runtime.heartbeat.visit("snapshot", steps_done):
            self._pending.start(steps_done, self._contents.collect(self._run_values(loop, metrics)))

        # An update must wait until the optimizers' state has been copied.
        self.before_next_update(self._saver.wait_for_copy)

        self._schedule.started(steps_done, metrics)
        seed_host(derive(self.config.seed, "checkpoint", steps_done))

    def _run_values(self, loop: LoopState, metrics: dict[str, float]) -> dict[str, Any]:
        """Return what the manifest says about the run: settings, plan, versions, loop, metrics."""
        # The keys are part of the file format (see CONTRIBUTING).
        return {
            "config": settings_as_text(self.config),
            "plan": self.plan.as_record(),
            "world": self.runtime.world.size,
            "versions": {"lockstep": lockstep.__version__, "torch": str(torch.__version__)},
            "loop": asdict(loop),
            "metrics": metrics,
        }

    def poll(self) -> bool:
        """Log a save that is committed by now. Return whether it failed on this rank, for the control word. Local."""
        return self._pending.poll()

    def settle(self) -> bool:
        """Wait until the save in flight is committed, or aborted on all ranks. Return False if this call aborted it.

        If no save is in flight, this returns True at once, even if the last one was aborted earlier.
        """
        if self._pending.steps_done is None:
            return True

        if not self._pending.settle():
            self._schedule.aborted()
            return False

        # Only a committed checkpoint lets the run rewind as often again.
        self._rewinds = 0
        return True

    def abort_if_failed(self) -> bool:
        """Abort the save in flight on all ranks if it failed on any of them. Return whether it was aborted."""
        aborted = self._pending.abort_if_failed()
        if aborted:
            self._schedule.aborted()

        return aborted

    # ---- at the end ----

    def best(self) -> BestCheckpoint | None:
        """Return the best committed checkpoint by `checkpoint.best`."""
        return best_checkpoint(self.storage, self._retention)

    def last_location(self) -> str | None:
        """Return where the last committed checkpoint of this run is; None if there is none."""
        step = self._pending.last_committed
        return None if step is None else Checkpoint(self.storage, folder_name(step)).location

    def close(self, timeout: float = 0.0) -> None:
        """End the saves. One that is being written gets `timeout` seconds to finish."""
        self._pending.close(timeout)
