"""The variables that our launcher sets for its ranks, and those that belong to one job in general."""

from __future__ import annotations

import os
from collections.abc import Mapping

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


def from_launcher(name: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Return the value that our launcher has given this variable for this process, or None.

    If a rank of our launcher starts torchrun, the ranks of torchrun inherit the variable, but they are ranks of another
    job.
    """
    return None if TORCHRUN_ID in env else env.get(name)
