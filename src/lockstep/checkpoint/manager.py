"""The checkpoint manager: when to save, how to resume, and what to do when a save fails.

    check_space, resume             before the first step
    ensure_rewind                   before the first step: a policy that rewinds needs a checkpoint of the start
    prepare                         after the first step, so that the first save is as short as the others
    poll, save_is_due_by_clock      after each step, for the control word
    due, save                       between two steps
    abandon_if_failed               when the control word says that a rank failed to write its file
    rewind                          when a step was spoiled and the policy is rewind
    settle, newest_path, close      at the end

Local: `poll`, `save_is_due_by_clock`, `due`, `newest_path`, `close`. All ranks call the others at the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal as size_text

import lockstep
from lockstep.checkpoint.load import CheckpointReader, find
from lockstep.checkpoint.reshard import merge_plain_state, plain_sizes, slices_to_write
from lockstep.checkpoint.run_state import Change, RunState
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.snapshot import Slice
from lockstep.checkpoint.storage import (
    Checkpoint,
    FileStore,
    Retention,
    Store,
    clean,
    committed,
    set_aside,
    set_aside_after,
)
from lockstep.checkpoint.writer import PendingSave
from lockstep.config import RunConfig, flatten
from lockstep.config.schema import KEYS, RENAMED, typed
from lockstep.errors import UserError, plural
from lockstep.launch.run_dir import is_checkpoint, run_of
from lockstep.observe.run_folder import RunFolder
from lockstep.plan.plan import Plan
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.seeds import derive, seed_host
from lockstep.task import StepResult

# Keys in a checkpoint for the state of the loop, which `Run` makes; also fields of `Resumed`.
LOOP_STATE = ("evaluation_due", "interval", "seconds")

# Settings that may change on resume without being reported.
NOT_COMPARED = ("run_dir", "resume", "log.progress")

MIB = 2**20


@dataclass(frozen=True)
class Resumed:
    step: int
    path: Path  # of the checkpoint
    world_size: int  # how many ranks wrote it
    changed_settings: list[Change]
    changes: list[str]  # as text: these settings and everything else that differs
    evaluation_due: bool  # the run was preempted before it could evaluate
    interval: dict[str, Any]  # sums since the last log line, from `Recorder.interval_state`
    seconds: float  # how long the run took until then


class CheckpointManager:
    """Saves and restores one run. `saver.py` has the states of a save."""

    def __init__(
        self,
        folder: RunFolder,
        state: RunState,
        config: RunConfig,
        plan: Plan,
        runtime: Runtime,
        log_event: EventLogger,
        store: Store | None = None,
    ):
        """`log_event(event, **fields)` logs an event. Without a `store`, checkpoints are in the run folder."""
        self.folder = folder
        self.state = state
        self.config = config
        self.plan = plan
        self.runtime = runtime
        self.log_event = log_event
        self.store = store or FileStore(folder.path / "checkpoints")

        # All ranks write; the token keeps their files apart from those of an earlier attempt.
        settings = config.checkpoint
        self.saver = Saver(
            self.store,
            runtime.world.rank,
            runtime.world.size,
            folder.token,
            Retention(settings.keep, settings.keep_every, settings.best, settings.best_mode),
            settings.asynchronous,
        )

        # A save was started, and the ranks have not yet agreed on how it ended (`settle`).
        self._unsettled = False

        # The step and the time of the last save. After a resume, the step of its checkpoint and the time of the resume.
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()

        self._rewinds = 0  # since the last checkpoint
        self._compared = False  # whether the state of the parts was compared between the ranks

    # ---- resuming ----

    def resume(self) -> Resumed | None:
        """Resume from this run's newest valid checkpoint, else from `--resume PATH`; None if there is neither."""
        if self.runtime.is_main:
            self.store.claim(self.folder.token)

        # After a restart, the run's own checkpoints are newer than the one that --resume named.
        reader = self._find(self.store) if self.folder.continues else None
        origin = self.folder.origin
        if reader is None and origin is not None:
            # The origin is one checkpoint or a run, whose newest valid checkpoint counts.
            if is_checkpoint(origin):
                checkpoint = Checkpoint.at(origin)
                reader = self._find(checkpoint.store, checkpoint.name)
            else:
                reader = self._find(FileStore(run_of(origin) / "checkpoints"))

            if reader is None:
                raise UserError(
                    f"--resume {origin} cannot be used: that run has no checkpoint",
                    "",
                    "leave --resume out to start from the beginning",
                )
        return None if reader is None else self._load(reader)

    def rewind(self, result: StepResult, span: tuple[int, int] | None) -> Resumed:
        """Go back to the last checkpoint and from now on skip the samples that spoiled the step.

        `span`: their positions in the order of the data, as (start, stop).
        """
        # The last save may be the one to go back to.
        self.settle()

        # Without a limit, a run whose steps fail for some reason other than their samples would rewind forever.
        self._rewinds += 1
        most = self.config.nonfinite.max_in_a_row
        if self._rewinds > most:
            raise UserError(
                f"step {result.step} was not applied, and the run has rewound {most} times without a new checkpoint "
                f"(nonfinite.max_in_a_row={most})",
                result.skip_reason or "",
                "lower lr.peak, set clip.norm, or look at the samples that the events name",
            )

        reader = self._find(self.store)
        if reader is None:
            raise UserError(
                f"step {result.step} was not applied, and the run cannot rewind: it has no checkpoint",
                result.skip_reason or "",
                "make room on the disk, or choose the policy skip or stop",
            )

        # The checkpoint does not know which samples were skipped after it was written.
        source: Any = self.state.source
        assert span is not None
        spans = [*source.passed_over, span]
        resumed = self._load(reader)
        for spoiled in spans:
            source.pass_over(spoiled)

        self.log_event(
            "rewind",
            step=result.step,
            to=self.state.stepper.counters.step,
            reason=result.skip_reason,
            left_out=f"{plural(span[1] - span[0], 'sample')} at positions {span[0]} to {span[1] - 1}",
        )
        return resumed

    def _find(self, store: Store, only: str | None = None) -> CheckpointReader | None:
        """Find the newest valid checkpoint. Newer ones that are damaged are set aside if this run wrote them."""
        self.runtime.heartbeat.beat("load")
        world = self.runtime.world
        reader = find(store, world.rank, world.size, self.runtime.collectives.gather_json, only)
        if reader is None:
            return None

        # Only rank 0 renames, and only its event is logged.
        for damage in reader.damaged:
            name = damage.checkpoint.name
            text = f"checkpoint {name} is damaged: {damage.file}: {damage.why}; resuming from {reader.checkpoint.name}"
            if self.runtime.is_main and store == self.store:
                text += f". The damaged one is kept as {set_aside(store, name, 'damaged')}"
            self.log_event("warning", reason=text)
        return reader

    def _load(self, reader: CheckpointReader) -> Resumed:
        values = reader.manifest.values
        missing = {"state", "config", "world", *LOOP_STATE} - values.keys()
        if missing:
            raise UserError(
                f"the checkpoint cannot be resumed: it lacks {', '.join(sorted(missing))} of a run's state",
                "",
                "resume with the version of Lockstep that wrote it (lockstep ckpt show)",
            )

        # The task's state may depend on some settings (`Task.lasting`). Refuse before anything is changed.
        changed_settings = config_changes(values["config"], self.config)
        lasting = [key for part in self.state.parts.values() for key in getattr(part, "lasting", ())]
        for key, before, now in changed_settings:
            if key in lasting:
                raise UserError(
                    f"{key}={now} does not fit the checkpoint: the state that the task saved belongs to {key}={before}",
                    "",
                    f"type {key}={before}, or start a new run from the exported weights",
                )

        other_changes = self.state.restore(reader, values["state"], changed_settings)
        step = self.state.stepper.counters.step

        # The run goes back to this step: its later checkpoints belong to another history. All ranks wait here, because
        # none may save before rank 0 has set them aside. The store of another run must not change.
        in_own_store = reader.checkpoint.store == self.store
        self.runtime.collectives.run_on_rank0(lambda: set_aside_after(self.store, step) if in_own_store else [])

        self._saved_step = step if in_own_store else None
        self._saved_at = time.monotonic()

        # As in `save`, so that the run draws the same numbers as if it had not stopped.
        seed_host(derive(self.config.seed, "checkpoint", step))
        return Resumed(
            step=step,
            path=reader.checkpoint.path,
            world_size=values["world"],
            changed_settings=changed_settings,
            changes=[*map(str, changed_settings), *other_changes],
            **{key: values[key] for key in LOOP_STATE},
        )

    # ---- before the first step ----

    def check_space(self) -> None:
        """Refuse a disk without room for the weights; warn if two checkpoints do not fit.

        This runs before training costs any time: the size of the optimizers' state is still a guess.
        """
        # What a killed attempt staged must not count as used.
        if self.runtime.is_main:
            clean(self.store, self.folder.token)

        settings = self.config.checkpoint
        if settings.every is None and settings.minutes is None and not settings.at_end:
            return

        # Rank 0's numbers count on every rank, so that either all ranks raise or none does.
        sizes = self.state.bytes_at_start()
        free, certain, guess = self.runtime.collectives.run_on_rank0(lambda: [self.store.free_bytes(), *sizes])
        if free < certain:
            raise UserError(
                f"there is no room for a checkpoint in {self.store.address}: {size_text(free)} free",
                f"{size_text(certain)} needed for the weights alone",
                f"free {size_text(certain + guess - free)}, or type run_dir=FOLDER on another disk",
            )

        needed = 2 * (certain + guess)
        if free < needed:
            self.log_event(
                "warning",
                reason=f"the disk has {size_text(free)} free; replacing one checkpoint by the next takes room "
                f"for two, about {size_text(needed)}",
            )

    def ensure_rewind(self, save: Callable[[], None]) -> None:
        """If a policy is rewind, make sure that there is a checkpoint to go back to: call `save` if there is none."""
        policies = {"nonfinite.policy": self.config.nonfinite.policy, "spike.policy": self.config.spike.policy}
        policy = next((key for key, value in policies.items() if value == "rewind"), None)
        if policy is None:
            return

        if not hasattr(self.state.source, "pass_over"):
            raise UserError(
                f"{policy}=rewind cannot be used with a stream, which cannot leave out samples",
                "",
                f"type {policy}=skip, or {policy}=stop",
            )

        # The run goes back to this checkpoint if a step is spoiled before the next save.
        if self._saved_step is None:
            save()
            if not self.settle():
                raise UserError(
                    f"{policy}=rewind needs a checkpoint of the start, and it could not be written",
                    "",
                    f"make room on the disk, or type {policy}=skip",
                )

    def prepare(self) -> None:
        """Allocate the buffer for snapshots early, so that the first save is as short as the others."""
        self.saver.prepare(self._slices(self.state.capture_tensors().tensors))

    # ---- saving ----

    def save_is_due_by_clock(self) -> bool:
        """Whether rank 0's clock requests a checkpoint; the control word carries the request."""
        # Clocks differ between machines, so only one counts.
        minutes = self.config.checkpoint.minutes
        return self.runtime.is_main and minutes is not None and time.monotonic() - self._saved_at > 60 * minutes

    def due(self, step: int, asked: bool) -> bool:
        """Whether to save after `step`: by its number or because a rank `asked`, unless this step is saved already."""
        every = self.config.checkpoint.every
        return (asked or (every is not None and step % every == 0)) and step != self._saved_step

    def save(self, loop_state: dict[str, Any]) -> None:
        """Copy the state and let it be written while training continues.

        `loop_state`, which `Run` makes: `metrics`, by which the best checkpoint is chosen, and the keys `LOOP_STATE`.
        """
        self.settle()
        heartbeat = self.runtime.heartbeat
        phase_before = heartbeat.phase
        step = self.state.stepper.counters.step
        heartbeat.beat("snapshot", step)

        # Rank 0 writes the plain state of all ranks, which may hold different parameters.
        tensors, aliases, plain_state = self.state.capture()
        if not self.state.same_on_all_ranks:
            plain_state = merge_plain_state(self.runtime.collectives.gather_json(plain_state))

        # The first save compares the parts between the ranks; a digest of their state would slow down every save.
        if not self._compared:
            self._warn_of_differences()
            self._compared = True

        # Keys on the disk: do not rename.
        values = {
            "state": plain_state,
            "config": _as_typed(self.config),
            "plan": self.plan.as_record(),
            "world": self.runtime.world.size,
            "versions": {"lockstep": lockstep.__version__, "torch": str(torch.__version__)},
            **loop_state,
        }
        self.saver.save(step, self._slices(tensors), aliases, values, self.state.changed_only_by_update())

        # The optimizers' state may still be copying when the next update runs.
        self.state.stepper.update.before_update = self.saver.wait_for_copy

        self._unsettled = True
        self._saved_step = step
        self._saved_at = time.monotonic()
        self._rewinds = 0

        # Python's and numpy's generators: a run that resumes from this checkpoint seeds them in the same way (`_load`).
        seed_host(derive(self.config.seed, "checkpoint", step))
        heartbeat.beat(phase_before)

    def poll(self) -> bool:
        """Log what was written. Return whether the last save failed on this rank, for the control word."""
        self._log(self.saver.wait(0))
        return self.saver.failed is not None

    def settle(self) -> bool:
        """Wait until the last save is committed, or abandoned on all ranks; return whether it is committed.

        If the ranks know already, or nothing was saved, this returns True and costs nothing.
        """
        if not self._unsettled:
            return True

        heartbeat = self.runtime.heartbeat
        phase_before = heartbeat.phase
        heartbeat.beat("commit")

        # Ask all ranks about their files: rank 0 would otherwise wait for the file of a rank that failed.
        self.saver.wait_for_own_file()
        abandoned = self.abandon_if_failed()

        # If all files are there, ask about the commit, which may still fail on rank 0.
        if not abandoned:
            self._log(self.saver.wait())
            abandoned = self.abandon_if_failed()

        self._unsettled = False
        heartbeat.beat(phase_before)
        return not abandoned

    def abandon_if_failed(self) -> bool:
        """Abandon the last save on all ranks if it failed on one of them. Return whether it did.

        Training continues: a full disk costs a checkpoint, and not the run.
        """
        # The control word arrives one step late, so `settle` may have handled this failure already.
        failed = self.saver.failed
        own_answer = [failed.error, failed.caused_elsewhere] if failed else [None, False]
        answers = self.runtime.collectives.gather_json(own_answer)
        failures = [(rank, why, elsewhere) for rank, (why, elsewhere) in enumerate(answers) if why]
        if not failures:
            return False

        # Each cause is named once, by the rank where it arose.
        causes = [f"rank {rank}: {why}" for rank, why, elsewhere in failures if not elsewhere]
        reason = "; ".join(causes) or failures[0][1]
        self.saver.abandon(reason)

        # The failure is logged here, once, with the reasons of all ranks.
        newest = self.newest_path()
        left = f"the last good one is {newest.name}" if newest else "there is no checkpoint yet"
        self.log_event(
            "warning",
            reason=f"THE CHECKPOINT OF STEP {self._saved_step} WAS NOT WRITTEN: {reason}. Training continues; {left}",
        )

        self._unsettled = False
        self._saved_step = None
        return True

    def close(self, timeout: float = 0.0) -> None:
        """End the saver. A save that is being written gets `timeout` seconds: it may be all that is left of the run."""
        self.saver.wait(timeout)
        self.saver.close()

    def newest_path(self) -> Path | None:
        return next((checkpoint.path for checkpoint in committed(self.store)), None)

    def _slices(self, tensors: dict[str, torch.Tensor]) -> list[Slice]:
        world = self.runtime.world
        sizes = plain_sizes(tensors)

        # Ranks that all hold the same tensors need not ask each other.
        same = self.state.same_on_all_ranks
        all_sizes = [sizes] * world.size if same else self.runtime.collectives.gather_json(sizes)
        return slices_to_write(tensors, world.rank, all_sizes)

    def _warn_of_differences(self) -> None:
        """Warn if the state of a part differs between ranks: only rank 0's is saved."""
        digests = self.runtime.collectives.gather_json(self.state.digest_replicated())
        for name in digests[0]:
            if len({by_name[name] for by_name in digests}) > 1:
                self.log_event("warning", reason=f"the state of {name!r} differs between the ranks: rank 0's is saved")

    def _log(self, saves: list[PendingSave]) -> None:
        """Log the committed saves. `abandon_if_failed` logs those that failed, when all ranks know."""
        for save in saves:
            if save.checkpoint and save.error:
                text = f"the checkpoint of step {save.step} is safe, but tidying up after it failed: {save.error}"
                self.log_event("warning", reason=text)
            if save.checkpoint:
                self.log_event(
                    "checkpoint",
                    step=save.step,
                    path=self.folder.as_shown(save.checkpoint.path),
                    mb=save.total_bytes / MIB,
                    stall_s=save.stall_s,
                    write_s=save.write_s,
                )


def config_changes(saved: dict[str, str], config: RunConfig) -> list[Change]:
    # An older version may have saved a key under its former name.
    saved = {RENAMED.get(key, key): value for key, value in saved.items()}
    now = _as_typed(config)
    changes = []
    for key in {**saved, **now}:
        # A key that the older version did not know had its default.
        before = saved.get(key, typed(KEYS[key].default) if key in KEYS else None)
        if key not in NOT_COMPARED and before != now.get(key):
            changes.append(Change(key, saved.get(key, "not set"), now.get(key, "not set")))
    return changes


def _as_typed(config: RunConfig) -> dict[str, str]:
    return {key: typed(value) for key, value in flatten(config).items()}
