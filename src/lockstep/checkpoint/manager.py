"""The checkpoint manager: one object for everything that a run does with its checkpoints.

    resume                               before the first step
    ensure_rewind_checkpoint             before the first step: a policy that rewinds needs a checkpoint of the start
    prepare                              after the first step, so that the first save is as short as the others
    poll_save                            after each step: did the save in flight fail on this rank?
    save_due, due_by_clock               after each step: is a save due?
    add_metrics, is_new_best             after an evaluation
    save                                 between two steps
    abort_if_failed                      when the control word says that a rank failed to write its file
    rewind                               when a step was not applied and the policy is rewind
    settle                               at the end, and before the next save or a rewind
    best, last_location, close           after that

`RunState.contents` collects what a rank writes, `saving` writes it, and `resume.py` loads a checkpoint. All ranks call
these methods at the same step.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from rich.filesize import decimal as size_text

import lockstep
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.resume import Resumed, Resumer
from lockstep.checkpoint.retention import BestCheckpoint, Retention, best_checkpoint
from lockstep.checkpoint.saving.context import SaveContext
from lockstep.checkpoint.saving.pending import PendingSave, Settled
from lockstep.checkpoint.saving.save import Saver
from lockstep.checkpoint.state.run_state import RunState
from lockstep.checkpoint.storage import Checkpoint, CheckpointStorage, claim, delete_leftovers, update_latest
from lockstep.checkpoint.storage.together import retry_on_rank0
from lockstep.config import RunConfig
from lockstep.config.changes import settings_as_text
from lockstep.errors import UserError, plural
from lockstep.observe.run_folder import RunFolder
from lockstep.optim.optimizers import Update
from lockstep.plan.plan import Plan
from lockstep.run_folder.names import CHECKPOINTS
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.seeds import reseed_at
from lockstep.task import BatchSource, StepResult


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

        `update`: it must wait until a save has copied the optimizers' state. `fixed_settings`: see `Task`.
        """
        # The objects of the run.
        self.folder = folder
        self.state = state
        self.config = config
        self.runtime = runtime
        self.log_event = log_event
        self.update = update

        # The objects that this manager is made of, each with one job.
        settings = config.checkpoint
        self.storage = storage = CheckpointStorage(folder.path / CHECKPOINTS, settings.storage)
        self._retention = Retention.from_settings(settings)
        self._context = SaveContext(
            storage=storage,
            rank=runtime.world.rank,
            world_size=runtime.world.size,
            token=folder.token,
            retention=self._retention,
            timeout_s=settings.timeout,
            on_commit=folder.end_going_back,
        )
        self._saver = Saver(self._context, settings.asynchronous)
        self._pending = PendingSave(self._saver, self._context, runtime, log_event, folder.as_shown)
        self._resumer = Resumer(storage, state, config, runtime, log_event, fixed_settings)

        # When a checkpoint was last saved or loaded, or else the run began.
        self._last_time = time.monotonic()

        # How many times the run has returned to each of its checkpoints, by step.
        self._rewinds: Counter[int] = Counter()

    # ---- resuming ----

    def resume(self) -> Resumed | None:
        """Claim the storage, and load the checkpoint from which the run starts. Return None if there is none.

        Collective. Raise a UserError if a checkpoint will be saved and there is no room for it, or its store keeps
        nothing, or if the storage cannot be read or written for `checkpoint.timeout` seconds.
        """
        settings = self.config.checkpoint
        retry_on_rank0(self.storage, self.runtime, settings.timeout, self._claim, "claimed")

        if settings.every is not None or settings.minutes is not None or settings.at_end:
            self._check_store()
            self._check_room()

        reader = self._resumer.find(self.folder.start_from)
        return None if reader is None else self._load(reader)

    def _check_store(self) -> None:
        """Raise an error if the store for tensors cannot keep anything: every save would fail. Collective."""
        url = self.storage.url
        if not url:
            return

        timeout_s = self.config.checkpoint.timeout
        missing = retry_on_rank0(self.storage, self.runtime, timeout_s, self._try_store, f"kept in {url}")
        if missing:
            fix = "set checkpoint.storage to a store that exists, or leave it out: checkpoints are then in run_dir"
            raise UserError(f"the checkpoints of this run cannot be kept in {url}", missing, fix)

    def _try_store(self) -> str | None:
        """Try the store on rank 0. Return why waiting for it would be in vain, or None. Raises other OSErrors."""
        try:
            self.storage.try_store()
        except (FileNotFoundError, NotADirectoryError) as error:
            return str(error)

        return None

    def _check_room(self) -> None:
        """Raise an error if there is no room for the weights, and warn if two checkpoints do not fit. Collective."""
        # The optimizers allocate their state later, so its size is an estimate.
        sizes = self.state.bytes_at_start()

        # All ranks use rank 0's numbers, so that either all of them raise or none does.
        timeout_s = self.config.checkpoint.timeout
        free, known, estimate = retry_on_rank0(
            self.storage, self.runtime, timeout_s, lambda: [self.storage.free_bytes(), *sizes], "measured"
        )
        if free is None:
            return

        if free < known:
            raise UserError(
                f"there is no room for a checkpoint in {self.storage.location}: {size_text(free)} free",
                f"{size_text(known)} needed for the weights alone",
                f"free {size_text(known + estimate - free)}, or set run_dir=FOLDER on another disk",
            )

        # The old checkpoint is deleted only when the new one is committed.
        needed = 2 * (known + estimate)
        if free < needed:
            self.log_event(
                "warning",
                reason=f"the disk has {size_text(free)} free, but replacing a checkpoint by the next one needs room "
                f"for two, about {size_text(needed)}",
            )

    def _load(self, reader: CheckpointReader) -> Resumed:
        """Load a checkpoint, and note what follows from it for later saves. Collective."""
        resumed = self._resumer.load(reader)

        # If it was another run's, a later attempt must load it again, until this run has saved one of its own.
        self._pending.last_committed = resumed.steps_done if resumed.is_own else None
        self._last_time = time.monotonic()

        if self.runtime.is_main and resumed.is_own:
            self.folder.end_going_back()

        return resumed

    def _claim(self) -> None:
        """Make this attempt the only writer. Rank 0 calls it, before any checkpoint is written.

        Raises OSError. If it is called again after that, it does the rest.
        """
        claim(self.storage, self.folder.token)

        # Free the space of what killed attempts left behind.
        delete_leftovers(self.storage, self.folder.token)

        # A kill after a commit may have left it behind.
        update_latest(self.storage)

    # ---- rewinding ----

    def ensure_rewind_checkpoint(self, save: Callable[[], None]) -> None:
        """If a policy is rewind and there is no checkpoint to go back to, call `save`. Collective."""
        policies = {"nonfinite.policy": self.config.nonfinite.policy, "spike.policy": self.config.spike.policy}
        policy = next((key for key, value in policies.items() if value == "rewind"), None)
        if policy is None:
            return

        self._check_can_skip(policy)
        if self._pending.last_committed is not None:
            return

        # The run goes back to this checkpoint if a step before the next save is not applied.
        save()
        if self.settle() == "aborted":
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
        """Go back to the last checkpoint. From now on skip the samples of the step that was not applied. Collective.

        `span`: their positions in the order of the data, as (start, stop).
        """
        # The save in flight may become the last checkpoint.
        self.settle()

        reader = self._resumer.find_newest()
        if reader is None:
            raise UserError(
                f"step {result.step} was not applied, and the run cannot rewind: it has no checkpoint",
                result.skip_reason or "",
                "make room on the disk, or choose the policy skip or stop",
            )

        self._count_rewind(result, reader.manifest.step)

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

    def _count_rewind(self, result: StepResult, to: int) -> None:
        """Count a rewind to the checkpoint of step `to`, and raise if there were too many without a new one."""
        # Without a limit, a run whose steps fail for some reason other than their samples would rewind forever.
        self._rewinds[to] += 1
        limit = self.config.nonfinite.max_in_a_row
        if self._rewinds[to] > limit:
            raise UserError(
                f"step {result.step} was not applied, and the run has rewound {limit} times without a new checkpoint "
                f"(nonfinite.max_in_a_row={limit})",
                result.skip_reason or "",
                "lower lr.peak, set clip.norm, or look at the samples that the events name",
            )

    # ---- is a save due? ----

    def save_due(self, steps_done: int, requested: bool) -> bool:
        """Whether to save now: a rank `requested` it, or `steps_done` is a multiple of `checkpoint.every`. Local.

        The same state is not saved twice, unless its first save was aborted.
        """
        if self._pending.has_step(steps_done):
            return False

        every = self.config.checkpoint.every
        return requested or (every is not None and steps_done % every == 0)

    def due_by_clock(self) -> bool:
        """Whether rank 0 requests a save: after `checkpoint.minutes`, or because the last save failed. Local."""
        # Clocks differ between machines, so only rank 0's is used. The control word carries its request.
        if not self.runtime.is_main:
            return False

        minutes = self.config.checkpoint.minutes
        is_time = minutes is not None and time.monotonic() - self._last_time > 60 * minutes
        return is_time or self._pending.retry_due()

    def is_new_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether these metrics are better than those of all checkpoints by `checkpoint.best`. Collective.

        All ranks get the same answer, because rank 0 alone looks at the checkpoints.
        """
        score = self._retention.score(metrics)
        if score is None:
            return False

        best = self.runtime.collectives.run_on_rank0(self._best_score)
        return best is not None and score > best

    def _best_score(self) -> float | None:
        """Return the best score of all checkpoints and of the save in flight; -inf if none has a score. Local.

        Return None if the checkpoints cannot be listed or read, which must not end the run: the next evaluation tries
        again.
        """
        try:
            saved = self._context.metrics.by_step()
        except OSError:
            return None

        in_flight = self._pending.save
        all_metrics = [*saved.values(), in_flight.metrics] if in_flight else saved.values()
        scores = [self._retention.score(metrics) for metrics in all_metrics]
        return max((score for score in scores if score is not None), default=-math.inf)

    # ---- saving ----

    def prepare(self) -> None:
        """Allocate the buffer for snapshots early, so that the first save is as short as the others. Collective."""
        self._saver.prepare(self.state.shards_of(self.state.capture_tensors().tensors, self.runtime))

    def save(self, steps_done: int, plan: Plan, metrics: dict[str, float]) -> None:
        """Copy the state after `steps_done` steps, and write it in the background while training continues. Collective.

        `metrics` are saved with the checkpoint; `checkpoint.best` compares them. Python's and numpy's generators get a
        new seed (`reseed_at`).
        """
        self.settle()
        with self.runtime.heartbeat.visit("snapshot", steps_done):
            contents = self.state.contents(self.runtime, self.log_event, self._run_values(plan, metrics))
            save = self._pending.start(steps_done, contents)

        # The next update changes the optimizers' state, which may still be copied.
        self.update.before_next_update(save.wait_for_copy)

        self._last_time = time.monotonic()
        reseed_at(self.config.seed, steps_done)

    def poll_save(self) -> bool:
        """Follow up a save that is committed by now. Return whether it failed on this rank, for the control word."""
        return self._pending.poll()

    def abort_if_failed(self) -> None:
        """Abort the save in flight on all ranks if it failed on any of them. Collective."""
        self._pending.abort_if_failed()

    def settle(self) -> Settled:
        """Wait until the save in flight is committed, or aborted on all ranks. Collective."""
        return self._pending.settle()

    def add_metrics(self, steps_done: int, metrics: Mapping[str, float]) -> bool:
        """Add the metrics of an evaluation to the checkpoint of this step. Return False if there is none yet. Local."""
        return self._pending.add_metrics(steps_done, metrics)

    def _run_values(self, plan: Plan, metrics: dict[str, float]) -> dict[str, Any]:
        """Return what the manifest says about the run besides its state: settings, plan, versions, metrics."""
        # The keys are part of the file format (see CONTRIBUTING).
        return {
            "config": settings_as_text(self.config),
            "plan": plan.as_record(),
            "world": self.runtime.world.size,
            "versions": {"lockstep": lockstep.__version__, "torch": str(torch.__version__)},
            "metrics": metrics,
        }

    # ---- at the end ----

    def best(self) -> BestCheckpoint | None:
        """Return the best committed checkpoint by `checkpoint.best`. Local; raises OSError if it cannot look now."""
        return best_checkpoint(self._context.metrics, self._retention)

    def last_location(self) -> str | None:
        """Return where the last committed checkpoint of this run is; None if there is none. Local."""
        step = self._pending.last_committed
        return None if step is None else str(Checkpoint.of(self.storage, step).path)

    def close(self, timeout: float = 0.0) -> None:
        """End the saves. One that is being written gets `timeout` seconds to finish. Local."""
        self._pending.close(timeout)
