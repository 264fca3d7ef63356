"""Find the checkpoint from which a run resumes, and restore the run.

`CheckpointManager` calls them at the start, and `Rewinder` when a run rewinds. All ranks call these methods together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint.choose import checkpoints_at
from lockstep.checkpoint.loading.search import Found, wait_for_newest_valid
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.saving.pending import PendingSave
from lockstep.checkpoint.state.run_state import RunState, require_values
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.checkpoint.storage.retry import retry_on_rank0
from lockstep.checkpoint.storage.transitions import set_aside, set_aside_later
from lockstep.config import RunConfig
from lockstep.config.changes import Change, config_changes
from lockstep.errors import UserError
from lockstep.run_folder.checkpoint_names import step_in
from lockstep.run_folder.opened import RunFolder
from lockstep.run_folder.start_from import StartFrom
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.seeds import reseed_at

# The keys in `Manifest.values` that a resume needs, besides the state.
NEEDED_VALUES = ("config", "world", "plan")


@dataclass(frozen=True)
class Resumed:
    """The result of a resume or a rewind."""

    step: int
    location: str  # of the checkpoint
    world_size: int  # how many ranks wrote the checkpoint
    global_batch: int  # of the run that saved it
    changed_settings: list[Change]
    other_changes: list[str]  # since the save, besides `changed_settings`

    @property
    def changes(self) -> list[str]:
        """All changes since the save, as text."""
        return [*map(str, self.changed_settings), *self.other_changes]


@dataclass(frozen=True, eq=False)
class Resumer:
    """Finds and loads checkpoints for one run, which keeps its own checkpoints in `storage`."""

    folder: RunFolder
    storage: CheckpointStorage
    state: RunState
    pending: PendingSave
    config: RunConfig
    runtime: Runtime
    log_event: EventLogger
    fixed_settings: Collection[str]  # see `Task`

    def find(self, start: StartFrom) -> CheckpointReader | None:
        """Find the checkpoint from which the run starts; None if it starts from its beginning. Collective."""
        reader = self._find_in(self.storage) if start.newest else None
        if reader is not None or start.named is None:
            return reader

        # --resume names a checkpoint, or a run, whose newest valid checkpoint is used.
        path = Path(start.named)
        reader = self._find_in(*checkpoints_at(path))
        if reader is None:
            raise UserError(
                f"--resume {path} cannot be used: that run has no checkpoint",
                "" if path.exists() else "no such folder",
                "leave --resume out to start from the beginning",
            )

        return reader

    def _find_in(self, storage: CheckpointStorage, only: str | None = None) -> CheckpointReader | None:
        """Find the newest valid checkpoint of a storage, or `only` this one. Collective."""
        self.runtime.heartbeat.beat("load")
        found = wait_for_newest_valid(storage, self.runtime, self.config.checkpoint.timeout, only)
        if found is None:
            return None

        self._report_skipped(found)
        return found.reader

    def _report_skipped(self, found: Found) -> None:
        """Warn about the newer checkpoints, all of which are damaged, and set this run's own aside. Collective."""
        for skipped in found.skipped:
            name = skipped.checkpoint.name
            text = f"{skipped.sentence}; resuming from {found.reader.checkpoint.name}"

            kept_as = self._change_if_own(skipped.checkpoint.storage, partial(set_aside, self.storage, name, "damaged"))
            if kept_as:
                text += f". The damaged checkpoint is kept as {kept_as}"

            self.log_event("warning", reason=text)

    def load(self, reader: CheckpointReader, is_rewind: bool = False) -> Resumed:
        """Check the settings, restore the state, and set aside later checkpoints of this run. Collective.

        `is_rewind`: whether this process has trained before.
        """
        require_values(reader, *NEEDED_VALUES)
        values = reader.manifest.values

        # Check the settings before anything is changed.
        changed_settings = config_changes(values["config"], self.config)
        self._check_fixed(changed_settings)
        other_changes = self.state.restore(reader, changed_settings, is_rewind)

        # The run keeps the loaded checkpoint, unless it is of another run, or had been set aside: --resume may name it.
        loaded = reader.checkpoint
        step = reader.manifest.step
        is_kept = loaded.storage == self.storage and step_in(loaded.name) is not None

        # Set aside the checkpoints of this run that it will write again: the later ones. If the loaded one had been set
        # aside, there may be another one of its step, which the run will write again as well. All ranks wait here,
        # because none may save before this is done.
        last_kept = step if is_kept else step - 1
        self._change_if_own(loaded.storage, partial(set_aside_later, self.storage, last_kept))

        # A checkpoint that the run does not keep must be loaded again by later attempts, until the run has saved.
        if self.runtime.is_main and is_kept:
            self.folder.end_going_back()

        self.pending.note_loaded(step if is_kept else None)
        reseed_at(self.config.seed, step)

        return Resumed(
            step=step,
            location=str(loaded.path),
            world_size=values["world"],
            global_batch=values["plan"]["global_batch"],
            changed_settings=changed_settings,
            other_changes=other_changes,
        )

    def _change_if_own(self, storage: CheckpointStorage, act: Callable[[], Any]) -> Any:
        """Call `act` on rank 0, unless `storage` is of another run, which must not change.

        Return its result, or None, on every rank. Collective.
        """
        act_here = act if storage == self.storage else lambda: None
        problem = f"the checkpoints in {self.storage.root} cannot be set aside"
        return retry_on_rank0(self.runtime, self.config.checkpoint.timeout, act_here, problem)

    def _check_fixed(self, changed_settings: list[Change]) -> None:
        """Refuse a changed setting on which the task's saved state depends (`Task.fixed_settings`)."""
        for key, before, now in changed_settings:
            if key in self.fixed_settings:
                raise UserError(
                    f"{key}={now} does not fit the checkpoint: the task saved its state with {key}={before}",
                    "",
                    f"set {key}={before}, or start a new run from the exported weights",
                )
