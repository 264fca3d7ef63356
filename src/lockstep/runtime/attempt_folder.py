"""The folder that ranks share with their launcher, a new one for each attempt on each node, and the files in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER, from_launcher


def current(env: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the attempt whose rank this process is; None if our launcher has not started it."""
    folder = from_launcher(ATTEMPT_FOLDER, env)
    return Path(folder) if folder else None


def of_rank_0(env: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the attempt in its rank 0; None in all other processes.

    A rank that trains a model of its own is rank 0 of a world of one, but not of the attempt.
    """
    return current(env) if env.get("RANK") == "0" else None


# ---- from a rank ----


def heartbeat(folder: Path, rank: int) -> Path:
    """Return the file with the step and the phase of a rank (`runtime/heartbeat.py`)."""
    return folder / f"heartbeat-{rank}"


def exit_record(folder: Path, rank: int | str) -> Path:
    """Return the file that says how a rank ends (`launch/ranks/rank_record.py`). The rank may be a pattern."""
    return folder / f"rank-{rank}.json"


def stacks(folder: Path, rank: int) -> Path:
    """Return the file to which a rank appends its Python stacks (`launch/hangs/stacks.py`)."""
    return folder / f"stacks-{rank}"


def collectives(folder: Path, rank: int) -> Path:
    """Return the file with the last collectives of a rank (`launch/hangs/flight_recorder.py`)."""
    return folder / f"flight-{rank}.json"


def settings(folder: Path) -> Path:
    """Return the file with the settings that the launcher follows: it has no access to the task's defaults."""
    return folder / "settings.json"


# ---- from the launcher ----


def collectives_request(folder: Path) -> Path:
    """Return the file whose new contents ask every rank for its last collectives."""
    return folder / "dump-request"


def preempt_signal(folder: Path) -> Path:
    """Return the file with the signal that asked the ranks to save and exit (`runtime/preemption.py`)."""
    return folder / "preempt-signal"


def store(folder: Path) -> Path:
    """Return the file in which ranks of one machine meet."""
    return folder / "store"


def store_key(folder: Path) -> Path:
    """Return the file with the key of the store in which ranks of several machines meet."""
    return folder / "store.key"
