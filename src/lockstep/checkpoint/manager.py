"""Keeps the run: when to write a checkpoint, how to come back from one, and what to do when writing fails.

Every method is called by all ranks at the same step, except `poll`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.checkpoint.load import CheckpointReader, Found, find
from lockstep.checkpoint.reshard import Change, as_saved, check_lasting, config_changes, merged, share_out, sizes_of
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.run_state import RunState
from lockstep.checkpoint.saver import Report, Saver, Slice, free_bytes
from lockstep.checkpoint.storage import Store
from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.launch.run_dir import is_checkpoint, run_of
from lockstep.observe.formats import megabytes
from lockstep.observe.run_folder import RunFolder
from lockstep.plan.plan import Plan
from lockstep.runtime.context import Runtime
from lockstep.runtime.seeds import derive, seed_host
from lockstep.task import StepResult

AROUND = ("evaluation_due", "interval", "seconds")  # what the loop adds to the state, beside the metrics


@dataclass(frozen=True)
class Resumed:
    step: int
    path: Path
    world: int  # that wrote it
    settings: list[Change]  # that are not as they were
    changes: list[str]  # these, and what else is not as it was, in words
    evaluation_due: bool  # the run had to leave before it could evaluate
    interval: dict[str, Any]  # sums since the last log line
    seconds: float  # the run has taken so far


class CheckpointManager:
    def __init__(
        self,
        folder: RunFolder,
        state: RunState,
        config: RunConfig,
        plan: Plan,
        runtime: Runtime,
        tell: Callable[..., None],
    ):
        self.folder, self.state, self.config, self.plan, self.runtime = folder, state, config, plan, runtime
        self.tell = tell  # event, **fields
        self.store = Store(folder.path / "checkpoints")
        kept = config.checkpoint
        self.saver = Saver(
            self.store,
            runtime.world.rank,
            runtime.world.size,
            folder.token,
            Retention(kept.keep, kept.keep_every, kept.best, kept.best_mode),
            kept.asynchronous,
        )
        state.stepper.before_update = self.saver.let_change
        self._open = False  # a save has been started, and the ranks have not yet agreed on how it ended
        self._saved_step: int | None = None
        self._last = time.monotonic()
        self._rewinds = 0  # since the last checkpoint
        self._saves = 0

    # ---- coming back ----

    def resume(self) -> Resumed | None:
        """From this run's own newest checkpoint that is whole, or from where the user said."""
        if self.runtime.is_main:
            self.store.claim(self.folder.token)
            self.store.clean(self.folder.token)
        found = self._find(self.store, None) if self.folder.continues else None
        if found is None and self.folder.origin is not None:
            origin = self.folder.origin
            one = origin if is_checkpoint(origin) else None
            found = self._find(Store(run_of(origin) / "checkpoints"), one)
            if found is None:
                raise UserError(f"--resume {origin}", "a run without a checkpoint", "leave --resume out to start anew")
        if found is None:
            return None
        return self._load(found)

    def _find(self, store: Store, only: Path | None) -> Found | None:
        world = self.runtime.world
        self.runtime.heartbeat.beat("load")
        found = find(store, world.rank, world.size, self.runtime.collectives.gather_json, only)
        if found is not None:
            for damage in found.passed_over:
                aside = store.set_aside(damage.path, "damaged") if self.runtime.is_main else damage.path
                self.tell(
                    "warning",
                    reason=f"checkpoint {damage.path.name} is damaged: {damage.file}: {damage.why}; going on from "
                    f"{found.path.name}. The damaged one is kept as {aside.name}",
                )
        return found

    def _load(self, found: Found) -> Resumed:
        values = found.manifest.values
        _check_version(values)
        settings = config_changes(values["config"], self.config)
        check_lasting(settings, {key for owner in self.state.others.values() for key in getattr(owner, "lasting", ())})
        others = self.state.restore(CheckpointReader(found.path, found.manifest), values["state"], settings)
        changes = [*map(str, settings), *others]
        step = self.state.stepper.counters.step
        own = found.path.resolve().parent == self.store.root.resolve()
        if self.runtime.is_main and own:
            self.store.set_aside_after(step)  # the run goes back: what came after belongs to another history
        self.runtime.collectives.gather_json(None)  # nobody saves before rank 0 has tidied up
        self._saved_step = step if own else None
        self._last = time.monotonic()
        self._seed_host(step)
        return Resumed(step, found.path, values["world"], settings, changes, **{key: values[key] for key in AROUND})

    def rewind(self, result: StepResult, span: tuple[int, int] | None) -> Resumed:
        """Back to the last checkpoint; the samples that spoiled the step are left out from now on."""
        self.settle()
        self._rewinds += 1
        most = self.config.nonfinite.max_in_a_row
        if self._rewinds > most:
            raise UserError(
                f"to rewind at most {most} times without a new checkpoint (nonfinite.max_in_a_row)",
                f"step {result.step}: {result.trouble}",
                "lower lr.peak, set clip.norm, or look at the samples that the events name",
            )
        found = self._find(self.store, None)
        if found is None:
            raise UserError(
                "to go back to the last checkpoint",
                f"none: it could not be written. Step {result.step}: {result.trouble}",
                "make room on the disk, or choose the policy skip or stop",
            )
        source: Any = self.state.source
        assert span is not None
        spans = [*source.passed_over, span]  # what the checkpoint does not know of yet
        resumed = self._load(found)
        for spoiled in spans:
            source.pass_over(spoiled)
        self.tell(
            "rewind",
            step=result.step,
            to=self.state.stepper.counters.step,
            reason=result.trouble,
            left_out=f"{span[1] - span[0]} samples at positions {span[0]} to {span[1] - 1}",
        )
        return resumed

    # ---- saving ----

    def check_space(self) -> None:
        """Is there room? Asked before any time is spent. The weights are certain, the optimizers' state is a guess."""
        kept = self.config.checkpoint
        if kept.every is None and kept.minutes is None and not kept.at_end:
            return
        certain, guess = self.state.bytes_at_start()

        def check() -> int:
            free = free_bytes(self.store.root)
            if free < certain:
                raise UserError(
                    f"room for a checkpoint in {self.store.root}",
                    f"{megabytes(free / 2**20)} free, {megabytes(certain / 2**20)} needed for the weights alone",
                    f"free {megabytes((certain + guess - free) / 2**20)}, or type run_dir=FOLDER on another disk",
                )
            return free

        if (free := self.runtime.collectives.run_on_rank0(check)) < 2 * (certain + guess):
            self.tell(
                "warning",
                reason=f"the disk has {megabytes(free / 2**20)} free, and two checkpoints, which is what it takes to "
                f"replace one by the next, need about {megabytes(2 * (certain + guess) / 2**20)}",
            )

    def begin(self) -> None:
        """What must be there before the first step."""
        rewinds = "rewind" in (self.config.nonfinite.policy, self.config.spike.policy)
        if rewinds and not hasattr(self.state.source, "pass_over"):
            raise UserError(
                "a policy of rewind", "data that cannot leave out samples (a stream)", "choose the policy skip or stop"
            )
        if rewinds and self._saved_step is None:
            nothing = {"names": ["loss"], "totals": [0.0, 0.0]}
            self.save({"metrics": {}, "evaluation_due": False, "interval": nothing, "seconds": 0.0})
            if not self.settle():
                raise UserError(
                    "a policy of rewind, which needs a checkpoint to go back to",
                    "the first one could not be written",
                    "make room on the disk, or choose the policy skip or stop",
                )

    def wants(self, step: int) -> bool:
        """Whether rank 0's clock asks for a checkpoint; it asks through the control word."""
        minutes = self.config.checkpoint.minutes
        return self.runtime.is_main and minutes is not None and time.monotonic() - self._last > 60 * minutes

    def due(self, step: int, asked: bool) -> bool:
        kept = self.config.checkpoint
        by_step = kept.every is not None and step % kept.every == 0
        return (asked or by_step) and step != self._saved_step

    def save(self, around: dict[str, Any]) -> None:
        """Copy the state, and let it be written while training goes on; `around` is what the loop knows beside it."""
        self.settle()
        heartbeat, before = self.runtime.heartbeat, self.runtime.heartbeat.phase
        step = self.state.stepper.counters.step
        heartbeat.beat("snapshot", step)
        tensors, aliases, state = self.state.capture()
        if not self.state.alike:
            state = merged(self.runtime.collectives.gather_json(state))
        if not self._saves:
            self._check_alike()
        self._saves += 1
        values = {
            "state": state,
            "config": as_saved(self.config),
            "plan": self.plan.as_dict(),
            "world": self.runtime.world.size,
            "versions": {"lockstep": lockstep.__version__, "torch": str(torch.__version__)},
            **around,
        }
        slices = self._share(tensors)
        self.saver.save(step, slices, aliases, values, self.state.steady())
        self._open, self._saved_step, self._rewinds = True, step, 0
        self._last = time.monotonic()
        self._seed_host(step)
        heartbeat.beat(before)

    def _check_alike(self) -> None:
        """What the task and the user's loop keep should be the same on every rank; rank 0's is what is saved."""
        everybody = self.runtime.collectives.gather_json(self.state.digest_of_others())
        for name in everybody[0]:
            if len({one[name] for one in everybody}) > 1:
                self.tell("warning", reason=f"the state of {name!r} differs between the ranks: rank 0's is saved")

    def prepare(self) -> None:
        """Allocate the buffer for snapshots early, so that the first save is as short as the others."""
        tensors, _, _ = self.state.capture_tensors()
        self.saver.prepare(self._share(tensors))

    def _share(self, tensors: dict[str, torch.Tensor]) -> list[Slice]:
        """What this rank writes."""
        mine, world = sizes_of(tensors), self.runtime.world
        everybody = [mine] * world.size if self.state.alike else self.runtime.collectives.gather_json(mine)
        return share_out(tensors, world.rank, everybody)

    def poll(self) -> bool:
        """Tell what has been written. Whether this rank's part of a save has failed: the control word carries that."""
        for report in self.saver.poll():
            self._tell(report)
        return self.saver.failed

    def give_up(self) -> None:
        """Some rank could not write its part: nobody commits it, training goes on."""
        reasons = self.runtime.collectives.gather_json(self.saver.trouble)
        if not any(reasons):
            return  # it has been dealt with already: the control word comes a step late
        own = {rank: reason for rank, reason in enumerate(reasons) if reason and not reason.startswith("rank ")}
        told = "; ".join(f"rank {rank}: {reason}" for rank, reason in own.items()) or next(filter(None, reasons), "")
        step = self._saved_step
        self.saver.abandon(told)
        self.saver.wait()
        self._open, self._saved_step = False, None
        for _ in self.saver.poll():
            pass  # told here, once, with the reasons of all ranks
        self.tell(
            "warning",
            reason=f"THE CHECKPOINT OF STEP {step} WAS NOT WRITTEN: {told}. Training goes on; the last good one is "
            f"{self._newest()}",
        )

    def settle(self) -> bool:
        """Wait until the save in flight has been committed or given up, on all ranks. Whether all is well."""
        if not self._open:
            return True
        heartbeat, before = self.runtime.heartbeat, self.runtime.heartbeat.phase
        heartbeat.beat("commit")
        self.saver.wait_part()
        if any(self.runtime.collectives.gather_json(self.saver.trouble)):
            self.give_up()
            heartbeat.beat(before)
            return False
        for report in self.saver.wait():
            self._tell(report)
        well = not any(self.runtime.collectives.gather_json(self.saver.trouble))  # rank 0 may have failed to commit
        if not well:
            self.give_up()
        self._open = False
        heartbeat.beat(before)
        return well

    def close(self, patience: float = 0.0) -> None:
        """What is in flight gets `patience` seconds more: after an error it may be all that is left of the run."""
        if self._open and patience:
            self.saver.wait(patience)
        self.saver.close()

    def newest_path(self) -> Path | None:
        return next(iter(self.store.committed()), None)

    def _newest(self) -> str:
        newest = self.newest_path()
        return newest.name if newest else "none: there is no checkpoint yet"

    def _tell(self, report: Report) -> None:
        if report.path is None:
            return  # not committed: `give_up` tells, when all ranks know
        if report.error:
            self.tell("warning", reason=f"the checkpoint of step {report.step} is safe, but then: {report.error}")
        self.tell(
            "checkpoint",
            step=report.step,
            path=self.folder.as_shown(report.path),
            mb=_megabytes_in(report.path),
            stall_s=report.stall_s,
            write_s=report.write_s,
        )

    def _seed_host(self, step: int) -> None:
        """Python's and numpy's generators start anew with every checkpoint: a resumed run draws what it would have."""
        seed_host(derive(self.config.seed, "checkpoint", step))


def _megabytes_in(folder: Path) -> float | None:
    try:
        return sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    except FileNotFoundError:  # others are allowed to delete it
        return None


def _check_version(values: dict[str, Any]) -> None:
    missing = {"state", "config", "world", *AROUND} - values.keys()
    if missing:
        raise UserError(
            "a checkpoint of a Lockstep run",
            f"one without {', '.join(sorted(missing))}",
            "resume with the version of Lockstep that wrote it (lockstep ckpt show)",
        )
