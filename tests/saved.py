"""What a run has saved."""

from __future__ import annotations

from pathlib import Path

from lockstep.run_folder.checkpoint_facts import read_checkpoint_facts


def newest_step(checkpoints: Path) -> int | None:
    """Return the step of the newest committed checkpoint in this folder; while a run goes back to one, of that one."""
    return read_checkpoint_facts(checkpoints).newest_step
