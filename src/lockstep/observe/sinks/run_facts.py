"""The facts about a run for sinks of services: its settings, and a name that stays the same after every resume."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import yaml

from lockstep.run_folder.names import CONFIG


def settings_of(run_dir: Path) -> dict[str, Any]:
    """Return the settings of the run, as its folder holds them."""
    path = run_dir / CONFIG
    return yaml.safe_load(path.read_text()) if path.exists() else {}


# The file in the run folder that holds its `run_id`.
RUN_ID = ".sink-id"


def run_id(run_dir: Path) -> str:
    """Return a name for the run that is the same after every resume, and that no other run has."""
    # Drawn once, by the first run in this folder.
    path = run_dir / RUN_ID
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:16])

    return path.read_text()
