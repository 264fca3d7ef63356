"""The checkpoint manager: when to save, how to resume, and what to do when a save fails.

    check_space, resume             before the first step
    ensure_rewind                   before the first step: a policy that rewinds needs a checkpoint of the start
    prepare                         after the first step, so that the first save is as short as the others
    poll, save_is_due_by_clock      after each step, for the control word
    due, save                       between two steps
    abandon_if_failed               when the control word says that a rank failed to write its file
    rewind                          when a step was spoiled, and the policy is rewind
    settle, newest_path, close      at the end

Local: `poll`, `save_is_due_by_clock`, `due`, `newest_path`, `close`. All ranks call the others at the same step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.checkpoint.load import CheckpointReader, find
from lockstep.checkpoint.reshard import merge_values, plain_sizes, slices_to_write
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
from lockstep.errors import UserError
from lockstep.launch.run_dir import is_checkpoint, run_of
from lockstep.observe.formats import megabytes
from lockstep.observe.run_folder import RunFolder
from lockstep.plan.plan import Plan
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.seeds import derive, seed_host
from lockstep.task import StepResult

# Keys in a checkpoint for the state of the loop, which `Run` makes; also fields of `Resumed`.
LOOP_STATE = ("evaluation_due", "interval", "seconds")

# A resumed run does not report that these settings have changed.
NOT_COMPARED = ("run_dir", "resume", "log.progress")

MIB = 2**20


@dataclass(frozen=True)
class Resumed:
    step: int
    path: Path  # of the checkpoint
    ranks: int  # how many wrote it
    changed_settings: list[Change]
    changes: list[str]  # as text: these settings, and everything else that differs
    evaluation_due: bool  # the run was preempted before it could evaluate
    interval: dict[str, Any]  # sums since the last log line, from `Recorder.interval_state`
    seconds: float  # how long the run took until then


class CheckpointManager:
    """Saves and restores one run. A save is in flight until all ranks agree on how it ended (`settle`)."""

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

        # A save was started, and the ranks have not yet agreed on how it ended.
        self._in_flight = False

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
            clean(self.store, self.folder.token)

        # The run's own checkpoints come first: a restarted attempt must not go back to the origin.
        reader = self._find(self.store) if self.folder.continues else None
        origin = self.folder.origin
        if reader is None and origin is not None:
            # Either one checkpoint, or a run, whose newest valid one counts.
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
        """Go back to the last checkpoint, and from now on leave out the samples that spoiled the step.

        `span`: their positions in the order of the data, as (start, stop).
        """
        # The save in flight may be the one to go back to.
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

        # The checkpoint does not know which samples were left out after it was written.
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
            left_out=f"{span[1] - span[0]} samples at positions {span[0]} to {span[1] - 1}",
        )
        return resumed

    def _find(self, store: Store, only: str | None = None) -> CheckpointReader | None:
        """Find the newest valid checkpoint. Newer ones that are damaged are set aside if they are this run's own."""
        self.runtime.heartbeat.beat("load")
        world = self.runtime.world
        reader = find(store, world.rank, world.size, self.runtime.collectives.gather_json, only)
        if reader is None:
            return None

        # Only rank 0 renames, and only its event is logged.
        for damage in reader.damaged:
            name = damage.checkpoint.name
            text = f"checkpoint {name} is damaged: {damage.file}: {damage.why}; resuming from {reader.checkpoint.name}"
            if self.runtime.is_main and self._is_own(store):
                text += f". The damaged one is kept as {set_aside(store, name, 'damaged')}"
            self.log_event("warning", reason=text)
        return reader

    def _is_own(self, store: Store) -> bool:
        """Whether this is the run's own store. `--resume PATH` may name that of another run, which must not change."""
        return os.path.realpath(store.address) == os.path.realpath(self.store.address)

    def _load(self, reader: CheckpointReader) -> Resumed:
        values = reader.manifest.values
        missing = {"state", "config", "world", *LOOP_STATE} - values.keys()
        if missing:
            raise UserError(
                f"the checkpoint cannot be resumed: it lacks {', '.join(sorted(missing))} of a run's state",
                "",
                "resume with the version of Lockstep that wrote it (lockstep ckpt show)",
            )

        # The task's own state may depend on some settings (`Task.lasting`). Refuse before anything is changed.
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
        # none may save before rank 0 has set them aside.
        in_own_store = self._is_own(reader.checkpoint.store)
        self.runtime.collectives.run_on_rank0(lambda: set_aside_after(self.store, step) if in_own_store else [])

        self._saved_step = step if in_own_store else None
        self._saved_at = time.monotonic()

        # As in `save`, so that the run draws the same numbers as if it had not stopped.
        seed_host(derive(self.config.seed, "checkpoint", step))
        return Resumed(
            step=step,
            path=reader.checkpoint.path,
            ranks=values["world"],
            changed_settings=changed_settings,
            changes=[*map(str, changed_settings), *other_changes],
            **{key: values[key] for key in LOOP_STATE},
        )

    # ---- before the first step ----

    def check_space(self) -> None:
        """Refuse a disk without room for the weights; warn if two checkpoints do not fit.

        This runs before training costs any time: the size of the optimizers' state is still a guess.
        """
        settings = self.config.checkpoint
        if settings.every is None and settings.minutes is None and not settings.at_end:
            return

        # What a killed attempt staged must not count as used.
        if self.runtime.is_main:
            clean(self.store, self.folder.token)

        # Rank 0's numbers count on every rank, so that either all ranks raise or none does.
        sizes = self.state.bytes_at_start()
        free, certain, guess = self.runtime.collectives.run_on_rank0(lambda: [self.store.free_bytes(), *sizes])
        if free < certain:
            raise UserError(
                f"there is no room for a checkpoint in {self.store.address}: {megabytes(free / MIB)} free",
                f"{megabytes(certain / MIB)} needed for the weights alone",
                f"free {megabytes((certain + guess - free) / MIB)}, or type run_dir=FOLDER on another disk",
            )

        needed = 2 * (certain + guess)
        if free < needed:
            self.log_event(
                "warning",
                reason=f"the disk has {megabytes(free / MIB)} free; replacing one checkpoint by the next takes room "
                f"for two, about {megabytes(needed / MIB)}",
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

        # The run goes back to this one if a step is spoiled before the next save.
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
        tensors, _, _ = self.state.capture_tensors()
        self.saver.prepare(self._slices(tensors))

    # ---- saving ----

    def save_is_due_by_clock(self) -> bool:
        """Whether rank 0's clock requests a checkpoint; the control word carries the request."""
        # Clocks differ between machines, so only one counts.
        minutes = self.config.checkpoint.minutes
        return self.runtime.is_main and minutes is not None and time.monotonic() - self._saved_at > 60 * minutes

    def due(self, step: int, asked: bool) -> bool:
        """Whether to save after `step`: by its number, or because a rank `asked` for it."""
        every = self.config.checkpoint.every
        return (asked or (every is not None and step % every == 0)) and step != self._saved_step

    def save(self, loop_state: dict[str, Any]) -> None:
        """Copy the state, and let it be written while training continues.

        `loop_state`, which `Run` makes: `metrics`, by which the best checkpoint is chosen, and the keys `LOOP_STATE`.
        """
        self.settle()
        heartbeat = self.runtime.heartbeat
        phase_before = heartbeat.phase
        step = self.state.stepper.counters.step
        heartbeat.beat("snapshot", step)

        # Rank 0 writes the values of all ranks, which may hold different parameters.
        tensors, aliases, state = self.state.capture()
        if not self.state.same_values_everywhere:
            state = merge_values(self.runtime.collectives.gather_json(state))

        # Only once, since it takes a digest of every part's state.
        if not self._compared:
            self._warn_of_differences()
            self._compared = True

        # These names are on the disk.
        values = {
            "state": state,
            "config": _as_typed(self.config),
            "plan": self.plan.as_record(),
            "world": self.runtime.world.size,
            "versions": {"lockstep": lockstep.__version__, "torch": str(torch.__version__)},
            **loop_state,
        }
        self.saver.save(step, self._slices(tensors), aliases, values, self.state.changed_only_by_update())

        # The optimizers' state may still be being copied when the next update wants to change it.
        self.state.stepper.update.before_next = self.saver.wait_for_copy

        self._in_flight = True
        self._saved_step = step
        self._saved_at = time.monotonic()
        self._rewinds = 0

        # Python's and numpy's generators: a run that resumes from this checkpoint seeds them in the same way (`_load`).
        seed_host(derive(self.config.seed, "checkpoint", step))
        heartbeat.beat(phase_before)

    def poll(self) -> bool:
        """Log what was written. Return whether the last save failed on this rank, for the control word."""
        self._log(self.saver.poll())
        return self.saver.failed is not None

    def settle(self) -> bool:
        """Wait until the save in flight is committed, or abandoned on all ranks; return whether it is committed.

        Without a save in flight, this returns True and costs nothing.
        """
        if not self._in_flight:
            return True

        heartbeat = self.runtime.heartbeat
        phase_before = heartbeat.phase
        heartbeat.beat("commit")

        # First this rank's own file: rank 0 would otherwise wait for one whose rank failed.
        self.saver.wait_for_own_file()
        abandoned = self.abandon_if_failed()
        if not abandoned:
            self._log(self.saver.wait())

            # Rank 0 may have failed to commit.
            abandoned = self.abandon_if_failed()

        self._in_flight = False
        heartbeat.beat(phase_before)
        return not abandoned

    def abandon_if_failed(self) -> bool:
        """Abandon the save in flight on all ranks if it failed on one of them. Return whether it did.

        Training continues: a full disk costs a checkpoint, and not the run.
        """
        # The control word comes a step late: the failure may have been handled already.
        failed = self.saver.failed
        answers = self.runtime.collectives.gather_json([failed.error, failed.secondhand] if failed else [None, False])
        failures = [(rank, why, secondhand) for rank, (why, secondhand) in enumerate(answers) if why]
        if not failures:
            return False

        # Each cause is named once, by the rank where it arose.
        firsthand = [f"rank {rank}: {why}" for rank, why, secondhand in failures if not secondhand]
        reason = "; ".join(firsthand) or failures[0][1]
        self.saver.abandon(reason)

        # What `wait` returns is dropped: the failure is logged here, once, with the reasons of all ranks.
        self.saver.wait()
        newest = self.newest_path()
        self.log_event(
            "warning",
            reason=f"THE CHECKPOINT OF STEP {self._saved_step} WAS NOT WRITTEN: {reason}. Training continues; the last "
            f"good one is {newest.name if newest else 'none: there is no checkpoint yet'}",
        )

        self._in_flight = False
        self._saved_step = None
        return True

    def close(self, timeout: float = 0.0) -> None:
        """End the saver. A save in flight gets `timeout` seconds: after an error it may be all that is left."""
        if self._in_flight and timeout:
            self.saver.wait(timeout)
        self.saver.close()

    def newest_path(self) -> Path | None:
        return next((checkpoint.path for checkpoint in committed(self.store)), None)

    def _slices(self, tensors: dict[str, torch.Tensor]) -> list[Slice]:
        world = self.runtime.world
        sizes = plain_sizes(tensors)

        # Ranks that all hold the same tensors need not ask each other.
        same = self.state.same_values_everywhere
        all_sizes = [sizes] * world.size if same else self.runtime.collectives.gather_json(sizes)
        return slices_to_write(tensors, world.rank, all_sizes)

    def _warn_of_differences(self) -> None:
        """Warn if the state of a part differs between ranks: only rank 0's is saved."""
        digests = self.runtime.collectives.gather_json(self.state.digest_replicated())
        for name in digests[0]:
            if len({by_name[name] for by_name in digests}) > 1:
                self.log_event("warning", reason=f"the state of {name!r} differs between the ranks: rank 0's is saved")

    def _log(self, saves: list[PendingSave]) -> None:
        """Log those that are committed. `abandon_if_failed` logs the others, when all ranks know."""
        for save in saves:
            if save.checkpoint and save.error:
                self.log_event("warning", reason=f"the checkpoint of step {save.step} is safe, but then: {save.error}")
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
