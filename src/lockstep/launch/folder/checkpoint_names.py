"""The names of files and folders in RUN/checkpoints. `lockstep.checkpoint` describes what they are.

This module imports no torch: the launcher uses it before any rank exists.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Container
from typing import Literal

# A folder with this file is a complete checkpoint.
MANIFEST = "manifest.json"

# These files are next to the checkpoints: one names the newest, one has the token of the only attempt allowed to
# commit, and one exists if the contents of some checkpoints are in an object store.
LATEST = "latest"
OWNER = "owner"
OBJECTS = "objects"

# The names that a run writes in this folder, as a pattern.
WRITTEN = f"{LATEST}|{OWNER}|{OBJECTS}|step-.*"

_COMMITTED = re.compile("step-([0-9]{8}|[1-9][0-9]{8,17})")
_SET_ASIDE = re.compile(r"step-\d{8,18}\.(damaged|undone)\d*")
_TEMPORARY = re.compile(r"step-\d{8,18}\.tmp-([0-9A-Za-z]+)(-\w+)?")
_CONFIRMATION = re.compile(r"rank-\d+\.json")

# How the last part of a temporary name begins if the folder is an old checkpoint that is being deleted. Otherwise it
# is a draft: a save that is not committed yet.
_DELETING = "gone"


# ---- committed checkpoints ----


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_in(name: str) -> int | None:
    """Return the step whose checkpoint has this name; None if no step has it."""
    # A step has only one name, padded to eight digits: "step-000000007" is not a name of step 7.
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match else None


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def name_aside(name: str, suffix: Literal["damaged", "undone"], taken: Container[str]) -> str:
    """Return the first name that is not `taken` for a checkpoint that is set aside."""
    # The same step may have been set aside before.
    candidates = (f"{name}.{suffix}{number or ''}" for number in itertools.count())
    return next(candidate for candidate in candidates if candidate not in taken)


def is_set_aside(name: str) -> bool:
    return _SET_ASIDE.fullmatch(name) is not None


# ---- temporary names: drafts, and checkpoints that are being deleted ----


def draft_name(step: int, token: str, number: int) -> str:
    """Return the name of the folder of a save that is not committed yet."""
    # The token keeps writers of an earlier attempt out of the folder, and the number keeps out writers of an earlier
    # save of the same step.
    return f"{folder_name(step)}.tmp-{token}-{number}"


def name_to_delete(name: str, token: str) -> str:
    """Return a new name for a checkpoint that is about to be deleted."""
    return f"{name}.tmp-{token}-{_DELETING}{secrets.token_hex(4)}"


def token_in(name: str) -> str | None:
    """Return the token of the attempt that writes or deletes this folder; None if it is not such a folder."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else None


def is_draft(name: str) -> bool:
    """Return whether a folder is a save that is not committed yet."""
    match = _TEMPORARY.fullmatch(name)
    return match is not None and not (match[2] or "").startswith(f"-{_DELETING}")


def confirmation_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def is_confirmation(name: str) -> bool:
    return _CONFIRMATION.fullmatch(name) is not None
