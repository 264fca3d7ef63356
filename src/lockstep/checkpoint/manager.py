"""The checkpoint manager: when to save, how to resume, and what to do when a save fails.

    check_space, resume             before the first step
    ensure_rewind_checkpoint        before the first step: a policy that rewinds needs a checkpoint of the start
    prepare                         after the first step, so that the first save is as short as the others
    poll, save_is_due_by_clock      after each step, for the control word
    is_new_best                     after an evaluation
    due, save                       between two steps
    abandon_if_failed               when the control word says that a rank failed to write its file
    rewind                          when a step was not applied and the policy is rewind
    settle, saved_location, close   at the end

`poll`, `save_is_due_by_clock`, `due`, `best`, `saved_location` and `close` are local. All other methods are collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from rich.filesize import decimal as size_text

import lockstep
from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.reshard import replicated_sizes, shards_to_write
from lockstep.checkpoint.resume import LoopState, Resumed, Resumer
from lockstep.checkpoint.retention import BestCheckpoint, Retention, best_checkpoint
from lockstep.checkpoint.run_state import RunState, merge_plain_state
from lockstep.checkpoint.saving.saver import Saver
from lockstep.checkpoint.saving.writer import Committed, Save, SaveContext
from lockstep.checkpoint.state_tree import pack
from lockstep.checkpoint.storage import (
    Checkpoint,
    CheckpointStorage,
    committed,
    folder_name,
    update_latest,
)
from lockstep.config import RunConfig
from lockstep.config.changes import settings_as_text
from lockstep.errors import UserError, plural
from lockstep.launch.folder.run_dir import LATEST, step_in
from lockstep.observe.run_folder import RunFolder
from lockstep.plan.plan import Plan
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.layout import LocalShard
from lockstep.runtime.seeds import derive, seed_host
from lockstep.task import StepResult

MIB = 2**20


class CheckpointManager:
    """Saves and restores one run. `writer.py` has the outcomes of a save.

    A save has three parts: copies are made while the next step computes, files are written on a thread, and at a step
    on which all ranks agree its outcome is settled. A checkpoint counts only then. Every method that the loop calls is
    called by all ranks at the same step.
    """

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

        `log_event(event, **fields)` logs an event. `before_next_update(callback)` runs `callback` once, just before the
        next update.
        """
        self.folder = folder
        self.storage = storage
        self.state = state

        self.config = config
        self.plan = plan
        self.runtime = runtime

        self.log_event = log_event
        self.before_next_update = before_next_update
        self.resumer = Resumer(storage, state, config, runtime, log_event)

        # All ranks write. The token distinguishes their files from those of an earlier attempt.
        settings = config.checkpoint
        self.retention = Retention(settings.keep, settings.keep_every, settings.best, settings.best_mode)
        world = runtime.world
        context = SaveContext(
            storage, world.rank, world.size, folder.token, self.retention, on_commit=folder.end_going_back
        )
        self.saver = Saver(context, settings.asynchronous)

        # True from the start of a save until all ranks agree on its outcome (`settle`).
        self._unsettled = False

        # How many steps were done at the last checkpoint in this run's folder, which is named after that number.
        # None if there is none, or its save was abandoned.
        self._saved_step: int | None = None

        # When the last checkpoint was saved or loaded, or else the run began: for `checkpoint.minutes`.
        self._saved_at = time.monotonic()

        # The score (`Retention.score`) of the best checkpoint; None: not looked up yet.
        self._best_score: float | None = None

        self._rewinds = 0  # since the last committed checkpoint
        self._parts_compared = False  # whether the ranks have compared the state of their parts

    # ---- resuming ----

    def resume(self) -> Resumed | None:
        """Claim the folder, and resume from this run's newest valid checkpoint, or else from `--resume PATH`.

        Return None if neither exists.
        """
        if self.runtime.is_main:
            self._claim()

        # After a restart, the run's own checkpoints are newer than the one that --resume named; unless the run has not
        # gone back to that one yet (`RunFolder.goes_back`).
        reader = self.resumer.find(self.storage) if self.folder.resume_newest else None
        if reader is None and self.folder.resume_from is not None:
            reader = self.resumer.find_named(self.folder.resume_from)

        return None if reader is None else self._load(reader)

    def _load(self, reader: CheckpointReader) -> Resumed:
        resumed = self.resumer.load(reader)

        # If it was another one, a later attempt must load it again, until this run has saved one of its own.
        self._saved_step = resumed.steps_done if resumed.in_own_folder else None
        if self.runtime.is_main and resumed.in_own_folder:
            self.folder.end_going_back()

        self._saved_at = time.monotonic()
        self._best_score = None
        return resumed

    def _claim(self) -> None:
        """Make this attempt the only writer. Rank 0 calls it, before any checkpoint is written."""
        self.storage.claim(self.folder.token)

        # If this attempt fails before it has gone back, the launcher announces this checkpoint.
        name = self.folder.resume_from.resolve().name if self.folder.resume_from else ""
        if self.folder.goes_back and step_in(name) is not None:
            self.storage.replace(LATEST, f"{name}\n".encode())
        elif self.folder.attempt == 0:
            update_latest(self.storage)

    def rewind(self, result: StepResult, span: tuple[int, int] | None) -> Resumed:
        """Go back to the last checkpoint, and from now on skip the samples of the step that was not applied.

        `span`: their positions in the order of the data, as (start, stop).
        """
        # The save that is still pending may be the last checkpoint.
        self.settle()

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

        reader = self.resumer.find(self.storage)
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

        self.log_event(
            "rewind",
            step=result.step,
            to=resumed.steps_done,
            reason=result.skip_reason,
            skipped=f"{plural(span[1] - span[0], 'sample')} at positions {span[0]} to {span[1] - 1}",
        )
        return resumed

    # ---- before the first step ----

    def check_space(self) -> None:
        """Raise an error if the disk has no room for the weights, and warn if two checkpoints do not fit.

        This runs before the first step, so the size of the optimizers' state is an estimate.
        """
        settings = self.config.checkpoint
        if settings.every is None and settings.minutes is None and not settings.at_end:
            return

        # All ranks use rank 0's numbers, so that either all of them raise or none does.
        sizes = self.state.bytes_at_start()
        free, known, estimate = self.runtime.collectives.run_on_rank0(lambda: [self.storage.free_bytes(), *sizes])
        if free < known:
            raise UserError(
                f"there is no room for a checkpoint in {self.storage.address}: {size_text(free)} free",
                f"{size_text(known)} needed for the weights alone",
                f"free {size_text(known + estimate - free)}, or set run_dir=FOLDER on another disk",
            )

        needed = 2 * (known + estimate)
        if free < needed:
            self.log_event(
                "warning",
                reason=f"the disk has {size_text(free)} free, but replacing a checkpoint by the next one needs room "
                f"for two, about {size_text(needed)}",
            )

    def ensure_rewind_checkpoint(self, save: Callable[[], None]) -> None:
        """If a policy is rewind and there is no checkpoint to go back to, call `save`."""
        policies = {"nonfinite.policy": self.config.nonfinite.policy, "spike.policy": self.config.spike.policy}
        policy = next((key for key, value in policies.items() if value == "rewind"), None)
        if policy is None:
            return

        if not self.state.source.can_skip:
            raise UserError(
                f"{policy}=rewind cannot be used with this data, which cannot skip samples",
                f"the data is read by a {type(self.state.source).__name__}, which has no method skip",
                f"set {policy}=skip, or {policy}=stop",
            )

        # The run goes back to this checkpoint if a step before the next save is not applied.
        if self._saved_step is None:
            save()
            if not self.settle():
                raise UserError(
                    f"{policy}=rewind needs a checkpoint of the start, which could not be written",
                    "",
                    f"make room on the disk, or set {policy}=skip",
                )

    def prepare(self) -> None:
        """Allocate the buffer for snapshots early, so that the first save is as short as the others."""
        self.saver.prepare(self._shards(self.state.tensors()))

    # ---- saving ----

    def save_is_due_by_clock(self) -> bool:
        """Whether rank 0's clock requests a checkpoint; the control word carries the request."""
        # Clocks differ between machines, so only rank 0's is used.
        minutes = self.config.checkpoint.minutes
        return self.runtime.is_main and minutes is not None and time.monotonic() - self._saved_at > 60 * minutes

    def due(self, steps_done: int, requested: bool) -> bool:
        """Whether to save now: a rank `requested` it, or `steps_done` is a multiple of `checkpoint.every`.

        The same state is never saved twice.
        """
        every = self.config.checkpoint.every
        return (requested or (every is not None and steps_done % every == 0)) and steps_done != self._saved_step

    def save(self, steps_done: int, loop: LoopState, metrics: dict[str, float]) -> None:
        """Copy the state after `steps_done` steps, and write it in the background while training continues.

        `metrics` are saved with the checkpoint; `checkpoint.best` compares them. Also reseeds Python's and numpy's
        generators, as a resume does.
        """
        self.settle()
        with self.runtime.heartbeat.visit("snapshot", steps_done):
            self._start_save(steps_done, loop, metrics)

        self._unsettled = True
        self._saved_step = steps_done
        if self.is_new_best(metrics):
            self._best_score = self.retention.score(metrics)
        self._saved_at = time.monotonic()
        seed_host(derive(self.config.seed, "checkpoint", steps_done))

    def _start_save(self, steps_done: int, loop: LoopState, metrics: dict[str, float]) -> None:
        """Collect what this rank writes, and start the save."""
        # Rank 0 writes the plain state of all ranks, which may hold different parameters.
        tensors, aliases, plain_state, changed_only_by_update = self.state.capture()
        if not self.state.same_on_all_ranks:
            plain_state = merge_plain_state(self.runtime.collectives.gather_json(plain_state))

        # Only the first save compares the parts between ranks, because the digests take time.
        if not self._parts_compared:
            self._warn_of_differences()
            self._parts_compared = True

        # The keys are part of the file format (see CONTRIBUTING).
        other_values = {
            "config": settings_as_text(self.config),
            "plan": self.plan.as_record(),
            "world": self.runtime.world.size,
            "versions": {"lockstep": lockstep.__version__, "torch": str(torch.__version__)},
            "loop": asdict(loop),
            "metrics": metrics,
        }
        other_tensors: dict[str, torch.Tensor] = {}
        values = {"state": plain_state, **pack(other_values, "values", other_tensors)}
        assert not other_tensors, f"not in the state: {list(other_tensors)}"
        self.saver.start(steps_done, self._shards(tensors), aliases, values, changed_only_by_update)

        # An update must wait until the optimizers' state has been copied.
        self.before_next_update(self.saver.wait_for_copy)

    def is_new_best(self, metrics: dict[str, float]) -> bool:
        """Return whether these metrics are better than those of all checkpoints by `checkpoint.best`. Collective.

        All ranks get the same answer, because rank 0 alone looks at the checkpoints.
        """
        score = self.retention.score(metrics)
        if score is None:
            return False

        if self._best_score is None:
            self._best_score = self.runtime.collectives.run_on_rank0(self._look_up_best)

        return score > self._best_score

    def best(self) -> BestCheckpoint | None:
        """Return the best committed checkpoint by `checkpoint.best`. Local."""
        return best_checkpoint(self.storage, self.retention)

    def _look_up_best(self) -> float | None:
        best = self.best()
        return -math.inf if best is None else self.retention.score({best.metric: best.value})

    def poll(self) -> bool:
        """Log committed saves. Return whether the last save failed on this rank, for the control word."""
        if not self._unsettled:
            return False

        self._log_committed(self.saver.take_ended(0))
        return self.saver.failure is not None

    def settle(self) -> bool:
        """Wait until the last save is committed, or abandoned on all ranks. Return False if this call abandoned it.

        If no save is pending, this returns True at once, even if the last one was abandoned earlier.
        """
        if not self._unsettled:
            return True

        with self.runtime.heartbeat.visit("commit"):
            # First compare the files of all ranks; otherwise rank 0 would wait for the file of a rank that failed.
            self.saver.wait_for_own_file()
            abandoned = self.abandon_if_failed()

            # If all files are written, wait for the commit, which may still fail on rank 0.
            if not abandoned:
                self._log_committed(self.saver.take_ended())
                abandoned = self.abandon_if_failed()

        # Only a committed checkpoint lets the run rewind as often again.
        if not abandoned:
            self._rewinds = 0

        self._unsettled = False
        return not abandoned

    def abandon_if_failed(self) -> bool:
        """Abandon the last save on all ranks if it failed on any of them. Return whether it was abandoned.

        Training continues: a full disk costs a checkpoint, but not the run.
        """
        failed = self.saver.failure
        report = [failed.reason, failed.caused_elsewhere] if failed else [None, False]
        reports = self.runtime.collectives.gather_json(report)
        failures = [(rank, why, elsewhere) for rank, (why, elsewhere) in enumerate(reports) if why]
        if not failures:
            # `settle` may already have handled it: the control word is one step late.
            return False

        # Name each cause once, with the rank on which it occurred.
        causes = [f"rank {rank}: {why}" for rank, why, elsewhere in failures if not elsewhere]
        reason = "; ".join(causes) or failures[0][1]
        self.saver.abandon(reason)

        # The failure is logged here, once, with the reasons of all ranks.
        self.log_event(
            "warning",
            reason=f"THE CHECKPOINT OF STEP {self._saved_step} WAS NOT WRITTEN: {reason}. Training continues; "
            f"{self._last_good()}",
        )

        self._unsettled = False
        self._saved_step = None
        self._best_score = None
        return True

    def _last_good(self) -> str:
        """Say which checkpoint remains after a failed save. The storage may be out of reach."""
        try:
            newest = committed(self.storage)[:1]
        except OSError as error:
            return f"the checkpoints cannot be listed: {error}"

        return f"the last good one is {newest[0].name}" if newest else "there is no checkpoint yet"

    def close(self, timeout: float = 0.0) -> None:
        """Close the saver. A save that is being written gets `timeout` seconds to finish."""
        self._log_committed(self.saver.take_ended(timeout))
        self.saver.close()

    def saved_location(self) -> str | None:
        """Return where the last checkpoint is, which `settle` has committed; None if there is none."""
        return None if self._saved_step is None else Checkpoint(self.storage, folder_name(self._saved_step)).location

    def _shards(self, tensors: dict[str, torch.Tensor]) -> dict[str, LocalShard]:
        """Return what this rank writes of these tensors. Collective if the ranks hold different ones."""
        world = self.runtime.world
        sizes = replicated_sizes(tensors)

        # If all ranks hold the same tensors, no exchange is needed.
        same = self.state.same_on_all_ranks
        all_sizes = [sizes] * world.size if same else self.runtime.collectives.gather_json(sizes)
        return shards_to_write(tensors, world.rank, all_sizes, self.state.duplicates)

    def _warn_of_differences(self) -> None:
        """Warn if the state of a part differs between ranks, because only rank 0's is saved."""
        digests = self.runtime.collectives.gather_json(self.state.digest_replicated())
        for name in digests[0]:
            if len({by_name[name] for by_name in digests}) > 1:
                self.log_event("warning", reason=f"the state of {name!r} differs between the ranks: rank 0's is saved")

    def _log_committed(self, saves: list[Save]) -> None:
        """Log the committed saves. `abandon_if_failed` logs failures, after all ranks have compared them."""
        for save in saves:
            outcome = save.outcome
            if not isinstance(outcome, Committed):
                continue

            if problem := outcome.tidying_error:
                text = f"the checkpoint of step {save.step} is safe, but tidying up after it failed: {problem}"
                self.log_event("warning", reason=text)

            self.log_event(
                "checkpoint",
                step=save.step,
                path=self.folder.as_shown(outcome.checkpoint.location),
                mb=outcome.total_bytes / MIB,
                stall_s=save.stall_s,
                write_s=save.write_s,
            )
