"""Finds the checkpoint to resume from, and restores a run from it.

`CheckpointManager` decides when: at the start, and when a run rewinds. All ranks call these methods together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.search import wait_for_newest_valid
from lockstep.checkpoint.state.run_state import RunState
from lockstep.checkpoint.storage import Checkpoint, CheckpointStorage, set_aside, set_aside_after
from lockstep.config import RunConfig
from lockstep.config.changes import Change, config_changes
from lockstep.errors import UserError
from lockstep.launch.folder.checkpoint_names import step_in
from lockstep.launch.folder.run_dir import is_checkpoint, run_of
from lockstep.launch.folder.start_from import StartFrom
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.seeds import reseed_at


@dataclass(frozen=True)
class Resumed:
    """The result of a resume or a rewind."""

    steps_done: int
    location: str  # of the checkpoint
    world_size: int  # how many ranks wrote the checkpoint
    global_batch: int  # of the run that saved it
    changed_settings: list[Change]
    changes: list[str]  # all differences, as text, including `changed_settings`
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

    def find(self, start: StartFrom) -> CheckpointReader | None:
        """Find the checkpoint from which the run starts; None if it starts from its beginning. Collective."""
        newest = self.find_newest() if start.newest else None
        if newest is None and start.named:
            return self._find_named(Path(start.named))

        return newest

    def find_newest(self) -> CheckpointReader | None:
        """Find this run's newest valid checkpoint; None if it has none. Collective."""
        return self._find(self.storage)

    def _find_named(self, path: Path) -> CheckpointReader:
        """Find what --resume names: a checkpoint, or a run, whose newest valid checkpoint is used. Collective."""
        if is_checkpoint(path):
            checkpoint = Checkpoint.at(path)
            reader = self._find(checkpoint.storage, checkpoint.name)
        else:
            reader = self._find(CheckpointStorage(run_of(path) / "checkpoints"))

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
        reader = wait_for_newest_valid(storage, self.runtime, self.config.checkpoint.timeout, only)
        if reader is not None:
            self._report_skipped(reader)

        return reader

    def _report_skipped(self, reader: CheckpointReader) -> None:
        """Warn about newer checkpoints, which are damaged. They are set aside if they belong to this run."""
        # Only rank 0 renames, and only its event is logged.
        for skipped in reader.skipped:
            name = skipped.checkpoint.name
            problem = f"checkpoint {name} {skipped.verdict}: {skipped.file}: {skipped.why}"
            text = f"{problem}; resuming from {reader.checkpoint.name}"

            ours = skipped.checkpoint.storage == self.storage
            if self.runtime.is_main and ours:
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
        self._check_fixed(changed_settings)
        other_changes = self.state.restore(reader, values, changed_settings)
        steps_done = reader.manifest.step

        # --resume may name a checkpoint that was set aside, which is never the newest one.
        in_own_storage = reader.checkpoint.storage == self.storage
        in_own_folder = in_own_storage and step_in(reader.checkpoint.name) is not None

        # Set aside later checkpoints of this run: it goes back to this step and will write them again. If this one was
        # set aside before, another one may have the name of its step. All ranks wait here, because none may save before
        # that. The storage of another run must not change.
        last_kept = steps_done if in_own_folder else steps_done - 1
        self.runtime.collectives.run_on_rank0(
            lambda: set_aside_after(self.storage, last_kept) if in_own_storage else None
        )

        reseed_at(self.config.seed, steps_done)

        return Resumed(
            steps_done=steps_done,
            location=str(reader.checkpoint.path),
            world_size=values["world"],
            global_batch=values["plan"]["global_batch"],
            changed_settings=changed_settings,
            changes=[*map(str, changed_settings), *other_changes],
            in_own_folder=in_own_folder,
        )

    def _check_fixed(self, changed_settings: list[Change]) -> None:
        """Refuse a changed setting on which the task's saved state depends (`Task.fixed_settings`)."""
        for key, before, now in changed_settings:
            if key in self.state.fixed_settings:
                raise UserError(
                    f"{key}={now} does not fit the checkpoint: the task saved its state with {key}={before}",
                    "",
                    f"set {key}={before}, or start a new run from the exported weights",
                )
