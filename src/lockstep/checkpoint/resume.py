"""Finds the checkpoint to resume from, and restores a run from it.

`CheckpointManager` decides when: at the start, and when a run rewinds. All ranks call these methods together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.load import CheckpointReader, newest_valid
from lockstep.checkpoint.loop_state import LoopState
from lockstep.checkpoint.manifest import Damaged
from lockstep.checkpoint.state.part import optional_members
from lockstep.checkpoint.state.run_state import RunState
from lockstep.checkpoint.state.state_tree import unpack
from lockstep.checkpoint.storage import Checkpoint, CheckpointStorage, open_storage, set_aside, set_aside_after
from lockstep.config import RunConfig
from lockstep.config.changes import Change, config_changes
from lockstep.errors import UserError
from lockstep.launch.folder.checkpoint_names import step_in
from lockstep.launch.folder.run_dir import is_checkpoint, run_of
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.seeds import derive, seed_host


@dataclass(frozen=True)
class Resumed:
    """The result of a resume or a rewind."""

    steps_done: int
    location: str  # of the checkpoint
    world_size: int  # how many ranks wrote the checkpoint
    global_batch: int  # of the run that saved it
    changed_settings: list[Change]
    changes: list[str]  # all differences, as text, including `changed_settings`
    loop: LoopState
    in_own_folder: bool  # whether it was one of this run's own checkpoints, and not one that was set aside


class Resumer:
    """Finds and loads checkpoints for one run, whose own ones are in `storage`."""

    def __init__(
        self, storage: CheckpointStorage, state: RunState, config: RunConfig, runtime: Runtime, log_event: EventLogger
    ):
        self.storage = storage
        self.state = state
        self.config = config
        self.runtime = runtime
        self.log_event = log_event

    def find_newest(self) -> CheckpointReader | None:
        """Find this run's newest valid checkpoint; None if it has none. Collective."""
        return self._find(self.storage)

    def find_named(self, path: Path) -> CheckpointReader:
        """Find what --resume names: a checkpoint, or a run, whose newest valid checkpoint is used. Collective."""
        if is_checkpoint(path):
            checkpoint = Checkpoint.at(path)
            reader = self._find(checkpoint.storage, checkpoint.name)
        else:
            reader = self._find(open_storage(run_of(path) / "checkpoints"))

        if reader is None:
            raise UserError(
                f"--resume {path} cannot be used: that run has no checkpoint",
                "",
                "leave --resume out to start from the beginning",
            )

        return reader

    def _find(self, storage: CheckpointStorage, only: str | None = None) -> CheckpointReader | None:
        """Find the newest valid checkpoint of a storage, or `only` this one. Collective."""
        self.runtime.heartbeat.beat("load")
        world = self.runtime.world

        reader = newest_valid(storage, world.rank, world.size, self.runtime.collectives.gather_json, only)
        if reader is not None:
            self._report_skipped(reader)

        return reader

    def _report_skipped(self, reader: CheckpointReader) -> None:
        """Warn about newer checkpoints that are not valid. Damaged ones are set aside if they belong to this run."""
        # Only rank 0 renames, and only its event is logged. A checkpoint that cannot be read, or has the wrong format,
        # is not damaged; `load` sets it aside with all others that are newer.
        for skipped in reader.skipped:
            name = skipped.checkpoint.name
            problem = f"checkpoint {name} {skipped.verdict}: {skipped.file}: {skipped.why}"
            text = f"{problem}; resuming from {reader.checkpoint.name}"

            ours = skipped.checkpoint.storage == self.storage
            if isinstance(skipped, Damaged) and self.runtime.is_main and ours:
                text += f". The damaged checkpoint is kept as {set_aside(self.storage, name, 'damaged')}"

            self.log_event("warning", reason=text)

    def load(self, reader: CheckpointReader) -> Resumed:
        """Check the settings, restore the state, and set aside later checkpoints of this run. Collective."""
        values = reader.manifest.values
        missing = {"state", "config", "world", "plan"} - values.keys()
        if missing:
            raise UserError(
                f"the checkpoint cannot be resumed: it does not contain {', '.join(sorted(missing))}",
                "",
                "resume with the version of Lockstep that wrote it (lockstep ckpt show)",
            )

        # Check the settings before anything is changed.
        changed_settings = config_changes(values["config"], self.config)
        self._check_lasting(changed_settings)
        other_changes = self.state.restore(reader, values["state"], changed_settings)
        steps_done = reader.manifest.step

        # Set aside later checkpoints of this run: it goes back to this step and will write them again. All ranks wait
        # here, because none may save before that. The storage of another run must not change.
        in_own_storage = reader.checkpoint.storage == self.storage
        new_names: dict[str, str] = self.runtime.collectives.run_on_rank0(
            lambda: set_aside_after(self.storage, steps_done) if in_own_storage else {}
        )
        for skipped in reader.skipped:
            name = skipped.checkpoint.name
            if name in new_names:
                self.log_event(
                    "warning", reason=f"checkpoint {name}, which {skipped.verdict}, is kept as {new_names[name]}"
                )

        # As in `CheckpointManager.save`, so that the run draws the same random numbers as if it had not stopped.
        seed_host(derive(self.config.seed, "checkpoint", steps_done))

        return Resumed(
            steps_done=steps_done,
            location=reader.checkpoint.location,
            world_size=values["world"],
            global_batch=values["plan"]["global_batch"],
            changed_settings=changed_settings,
            changes=[*map(str, changed_settings), *other_changes],
            # --resume may name a checkpoint that was set aside, which is never the newest one.
            in_own_folder=in_own_storage and step_in(reader.checkpoint.name) is not None,
            loop=LoopState.from_saved(unpack(values.get("loop", {}), reader.read, self.runtime.device)),
        )

    def _check_lasting(self, changed_settings: list[Change]) -> None:
        """Refuse a changed setting on which the task's saved state depends (`Task.lasting`)."""
        lasting = [key for part in self.state.parts.values() for key in optional_members(part).lasting]
        for key, before, now in changed_settings:
            if key in lasting:
                raise UserError(
                    f"{key}={now} does not fit the checkpoint: the task saved its state with {key}={before}",
                    "",
                    f"set {key}={before}, or start a new run from the exported weights",
                )
