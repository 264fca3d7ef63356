"""The variables that our launcher sets for its ranks, and those that belong to one job in general."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# The folder that a rank shares with its launcher, and what is in it: `runtime/attempt_folder.py`.
ATTEMPT_FOLDER = "LOCKSTEP_ATTEMPT_FOLDER"

# The number of the rank's attempt, counted from 0.
ATTEMPT = "LOCKSTEP_ATTEMPT"

# For rank 0 of a job on several machines: the file of its coordinator's term.
TERM_FILE = "LOCKSTEP_TERM_FILE"

# For ranks on one machine, the file of their store; for ranks on several machines, the file with the key of their
# store, and the store's port.
STORE_FILE = "LOCKSTEP_STORE_FILE"
STORE_KEY_FILE = "LOCKSTEP_STORE_KEY_FILE"
STORE_PORT = "LOCKSTEP_STORE_PORT"

# Set by torchrun alone.
TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
TORCHRUN_RESTARTS = "TORCHELASTIC_RESTART_COUNT"

# The variables of one rank, or of one job, which the ranks of another job must not inherit.
OF_ONE_JOB = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *(ATTEMPT_FOLDER, ATTEMPT, TERM_FILE, STORE_FILE, STORE_KEY_FILE, STORE_PORT),
    *(TORCHRUN_ID, TORCHRUN_RESTARTS, "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
    "TORCHELASTIC_ERROR_FILE",
)


def without_job(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that a new job may inherit, also if this process is a rank of one."""
    return {name: value for name, value in env.items() if name not in OF_ONE_JOB}


def variables_of_rank(rank: int, world: int, store: Path, attempt_folder: Path) -> dict[str, str]:
    """Return the variables of a rank on this machine, for ranks that are started without our launcher."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        STORE_FILE: str(store),
        ATTEMPT_FOLDER: str(attempt_folder),
    }


def from_launcher(name: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Return the value that our launcher has given this variable for this process, or None.

    If a rank of our launcher starts torchrun, the ranks of torchrun inherit the variable, but they are ranks of another
    job.
    """
    return None if TORCHRUN_ID in env else env.get(name)
